#include "checkpoint/sharded/shared_read.h"

#include <algorithm>
#include <optional>
#include <variant>

namespace ddp::checkpoint::sharded {
namespace {

constexpr uint64_t kMostPerChunk = 16 * kBlockBytes;

int LeastLoaded(std::vector<uint64_t>& loads, uint64_t bytes) {
  const auto least = std::min_element(loads.begin(), loads.end());
  *least += bytes;
  return static_cast<int>(least - loads.begin());
}

}  // namespace

std::vector<Chunk> SpreadReads(const StoredTensor& tensor, std::vector<uint64_t>& loads) {
  const uint64_t all = tensor.BytesOf(Whole{});
  const auto item = static_cast<uint64_t>(tensor.encoding->bytes);
  std::vector<Chunk> chunks;
  for (const StoredPart& stored : tensor.parts) {
    const bool in_order =
        !std::holds_alternative<FlatRange>(stored.part) || tensor.memory_order.empty();
    const std::optional<FlatRange> range =
        in_order ? FlatRangeOf({tensor.shape, stored.part}) : std::nullopt;
    if (!range.has_value()) {
      chunks.clear();
      break;
    }
    const uint64_t begin = static_cast<uint64_t>(range->begin) * item;
    const uint64_t end = static_cast<uint64_t>(range->end) * item;
    for (uint64_t at = begin; at < end; at += kMostPerChunk) {
      const uint64_t to = std::min(end, at + kMostPerChunk);
      chunks.push_back(
          {FlatRange{static_cast<int64_t>(at / item), static_cast<int64_t>(to / item)}, at, to});
    }
  }
  if (chunks.empty() && all > 0) chunks.push_back({Whole{}, 0, all});
  for (Chunk& chunk : chunks) chunk.reader = LeastLoaded(loads, chunk.end - chunk.begin);
  return chunks;
}

}  // namespace ddp::checkpoint::sharded
