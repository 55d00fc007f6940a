// The signature of one collective call: the arguments that must agree on all ranks. Small enough to
// be recorded at every call.
//
//   CallRecord record{.kind = CollectiveKind::kAllReduce, .reduce_op = 0, .dtype = 6};
//   record.Add(1000);                                // one tensor of a thousand elements
//   ToString(record);                                // "allreduce(sum) float32 [1000]"
//   if (!Agree(record, theirs)) return Mismatch(ToString(record), ToString(theirs));
//
// Does not depend on torch: reduce_op and dtype are the numeric values of c10d::ReduceOp and
// c10::ScalarType.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

namespace ddp::backends::watch {

// Point-to-point messages included.
enum class CollectiveKind : uint8_t {
  kBroadcast,
  kAllReduce,
  kAllReduceCoalesced,
  kAllReduceSparse,
  kReduce,
  kAllGather,
  kAllGatherSingle,
  kAllGatherCoalesced,
  kAllGatherSingleCoalesced,
  kGather,
  kScatter,
  kReduceScatter,
  kReduceScatterSingle,
  kReduceScatterSingleCoalesced,
  kAllToAll,
  kAllToAllSingle,
  kBarrier,
  kMonitoredBarrier,
  kSend,
  kRecv,
  kRecvAnySource,  // must stay the last: Decode checks the range
};

inline constexpr uint8_t kNoReduceOp = std::numeric_limits<uint8_t>::max();
inline constexpr int8_t kNoDtype = -1;
inline constexpr int32_t kNoRoot = -1;

// Combines `value` into `hash`. Depends on the order of calls.
inline uint64_t Mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15u;  // 2^64 / golden ratio
  return hash ^ (hash >> 32);
}

struct CallRecord {
  uint64_t numel = 0;      // total number of elements of all tensors
  uint64_t layout = 0;     // hash of the number of elements of each tensor, in order
  uint32_t tensors = 0;    // number of tensors
  int32_t root = kNoRoot;  // for send and recv: the other rank
  CollectiveKind kind = CollectiveKind::kBarrier;
  uint8_t reduce_op = kNoReduceOp;
  int8_t dtype = kNoDtype;
  // Whether `numel` must be equal on all ranks. False for gather, scatter and alltoall with parts
  // of different sizes.
  bool same_numel = true;

  void Add(uint64_t tensor_numel) {
    numel += tensor_numel;
    layout = Mix(layout, tensor_numel);
    ++tensors;
  }

  friend bool operator==(const CallRecord&, const CallRecord&) = default;
};

// Whether two ranks that make these calls take part in the same collective.
bool Agree(const CallRecord& a, const CallRecord& b);

// Whether the rolling signature includes numbers of elements. It does not for collectives where
// only some ranks know whether all parts have the same size: there only Agree compares them.
inline bool SignatureIncludesNumel(CollectiveKind kind) {
  return kind != CollectiveKind::kGather && kind != CollectiveKind::kScatter &&
         kind != CollectiveKind::kAllToAll && kind != CollectiveKind::kAllToAllSingle;
}

// The rolling signature of a sequence of collectives, extended by one call; 0 for no calls. Equal
// on two ranks if and only if both have made the same calls in the same order, except for hash
// collisions.
inline uint64_t Extend(uint64_t signature, const CallRecord& record) {
  const uint64_t call = static_cast<uint64_t>(record.kind) |
                        static_cast<uint64_t>(record.reduce_op) << 8 |
                        static_cast<uint64_t>(static_cast<uint8_t>(record.dtype)) << 16 |
                        static_cast<uint64_t>(static_cast<uint32_t>(record.root)) << 32;
  signature = Mix(signature, call);
  return SignatureIncludesNumel(record.kind) ? Mix(signature, record.layout + record.tensors)
                                             : signature;
}

// "allreduce(sum) float32 [1000]", "broadcast(root 0) int64 [12 in 3 tensors]",
// "recv(from rank 2) float32 [10]".
std::string ToString(const CallRecord& record);

}  // namespace ddp::backends::watch
