// One collective or one message, as input of the shared-memory engine: kind, pointers and sizes; no
// tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "backends/common/buffer.h"
#include "backends/common/reduce_kernels.h"

namespace ddp::backends::shm {

enum class Kind : uint8_t {
  kBarrier,
  kAllReduce,
  kReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kGather,
  kScatter,
  kAllToAll,
  kSend,
  kRecv,
};

constexpr int kAnySource = -1;

// Members that are not named for a kind are ignored. Memory is borrowed until the operation is
// done.
struct Request {
  Kind kind = Kind::kBarrier;

  // kReduce, kBroadcast, kGather, kScatter: the root. kSend, kRecv: the peer; kAnySource is allowed
  // for kRecv.
  int root = 0;
  int64_t tag = 0;  // kSend, kRecv

  // kAllReduce, kReduce (result at the root only), kReduceScatter. For kinds that only move data,
  // the dtype alone is used: it must be the same on all ranks.
  Reduction reduction = {};
  // kAllReduce, kReduce: `tensor`, in place, of `count` elements. kReduceScatter: the result, of
  // `count` elements. kBroadcast, kSend, kRecv: `count` bytes.
  std::byte* tensor = nullptr;
  size_t count = 0;

  // Both are indexed by rank: `send[r]` goes to rank r, `recv[r]` comes from rank r.
  // kReduceScatter: `send`, `count` elements each. kAllGather: `send` has one entry, for all ranks.
  // kGather, kScatter, kAllToAll: entries are empty where no data is sent; sizes may differ.
  std::vector<Buffer> send = {};
  std::vector<Buffer> recv = {};
};

// Arguments that must be equal on all ranks of a collective, packed for comparison: `what` is kind,
// reduce op, dtype and root; `bytes` is the size of the data, 0 if not all ranks know it.
struct Signature {
  uint64_t what = 0;
  uint64_t bytes = 0;

  // 16 bits of hash over this and the number of the collective, for the fast path.
  uint16_t Hash(uint64_t sequence) const {
    uint64_t bits = (what + sequence * 0xd6e8feb86659fd93u) ^ bytes * 0x9e3779b97f4a7c15u;
    bits *= 0xff51afd7ed558ccdu;
    return static_cast<uint16_t>((bits ^ bits >> 32) * 0xc4ceb9fe1a85ec53u >> 48);
  }
  friend bool operator==(const Signature&, const Signature&) = default;
};

Signature SignatureOf(const Request& request);
const char* Name(Kind kind);

// "allreduce(SUM) of 1000 x float32", "broadcast(root 2) of 400 bytes".
std::string ToString(const Signature& signature);
std::string ToString(const Request& request);

}  // namespace ddp::backends::shm
