// What the segment that the ranks of one host share looks like, and where everything in it is.
//
//   DDP_ASSIGN_OR_RETURN(Layout layout, Layout::Plan(world_size, limits));
//   SharedMemory memory = ...;                       // layout.bytes() of zeros
//   View view(layout, memory.data());
//   view.control(rank).staged.store(...);
//
// The protocol that runs on it is told in docs/shm_protocol.md. All of it starts as zeros, which is
// what the kernel hands out, and nobody has to set anything up before a peer may look at it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ddp::backends::shm {

constexpr size_t kCacheLine = 64;
constexpr int kMaxRanks = 256;
constexpr int kRecords = 8;       // power of two
constexpr int kStages = 2;        // chunks of a collective that are under way at once
constexpr int kChannelSlots = 4;  // packets of a channel that are under way at once

// What a rank is doing, for its peers to compare with what they do.
struct Record {
  std::atomic<uint64_t> sequence;  // 1 for the first collective; 0: none yet
  std::atomic<uint64_t> what;      // packed kind, reduce op, dtype, root
  std::atomic<uint64_t> bytes;
};

enum class RankState : uint32_t { kPresent = 0, kLeft = 1 };

// One rank's words. Its owner writes them, but for the doorbell and `sleeping`.
struct alignas(kCacheLine) Control {
  // Chunks that this rank has put into its stage, and chunks whose slice it has reduced (or whose
  // data it has taken), since the group was made. They only grow.
  alignas(kCacheLine) std::atomic<uint64_t> staged;
  std::atomic<uint64_t> reduced;
  // 1 while this rank writes to peers' tensors, who wait for its end before they give one back.
  std::atomic<uint32_t> writing;

  // Who sleeps on the doorbell (a futex mask of Sleeper), or 0: nobody has to be woken.
  alignas(kCacheLine) std::atomic<uint32_t> sleeping;
  std::atomic<uint32_t> doorbell;
  std::atomic<RankState> state;

  alignas(kCacheLine) Record records[kRecords];
};

// A small message and its flag in one cache line; a longer one goes on in `body`. Two per rank, by
// parity of the round.
constexpr size_t kMailboxBytes = kCacheLine - sizeof(uint64_t);
struct alignas(kCacheLine) Slot {
  std::atomic<uint64_t> word;  // round << 16 | signature
  std::byte mail[kMailboxBytes];
  std::byte body[8 << 10];

  // Where a message of so many bytes is: beside its flag if it fits.
  std::byte* Message(size_t bytes) { return bytes <= kMailboxBytes ? mail : body; }
};

// Packets from one rank to another. `head` counts those written, `tail` those read.
struct alignas(kCacheLine) Channel {
  alignas(kCacheLine) std::atomic<uint64_t> head;
  alignas(kCacheLine) std::atomic<uint64_t> tail;
};

// Why the group cannot go on: written once, by the first rank that finds out.
struct alignas(kCacheLine) Failure {
  enum State : uint32_t { kNone = 0, kBeingWritten = 1, kSet = 2 };
  std::atomic<uint32_t> state;
  uint32_t code;  // absl::StatusCode
  char text[1000];
};

struct Header {
  uint64_t magic;
  uint64_t fingerprint;  // of the Layout
  Failure failure;
};

struct Limits {
  int64_t segment_bytes = int64_t{256} << 20;  // all but the arena, in all
  int64_t arena_bytes = 0;                     // per rank
};

// Where things are, in bytes from the start. The same on all ranks of a group.
class Layout {
 public:
  // InvalidArgument where the limits have no room for so many ranks, with what would do.
  static absl::StatusOr<Layout> Plan(int world_size, const Limits& limits);

  int world_size() const { return world_size_; }
  size_t chunk_bytes() const { return chunk_bytes_; }    // of one stage
  size_t packet_bytes() const { return packet_bytes_; }  // of one packet of a channel
  size_t arena_bytes() const { return arena_bytes_; }
  // From the start: what every group uses. Packets and arenas take memory as they are used.
  size_t reserved_bytes() const { return packets_; }
  size_t bytes() const { return arenas_ + world_size_ * (arena_bytes_ + kArenaSkew); }
  uint64_t fingerprint() const;

 private:
  friend class View;

  // Ranks tend to have the same tensor at the same offset. Were the arenas a power of two apart,
  // the addresses would collide in what AMD's L1 caches use to predict the way (14 times slower).
  static constexpr size_t kArenaSkew = 69 * 4096;

  int world_size_ = 0;
  size_t chunk_bytes_ = 0, packet_bytes_ = 0, arena_bytes_ = 0;
  size_t controls_ = 0, slots_ = 0, stages_ = 0, channels_ = 0, packets_ = 0, arenas_ = 0;
};

// The segment, typed. Does not own the memory. Copies are cheap and equal.
class View {
 public:
  View(const Layout& layout, void* base) : layout_(layout), base_(static_cast<std::byte*>(base)) {}

  const Layout& layout() const { return layout_; }
  int world_size() const { return layout_.world_size_; }
  Header& header() const { return At<Header>(0); }
  Control& control(int rank) const {
    return At<Control>(layout_.controls_ + rank * sizeof(Control));
  }
  Slot& slot(int rank, uint64_t round) const {
    return At<Slot>(layout_.slots_ + (rank * 2 + (round & 1)) * sizeof(Slot));
  }
  std::byte* stage(int rank, uint64_t chunk) const {
    return base_ + layout_.stages_ + (rank * kStages + chunk % kStages) * layout_.chunk_bytes_;
  }
  Channel& channel(int from, int to) const {
    return At<Channel>(layout_.channels_ + Pair(from, to) * sizeof(Channel));
  }
  std::byte* packet(int from, int to, uint64_t index) const {
    return base_ + layout_.packets_ +
           (Pair(from, to) * kChannelSlots + index % kChannelSlots) * layout_.packet_bytes_;
  }
  std::byte* arena(int rank) const {
    return base_ + layout_.arenas_ + rank * (layout_.arena_bytes_ + Layout::kArenaSkew);
  }

 private:
  template <typename T>
  T& At(size_t offset) const {
    return *reinterpret_cast<T*>(base_ + offset);
  }
  size_t Pair(int from, int to) const { return static_cast<size_t>(from) * world_size() + to; }

  Layout layout_;
  std::byte* base_;
};

}  // namespace ddp::backends::shm
