#include "backends/shm/engine/layout.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace ddp::backends::shm {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kMinChunk = 64 << 10;
constexpr size_t kMinPacket = 4 << 10;

size_t RoundUp(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

absl::StatusOr<SegmentLayout> SegmentLayout::Plan(int world_size, const Limits& limits) {
  if (world_size < 1 || world_size > kMaxRanks) {
    return absl::InvalidArgumentError(absl::StrCat("a shared-memory group has 1 to ", kMaxRanks,
                                                   " ranks on a host, not ", world_size));
  }
  if (limits.segment_bytes < 0 || limits.arena_bytes < 0) {
    return absl::InvalidArgumentError("sizes of shared memory must not be negative");
  }
  const size_t n = world_size;
  SegmentLayout layout;
  layout.world_size_ = world_size;
  layout.arena_bytes_ = limits.arena_bytes / kPage * kPage;
  // With more ranks, the slice of a chunk on which a rank works becomes too small compared to the
  // cost of its two flags: 1 MB from four ranks on (measured; docs/backends.md).
  size_t chunk = n < 4 ? size_t{256} << 10 : size_t{1} << 20;
  size_t packet = 64 << 10;
  while (true) {
    layout.chunk_bytes_ = chunk;
    layout.packet_bytes_ = packet;
    size_t end = RoundUp(sizeof(Header), kPage);
    const auto place = [&end](size_t bytes) {
      const size_t at = end;
      end = RoundUp(end + bytes, kPage);
      return at;
    };
    layout.controls_ = place(n * sizeof(Control));
    layout.slots_ = place(n * 2 * sizeof(Slot));
    layout.stages_ = place(n * kStages * chunk);
    layout.channels_ = place(n * n * sizeof(Channel));
    layout.packets_ = place(n * n * kChannelSlots * packet);
    layout.arenas_ = RoundUp(end, kPage);
    if (layout.arenas_ <= static_cast<size_t>(limits.segment_bytes)) return layout;
    if (packet > kMinPacket &&
        (n * packet * kChannelSlots > kStages * chunk || chunk <= kMinChunk)) {
      packet /= 2;
    } else if (chunk > kMinChunk) {
      chunk /= 2;
    } else {
      return absl::InvalidArgumentError(
          absl::StrCat("a shared-memory segment of at most ", limits.segment_bytes,
                       " bytes has no room for ", world_size, " ranks, which need ", layout.arenas_,
                       "; raise shm.segment_mb to at least ", (layout.arenas_ >> 20) + 1));
    }
  }
}

uint64_t SegmentLayout::fingerprint() const {
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a, over words
  for (uint64_t word : {uint64_t(world_size_), uint64_t(chunk_bytes_), uint64_t(packet_bytes_),
                        uint64_t(arena_bytes_), uint64_t(arenas_), uint64_t(sizeof(Control))}) {
    hash = (hash ^ word) * 0x100000001b3u;
  }
  return hash;
}

}  // namespace ddp::backends::shm
