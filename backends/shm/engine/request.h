// One collective, or one message, as the shared-memory engine takes it: kinds, pointers and sizes;
// no tensors.
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

// What is not said for a kind is not looked at. Memory is borrowed until the operation is done.
struct Request {
  Kind kind = Kind::kBarrier;

  // kReduce, kBroadcast, kGather, kScatter: the rank at the one end. kSend, kRecv: the peer; a
  // receive may say kAnySource.
  int root = 0;
  int64_t tag = 0;  // kSend, kRecv

  // kAllReduce, kReduce (result at the root only), kReduceScatter. What is only moved has a dtype
  // as well, which must be the same on all ranks.
  Reduction reduction = {};
  // kAllReduce, kReduce: `tensor`, in place, of `count` elements. kReduceScatter: the result, of
  // `count` elements. kBroadcast, kSend, kRecv: `count` bytes.
  std::byte* tensor = nullptr;
  size_t count = 0;

  // By rank. kReduceScatter: what goes to whom, `count` elements each. kAllGather: `send` has one
  // entry, this rank's. kGather, kScatter, kAllToAll: what goes to whom and comes from whom, empty
  // where nothing does; sizes may differ.
  std::vector<Buffer> send = {};
  std::vector<Buffer> recv = {};
};

// What the ranks of a collective must agree on, packed for comparing: kind, reduce op, dtype, root;
// and the bytes of the whole, where all ranks know them.
struct Signature {
  uint64_t what = 0;
  uint64_t bytes = 0;

  // Sixteen bits for the fast path, of this and of which collective it is.
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
