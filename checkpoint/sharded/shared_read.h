// Which rank reads what of a tensor that all ranks want whole. Free of torch.
#pragma once

#include <cstdint>
#include <vector>

#include "checkpoint/parts.h"
#include "checkpoint/sharded/manifest.h"

namespace ddp::checkpoint::sharded {

// A piece of the tensor, which rank `reader` reads: bytes [begin, end) of the whole, row-major.
struct Chunk {
  Part part;  // Whole, or a range in row-major order
  uint64_t begin = 0;
  uint64_t end = 0;
  int reader = 0;
};

// Cuts `tensor` at blocks, so that none is read by two ranks, and gives each chunk to the rank that
// reads least, which adds to `loads` (bytes by rank). A tensor that is not stored in row-major
// order is one chunk. The same on every rank that makes the same calls. Thread-safe.
std::vector<Chunk> SpreadReads(const StoredTensor& tensor, std::vector<uint64_t>& loads);

}  // namespace ddp::checkpoint::sharded
