#include "ddp/zero/partition.h"

#include <algorithm>
#include <numeric>

namespace ddp::zero {

Partition::Partition(absl::Span<const int64_t> numels, int64_t element_bytes, int world_size)
    : numels_(numels.begin(), numels.end()),
      unit_(std::max<int64_t>(1, kUnitBytes / element_bytes)),
      world_size_(world_size),
      offsets_(numels.size()) {}

Partition Partition::Flat(absl::Span<const int64_t> numels, int64_t element_bytes, int world_size,
                          int64_t max_block_bytes) {
  Partition self(numels, element_bytes, world_size);
  int64_t units = 0;
  for (size_t i = 0; i < numels.size(); ++i) {
    self.offsets_[i] = units * self.unit_;
    units += self.Units(numels[i]);
  }
  self.storage_size_ = units * self.unit_;
  const int64_t each = units / world_size;
  const int head = static_cast<int>(units % world_size);
  if (head > 0) {
    self.blocks_.push_back({.stride = self.unit_, .part = self.unit_, .owners = head});
    self.shard_size_ = self.unit_;
  }
  int64_t part = each;
  if (max_block_bytes > 0) {
    part = std::max<int64_t>(1, max_block_bytes / kUnitBytes / world_size);
  }
  // Gradients arrive from the last tensor to the first, so the blocks of full size are the last
  // ones.
  for (int64_t done = 0; done < each;) {
    const int64_t now = done == 0 && each % part != 0 ? each % part : part;
    self.blocks_.push_back({.begin = (head + done * world_size) * self.unit_,
                            .stride = now * self.unit_,
                            .part = now * self.unit_,
                            .owners = world_size,
                            .shard_begin = self.shard_size_});
    self.shard_size_ += now * self.unit_;
    done += now;
  }
  self.reduce_blocks_ = self.blocks_;
  return self;
}

Partition Partition::ByTensor(absl::Span<const int64_t> numels, int64_t element_bytes,
                              int world_size, int64_t max_block_bytes) {
  Partition self(numels, element_bytes, world_size);
  std::vector<int> by_size(numels.size());
  std::iota(by_size.begin(), by_size.end(), 0);
  std::stable_sort(by_size.begin(), by_size.end(),
                   [&](int a, int b) { return numels[a] > numels[b]; });
  std::vector<int64_t> units(world_size);
  std::vector<int> owner(numels.size());
  for (int tensor : by_size) {
    const auto least = std::min_element(units.begin(), units.end());
    owner[tensor] = static_cast<int>(least - units.begin());
    *least += self.Units(numels[tensor]);
  }
  const int64_t longest = *std::max_element(units.begin(), units.end());
  std::vector<int64_t> next(world_size);
  for (size_t i = 0; i < numels.size(); ++i) {
    self.offsets_[i] = (owner[i] * longest + next[owner[i]]) * self.unit_;
    next[owner[i]] += self.Units(numels[i]);
  }
  self.storage_size_ = longest * world_size * self.unit_;
  self.shard_size_ = longest * self.unit_;
  if (longest == 0) return self;
  const Block all = {.stride = self.shard_size_, .part = self.shard_size_, .owners = world_size};
  self.blocks_.push_back(all);
  int64_t part = longest;
  if (max_block_bytes > 0) {
    part = std::max<int64_t>(1, max_block_bytes / kUnitBytes / world_size);
  }
  self.CutForReduction(all, part * self.unit_);
  return self;
}

void Partition::CutForReduction(const Block& block, int64_t max_part) {
  for (int64_t done = 0; done < block.part;) {
    const int64_t rest = block.part % max_part;
    const int64_t now = done == 0 && rest != 0 ? rest : max_part;
    reduce_blocks_.push_back({.begin = block.begin + done,
                              .stride = block.stride,
                              .part = now,
                              .owners = block.owners,
                              .shard_begin = block.shard_begin + done});
    done += now;
  }
}

std::vector<Piece> Partition::Pieces(int rank) const {
  std::vector<Piece> pieces;
  for (int tensor = 0; tensor < num_tensors(); ++tensor) {
    const int64_t begin = offsets_[tensor], end = begin + numels_[tensor];
    for (const Block& block : blocks_) {
      const Overlap overlap = OverlapOf(block, rank, begin, end);
      if (overlap.begin >= overlap.end) continue;
      const Piece piece = {.tensor = tensor,
                           .begin = overlap.begin - begin,
                           .end = overlap.end - begin,
                           .shard_begin = block.shard_begin + overlap.at};
      // Across two blocks, if neighbours in the tensor are neighbours in the shard.
      if (!pieces.empty() && pieces.back().tensor == tensor && pieces.back().end == piece.begin &&
          pieces.back().shard_begin + pieces.back().size() == piece.shard_begin) {
        pieces.back().end = piece.end;
      } else {
        pieces.push_back(piece);
      }
    }
  }
  return pieces;
}

int64_t Partition::OwnedElements(int rank) const {
  int64_t elements = 0;
  for (const Piece& piece : Pieces(rank)) elements += piece.size();
  return elements;
}

std::vector<int> TensorsIn(const Partition& partition, const Block& block) {
  std::vector<int> tensors;
  for (int tensor = 0; tensor < partition.num_tensors(); ++tensor) {
    const int64_t begin = partition.offset(tensor), end = begin + partition.numel(tensor);
    for (int rank = 0; rank < block.owners; ++rank) {
      const Overlap overlap = OverlapOf(block, rank, begin, end);
      if (overlap.begin >= overlap.end) continue;
      tensors.push_back(tensor);
      break;
    }
  }
  return tensors;
}

Overlap OverlapOf(const Block& block, int rank, int64_t begin, int64_t end) {
  if (rank >= block.owners) return {};
  const int64_t part_begin = block.begin + rank * block.stride;
  const int64_t from = std::max(begin, part_begin);
  return {.begin = from, .end = std::min(end, part_begin + block.part), .at = from - part_begin};
}

}  // namespace ddp::zero
