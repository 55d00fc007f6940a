#include "checkpoint/sharded/part_reader.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/xxh3.h"
#include "checkpoint/foreign.h"

namespace ddp::checkpoint::sharded {

// A box whose elements are consecutive in a part, from element `at` of it on, in the order of
// dimensions `order`.
struct Placed {
  Box box;
  int64_t at = 0;
  std::vector<int64_t> order;
};

namespace {

constexpr uint64_t kMostPerRead = 8 << 20;  // bytes

// Those of a part, as it is stored: boxes in row-major order, ranges in the tensor's.
std::vector<Placed> Place(const std::vector<int64_t>& shape, const Part& part,
                          const std::vector<int64_t>& memory_order) {
  std::vector<int64_t> order(shape.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  const auto* range = std::get_if<FlatRange>(&part);
  if (range == nullptr) {
    const auto* box = std::get_if<Box>(&part);
    return {{box != nullptr ? *box : Box{std::vector<int64_t>(shape.size()), shape}, 0, order}};
  }
  if (!memory_order.empty()) order = memory_order;
  std::vector<Placed> placed;
  int64_t at = 0;
  for (const Box& box :
       BoxesOf(InMemoryOrder({shape, Whole{}, memory_order}).global_shape, *range)) {
    Placed one{{std::vector<int64_t>(shape.size()), std::vector<int64_t>(shape.size())}, at, order};
    int64_t elements = 1;
    for (size_t i = 0; i < shape.size(); ++i) {
      const auto dimension = static_cast<size_t>(order[i]);
      one.box.offset[dimension] = box.offset[i];
      one.box.sizes[dimension] = box.sizes[i];
      elements *= box.sizes[i];
    }
    at += elements;
    placed.push_back(std::move(one));
  }
  return placed;
}

// Where the part's elements are consecutive in the order in which it is stored: as a range of it.
std::optional<FlatRange> AsRange(const std::vector<int64_t>& shape, const Part& part,
                                 const std::vector<int64_t>& memory_order) {
  const bool is_range = std::holds_alternative<FlatRange>(part);
  if (!is_range && !memory_order.empty()) return std::nullopt;
  return FlatRangeOf({shape, part});
}

// By dimension, in elements of the part.
std::vector<int64_t> Strides(const Placed& placed) {
  std::vector<int64_t> strides(placed.order.size());
  int64_t stride = 1;
  for (size_t i = placed.order.size(); i-- > 0;) {
    const auto dimension = static_cast<size_t>(placed.order[i]);
    strides[dimension] = stride;
    stride *= placed.box.sizes[dimension];
  }
  return strides;
}

}  // namespace

absl::StatusOr<PartReader::Source*> PartReader::Open(size_t index) {
  std::unique_ptr<Source>& source = sources_[index];
  if (source != nullptr) return source.get();
  const StoredFile& stored = manifest_.files[index];
  const std::string path = absl::StrCat(folder_, "/", stored.name);
  // It is no damage: whoever put a link there has the file.
  DDP_RETURN_IF_ERROR(RefuseLink(path));
  absl::StatusOr<FileReader> file = FileReader::Open(path);
  if (absl::IsNotFound(file.status()) || absl::IsFailedPrecondition(file.status())) {
    return absl::DataLossError(
        absl::StrCat(path, " is missing, or no file, and the manifest lists it"));
  }
  DDP_RETURN_IF_ERROR(file.status());
  DDP_RETURN_IF_ERROR(RefusePointer(*file));
  if (file->size() != stored.bytes) {
    return absl::DataLossError(
        absl::StrCat(path, " has ", file->size(), " bytes, and the manifest says ", stored.bytes));
  }
  source.reset(new Source{.file = *std::move(file)});
  return source.get();
}

absl::Status PartReader::CheckSizes() {
  for (size_t i = 0; i < manifest_.files.size(); ++i) {
    DDP_RETURN_IF_ERROR(Open(i).status());
  }
  return absl::OkStatus();
}

absl::Status PartReader::CheckHeaders(size_t first, size_t step) {
  for (size_t i = first; i < manifest_.files.size(); i += step) {
    DDP_ASSIGN_OR_RETURN(Source * source, Open(i));
    std::vector<char> header(manifest_.files[i].header_bytes);
    DDP_RETURN_IF_ERROR(source->file.ReadAt(0, header.data(), header.size()));
    bytes_read_ += header.size();
    if (Xxh3(header.data(), header.size()) != manifest_.files[i].header_digest) {
      return absl::DataLossError(
          absl::StrCat(source->file.path(), " is damaged: its header does not match its checksum"));
    }
  }
  return absl::OkStatus();
}

// Reads bytes [begin, end) of the part, which are whole blocks, and checks them. `to` may be null:
// then they are only checked.
absl::Status PartReader::ReadBlocks(const Reading& reading, uint64_t begin, uint64_t end,
                                    char* to) {
  uint64_t asked_for = begin;
  while (begin < end) {
    const uint64_t size = std::min(end - begin, kMostPerRead);
    if (to == nullptr) row_.resize(size);
    char* const piece = to == nullptr ? row_.data() : to;
    const uint64_t offset = reading.stored.offset + begin;
    // The next piece is read while this one is checked.
    const uint64_t ahead = std::min(end, begin + 2 * kMostPerRead);
    reading.source->file.ReadAhead(reading.stored.offset + asked_for, ahead - asked_for);
    asked_for = ahead;
    absl::Status read = reading.source->file.ReadAt(offset, piece, size);
    if (absl::IsOutOfRange(read)) read = absl::DataLossError(read.message());
    DDP_RETURN_IF_ERROR(read);
    bytes_read_ += size;
    for (uint64_t at = 0; at < size; at += kBlockBytes) {
      const uint64_t block = std::min(kBlockBytes, size - at);
      if (Xxh3(piece + at, block) == reading.stored.digests[(begin + at) / kBlockBytes]) continue;
      return absl::DataLossError(absl::StrCat(
          reading.source->file.path(), " is damaged: tensor '", reading.name, "', bytes [",
          offset + at, ", ", offset + at + block, ") of the file do not match their checksum"));
    }
    begin += size;
    if (to != nullptr) to += size;
  }
  return absl::OkStatus();
}

// Notes the blocks that have these bytes of the part.
void PartReader::Plan(const Reading& reading, uint64_t begin, uint64_t end) {
  const uint64_t all = reading.tensor.BytesOf(reading.stored.part);
  for (uint64_t at = begin / kBlockBytes * kBlockBytes; at < end; at += kBlockBytes) {
    planned_.try_emplace(
        {reading.stored.file, reading.stored.offset + at},
        Planned{&reading.name, &reading.tensor, &reading.stored, std::min(kBlockBytes, all - at)});
  }
}

std::vector<PartReader::Blocks> PartReader::EndPlan() {
  is_planning_ = false;
  std::vector<Blocks> runs;
  for (const auto& [place, planned] : planned_) {
    const auto& [file, offset] = place;
    const bool follows = !runs.empty() && runs.back().file == file && runs.back().end == offset &&
                         (offset - runs.back().begin) % kBlockBytes == 0;
    if (!follows) runs.push_back({file, offset, offset});
    runs.back().end += planned.bytes;
  }
  return runs;
}

absl::Status PartReader::ReadPlanned(size_t file, uint64_t offset, char* to) {
  const Planned& planned = planned_.at({file, offset});
  DDP_ASSIGN_OR_RETURN(Source * source, Open(file));
  const uint64_t begin = offset - planned.stored->offset;
  return ReadBlocks({*planned.name, *planned.tensor, *planned.stored, source}, begin,
                    begin + planned.bytes, to);
}

// Reads any bytes of the part.
absl::Status PartReader::Fetch(const Reading& reading, uint64_t begin, uint64_t end, char* to) {
  if (is_planning_) {
    Plan(reading, begin, end);
    return absl::OkStatus();
  }
  const size_t file = reading.stored.file;
  const uint64_t offset = reading.stored.offset;
  const uint64_t all = reading.tensor.BytesOf(reading.stored.part);
  while (begin < end) {
    const uint64_t block = begin / kBlockBytes * kBlockBytes;
    const uint64_t block_end = std::min(block + kBlockBytes, all);
    if (const auto kept = kept_.find({file, offset + block}); kept != kept_.end()) {
      const uint64_t size = std::min(end, block_end) - begin;
      std::memcpy(to, kept->second.data() + (begin - block), size);
      to += size;
      begin += size;
      continue;
    }
    if (begin == block && end >= block_end) {
      uint64_t blocks_end = end == all ? end : end / kBlockBytes * kBlockBytes;
      const auto next = kept_.lower_bound({file, offset + block});
      if (next != kept_.end() && next->first.first == file) {
        blocks_end = std::min(blocks_end, next->first.second - offset);
      }
      DDP_RETURN_IF_ERROR(ReadBlocks(reading, begin, blocks_end, to));
      to += blocks_end - begin;
      begin = blocks_end;
      continue;
    }
    Source& source = *reading.source;
    const uint64_t place = reading.stored.offset + block;
    if (source.block_begin != place) {
      source.block_begin = ~uint64_t{0};
      source.block.resize(block_end - block);
      DDP_RETURN_IF_ERROR(ReadBlocks(reading, block, block_end, source.block.data()));
      source.block_begin = place;
    }
    const uint64_t size = std::min(end, block_end) - begin;
    std::memcpy(to, source.block.data() + (begin - block), size);
    to += size;
    begin += size;
  }
  return absl::OkStatus();
}

// Copies what the box `from` of the stored part and the box `to` of the wanted one have in common.
absl::Status PartReader::CopyBox(const Reading& reading, const Placed& from, const Placed& to,
                                 char* out) {
  const size_t dimensions = from.box.offset.size();
  const auto item = static_cast<uint64_t>(reading.tensor.encoding->bytes);
  std::vector<int64_t> first(dimensions), count(dimensions);
  for (size_t i = 0; i < dimensions; ++i) {
    first[i] = std::max(from.box.offset[i], to.box.offset[i]);
    count[i] =
        std::min(from.box.offset[i] + from.box.sizes[i], to.box.offset[i] + to.box.sizes[i]) -
        first[i];
    if (count[i] <= 0) return absl::OkStatus();
  }
  const std::vector<int64_t> from_strides = Strides(from), to_strides = Strides(to);
  int64_t read_at = from.at, write_at = to.at;
  for (size_t i = 0; i < dimensions; ++i) {
    read_at += (first[i] - from.box.offset[i]) * from_strides[i];
    write_at += (first[i] - to.box.offset[i]) * to_strides[i];
  }
  // Rows run along the dimension that is the fastest one in the file.
  const size_t fastest = dimensions == 0 ? 0 : static_cast<size_t>(from.order.back());
  const int64_t row = dimensions == 0 ? 1 : count[fastest];
  const int64_t step = dimensions == 0 ? 1 : to_strides[fastest];
  const uint64_t row_bytes = static_cast<uint64_t>(row) * item;
  std::vector<int64_t> index(dimensions);
  for (;;) {
    const uint64_t begin = static_cast<uint64_t>(read_at) * item;
    char* const place = out + static_cast<uint64_t>(write_at) * item;
    if (step == 1) {
      DDP_RETURN_IF_ERROR(Fetch(reading, begin, begin + row_bytes, place));
    } else {
      row_.resize(row_bytes);
      DDP_RETURN_IF_ERROR(Fetch(reading, begin, begin + row_bytes, row_.data()));
      for (int64_t i = 0; i < row && !is_planning_; ++i) {
        std::memcpy(place + static_cast<uint64_t>(i * step) * item,
                    row_.data() + static_cast<uint64_t>(i) * item, item);
      }
    }
    // The next row, in the order of the file.
    size_t level = dimensions;
    while (level-- > 1) {
      const auto dimension = static_cast<size_t>(from.order[level - 1]);
      read_at += from_strides[dimension];
      write_at += to_strides[dimension];
      if (++index[dimension] < count[dimension]) break;
      read_at -= count[dimension] * from_strides[dimension];
      write_at -= count[dimension] * to_strides[dimension];
      index[dimension] = 0;
    }
    if (level == 0 || level > dimensions) return absl::OkStatus();
  }
}

absl::Status PartReader::Read(const std::string& name, const Part& part,
                              const std::vector<int64_t>& memory_order, void* to) {
  const auto found = manifest_.tensors.find(name);
  const StoredTensor& tensor = found->second;
  char* const out = static_cast<char*>(to);
  const auto item = static_cast<uint64_t>(tensor.encoding->bytes);
  const std::vector<int64_t> order = NormalOrder(memory_order);
  std::vector<Placed> wanted_boxes;
  for (const StoredPart& stored : tensor.parts) {
    if (tensor.BytesOf(stored.part) == 0) continue;
    DDP_ASSIGN_OR_RETURN(Source * source, Open(stored.file));
    const Reading reading{found->first, tensor, stored, source};
    // Ranges in the same order: at most one piece. A tensor of which each is one range is the usual
    // case.
    const bool same_order =
        order == tensor.memory_order ||
        (!std::holds_alternative<FlatRange>(part) && tensor.memory_order.empty());
    const std::optional<FlatRange> has = AsRange(tensor.shape, stored.part, tensor.memory_order);
    const std::optional<FlatRange> wants = AsRange(
        tensor.shape, part, std::holds_alternative<FlatRange>(part) ? order : tensor.memory_order);
    if (same_order && has.has_value() && wants.has_value()) {
      const int64_t begin = std::max(has->begin, wants->begin);
      const int64_t end = std::min(has->end, wants->end);
      if (begin >= end) continue;
      DDP_RETURN_IF_ERROR(Fetch(reading, static_cast<uint64_t>(begin - has->begin) * item,
                                static_cast<uint64_t>(end - has->begin) * item,
                                out + static_cast<uint64_t>(begin - wants->begin) * item));
      continue;
    }
    if (wanted_boxes.empty()) wanted_boxes = Place(tensor.shape, part, order);
    for (const Placed& from : Place(tensor.shape, stored.part, tensor.memory_order)) {
      for (const Placed& box : wanted_boxes) {
        DDP_RETURN_IF_ERROR(CopyBox(reading, from, box, out));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status PartReader::Check(const std::string& name) {
  const auto found = manifest_.tensors.find(name);
  const StoredTensor& tensor = found->second;
  for (const StoredPart& stored : tensor.parts) {
    const uint64_t bytes = tensor.BytesOf(stored.part);
    if (bytes == 0) continue;
    DDP_ASSIGN_OR_RETURN(Source * source, Open(stored.file));
    DDP_RETURN_IF_ERROR(ReadBlocks({found->first, tensor, stored, source}, 0, bytes, nullptr));
  }
  return absl::OkStatus();
}

}  // namespace ddp::checkpoint::sharded
