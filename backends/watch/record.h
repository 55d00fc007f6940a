// What one rank called: as much of a collective as all ranks must agree on, small enough to note
// down at every call.
//
//   Record record{.op = Op::kAllReduce, .reduce_op = 0, .dtype = 6};
//   record.Add(1000);                                // one tensor of a thousand elements
//   ToString(record);                                // "allreduce(sum) float32 [1000]"
//   if (!Agree(record, theirs)) return Mismatch(ToString(record), ToString(theirs));
//
// No torch in here: reduce_op and dtype are the numbers of c10d::ReduceOp and c10::ScalarType.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

namespace ddp::backends::watch {

enum class Op : uint8_t {
  kBroadcast,
  kAllReduce,
  kAllReduceCoalesced,
  kAllReduceSparse,
  kReduce,
  kAllGather,
  kAllGatherIntoTensor,
  kAllGatherCoalesced,
  kAllGatherIntoTensorCoalesced,
  kGather,
  kScatter,
  kReduceScatter,
  kReduceScatterTensor,
  kReduceScatterTensorCoalesced,
  kAllToAll,
  kAllToAllBase,
  kBarrier,
  kMonitoredBarrier,
  kSend,
  kRecv,
  kRecvAnySource,  // the last
};

inline constexpr uint8_t kNoReduceOp = std::numeric_limits<uint8_t>::max();
inline constexpr int8_t kNoDtype = -1;
inline constexpr int32_t kNoRoot = -1;

// Folds `value` into a hash; the order matters.
inline uint64_t Mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15u;  // 2^64 / golden ratio
  return hash ^ (hash >> 32);
}

struct Record {
  uint64_t numel = 0;   // elements, in all tensors together
  uint64_t layout = 0;  // hash of the tensors' numbers of elements, in their order
  uint32_t tensors = 0;
  int32_t root = kNoRoot;  // of send and recv: the other rank
  Op op = Op::kBarrier;
  uint8_t reduce_op = kNoReduceOp;
  int8_t dtype = kNoDtype;
  // Whether `numel` is one that all ranks must have. Not so where each rank may bring its own:
  // gather, scatter and alltoall of unequal parts.
  bool same_numel = true;

  void Add(uint64_t tensor_numel) {
    numel += tensor_numel;
    layout = Mix(layout, tensor_numel);
    ++tensors;
  }

  friend bool operator==(const Record&, const Record&) = default;
};

// Whether two ranks may make these calls as the same collective of their group.
bool Agree(const Record& a, const Record& b);

// For collectives that only some ranks know to be of equal parts, numbers of elements are compared
// when two records meet (Agree) and stay out of the rolling signature.
inline bool NumelIsSigned(Op op) {
  return op != Op::kGather && op != Op::kScatter && op != Op::kAllToAll && op != Op::kAllToAllBase;
}

// The rolling signature of a sequence of collectives: equal on two ranks if and only if (but for
// hash collisions) they have made the same calls in the same order.
inline uint64_t Extend(uint64_t signature, const Record& record) {
  const uint64_t call = static_cast<uint64_t>(record.op) |
                        static_cast<uint64_t>(record.reduce_op) << 8 |
                        static_cast<uint64_t>(static_cast<uint8_t>(record.dtype)) << 16 |
                        static_cast<uint64_t>(static_cast<uint32_t>(record.root)) << 32;
  signature = Mix(signature, call);
  return NumelIsSigned(record.op) ? Mix(signature, record.layout + record.tensors) : signature;
}

// "allreduce(sum) float32 [1000]", "broadcast(root 0) int64 [12 in 3 tensors]",
// "recv(from rank 2) float32 [10]".
std::string ToString(const Record& record);

}  // namespace ddp::backends::watch
