// Computes which elements of a list of tensors each rank owns, from sizes and indices, without
// torch.
//
// The tensors lie one after the other in one storage. Each starts on a unit of 64 bytes, and what
// ranks own is cut on units, so that vectorised kernels round a piece as they round the whole.
//
//   const Partition partition = Partition::Flat({1000, 17}, /*element_bytes=*/4, /*world_size=*/2);
//   partition.offset(1);             // 1008: of the second tensor in the storage, in elements
//   partition.Pieces(/*rank=*/0);    // {{tensor 0, elements [0, 512)}}
//
//               head      block 0 (main)                 units, 2 ranks, 65 units
//   storage   | 0 |  1 … 32 (rank 0)  | 33 … 64 (rank 1) |
//
// Flat: the first (units mod world size) units are the head, one for each of the first ranks; the
// rest is cut in blocks, and each block into equal consecutive parts, one per rank. Without a limit
// of block size there is one block, and every rank's elements are consecutive but for the head. No
// rank owns more than one unit more than another. One in-place all-gather or reduce-scatter moves
// one block.
//
// ByTensor: whole tensors, the largest first, each to the rank that owns least; for optimizers
// whose update of a tensor needs all of it. Each rank's tensors, in ascending order, make up its
// part of the storage; all parts are as long as the longest.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace ddp::zero {

// Ranks r < owners own elements [begin + r * stride, begin + r * stride + part) of the storage,
// which are elements [shard_begin, shard_begin + part) of the rank's shard. `owners` is the world
// size, except in the head, where it may be smaller.
struct Block {
  int64_t begin = 0;
  int64_t stride = 0;
  int64_t part = 0;
  int owners = 0;
  int64_t shard_begin = 0;

  friend bool operator==(const Block&, const Block&) = default;
};

// Elements [begin, end) of a tensor, in memory order.
struct Piece {
  int tensor = 0;
  int64_t begin = 0;
  int64_t end = 0;
  int64_t shard_begin = 0;  // of `begin` in the owner's shard

  int64_t size() const { return end - begin; }
  friend bool operator==(const Piece&, const Piece&) = default;
};

// Immutable; thread-safe.
class Partition {
 public:
  static constexpr int64_t kUnitBytes = 64;

  // `numels`: elements of each tensor, 0 allowed. `element_bytes`: a power of two, at most 64.
  // `max_block_bytes`: of the blocks by which gradients are reduced; one unit per rank at least.
  // 0: no limit.
  static Partition Flat(absl::Span<const int64_t> numels, int64_t element_bytes, int world_size,
                        int64_t max_block_bytes = 0);
  static Partition ByTensor(absl::Span<const int64_t> numels, int64_t element_bytes, int world_size,
                            int64_t max_block_bytes = 0);

  int world_size() const { return world_size_; }
  int num_tensors() const { return static_cast<int>(numels_.size()); }
  int64_t numel(int tensor) const { return numels_[tensor]; }
  int64_t unit() const { return unit_; }  // in elements

  // Sizes of the storage and of each rank's shard, in elements, including padding.
  int64_t storage_size() const { return storage_size_; }
  int64_t shard_size() const { return shard_size_; }
  // Offset of a tensor in the storage, in elements.
  int64_t offset(int tensor) const { return offsets_[tensor]; }

  // Disjoint; together they have every element of every tensor. They determine which rank owns an
  // element; updated values are gathered block by block.
  const std::vector<Block>& blocks() const { return blocks_; }
  // The same elements in blocks of the given size, by which gradients are reduced, in ascending
  // order of where they begin. Each is part of one of blocks().
  const std::vector<Block>& reduce_blocks() const { return reduce_blocks_; }

  // The pieces that `rank` owns, in ascending order of tensors and elements.
  std::vector<Piece> Pieces(int rank) const;
  // Elements of tensors among them, without padding.
  int64_t OwnedElements(int rank) const;

 private:
  Partition(absl::Span<const int64_t> numels, int64_t element_bytes, int world_size);
  int64_t Units(int64_t numel) const { return (numel + unit_ - 1) / unit_; }
  void CutForReduction(const Block& block, int64_t max_part);

  std::vector<int64_t> numels_;
  int64_t unit_;
  int world_size_;
  int64_t storage_size_ = 0;
  int64_t shard_size_ = 0;
  std::vector<int64_t> offsets_;
  std::vector<Block> blocks_;
  std::vector<Block> reduce_blocks_;
};

// The part of elements [begin, end) of the storage that lies in part `rank` of the block; empty if
// begin >= end.
struct Overlap {
  int64_t begin = 0;  // in the storage
  int64_t end = 0;
  int64_t at = 0;  // of `begin` in the part
};
Overlap OverlapOf(const Block& block, int rank, int64_t begin, int64_t end);

// The tensors that have elements in the block, in ascending order.
std::vector<int> TensorsIn(const Partition& partition, const Block& block);

}  // namespace ddp::zero
