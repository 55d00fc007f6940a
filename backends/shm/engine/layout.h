// Layout of the memory segment that the ranks of one host share: types and offsets.
//
//   DDP_ASSIGN_OR_RETURN(SegmentLayout layout, SegmentLayout::Plan(world_size, limits));
//   SharedMemory memory = ...;                       // layout.bytes() of zeros
//   View view(layout, memory.data());
//   view.control(rank).staged.store(...);
//
// docs/shm_protocol.md describes the protocol. The segment starts as zeros, as the kernel provides
// it. No rank has to initialise its part before peers read it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ddp::backends::shm {

constexpr size_t kCacheLine = 64;
constexpr int kMaxRanks = 256;
constexpr int kRecords = 8;       // collectives that a rank keeps on record; a power of two
constexpr int kStages = 2;        // maximum number of chunks of a collective in flight, per rank
constexpr int kChannelSlots = 4;  // maximum number of packets of a channel in flight

// A collective that a rank has called, for its peers to compare with their own calls.
struct Record {
  std::atomic<uint64_t> sequence;  // number of the collective, from 1; 0: none yet
  std::atomic<uint64_t> what;      // Signature::what: kind, reduce op, dtype, root
  std::atomic<uint64_t> bytes;     // Signature::bytes
};

enum class RankState : uint32_t { kPresent = 0, kLeft = 1 };

// Synchronisation words of one rank. Only that rank writes them, except `doorbell` and `sleeping`.
struct alignas(kCacheLine) Control {
  // Number of chunks that this rank has written to its stage, and number of chunks whose slice it
  // has reduced (or whose data it has read), since the group was made. Both only grow.
  alignas(kCacheLine) std::atomic<uint64_t> staged;
  std::atomic<uint64_t> reduced;
  // 1 while this rank writes to tensors of peers. A peer waits for 0 before it returns a tensor.
  std::atomic<uint32_t> writing;

  // The threads of this rank that sleep on `doorbell`, a futex (mask of Sleeper); 0: none.
  alignas(kCacheLine) std::atomic<uint32_t> sleeping;
  std::atomic<uint32_t> doorbell;
  std::atomic<RankState> state;

  alignas(kCacheLine) Record records[kRecords];
};

// A small message of one rank to all others, together with its flag. It is in the flag's cache line
// if it fits (kMailboxBytes), otherwise in `body`. Two per rank: rounds alternate between them.
constexpr size_t kMailboxBytes = kCacheLine - sizeof(uint64_t);
struct alignas(kCacheLine) Slot {
  std::atomic<uint64_t> word;  // flag: round << 16 | Signature::Hash
  std::byte mail[kMailboxBytes];
  std::byte body[8 << 10];

  // Start of a message of `bytes` bytes.
  std::byte* Message(size_t bytes) { return bytes <= kMailboxBytes ? mail : body; }
};

// Ring of packets from one rank to another. `head` counts packets written, `tail` packets read.
struct alignas(kCacheLine) Channel {
  alignas(kCacheLine) std::atomic<uint64_t> head;
  alignas(kCacheLine) std::atomic<uint64_t> tail;
};

// The failure of the group: written once, by the first rank that detects one.
struct alignas(kCacheLine) Failure {
  enum State : uint32_t { kNone = 0, kBeingWritten = 1, kSet = 2 };
  std::atomic<uint32_t> state;
  uint32_t code;    // absl::StatusCode
  char text[1000];  // message, ends with a zero
};

// The header is at offset 0. Rank 0 writes magic and fingerprint before it passes the segment on.
struct Header {
  uint64_t magic;        // and version of the protocol
  uint64_t fingerprint;  // SegmentLayout::fingerprint
  Failure failure;
};

struct Limits {
  int64_t segment_bytes = int64_t{256} << 20;  // maximum size of the segment without the arenas
  int64_t arena_bytes = 0;                     // size of the arena of each rank; 0: no arenas
};

// Offsets of the parts, in bytes from the start of the segment. The same on all ranks of a group.
class SegmentLayout {
 public:
  // InvalidArgument if the limits are too small for `world_size` ranks, with the size required.
  static absl::StatusOr<SegmentLayout> Plan(int world_size, const Limits& limits);

  int world_size() const { return world_size_; }
  size_t chunk_bytes() const { return chunk_bytes_; }    // of one stage
  size_t packet_bytes() const { return packet_bytes_; }  // of one packet of a channel
  size_t arena_bytes() const { return arena_bytes_; }
  // Size of the first part, whose memory is reserved when the group is made. Packets and arenas
  // follow; they take memory when they are first used.
  size_t reserved_bytes() const { return packets_; }
  size_t bytes() const { return arenas_ + world_size_ * (arena_bytes_ + kArenaSkew); }
  uint64_t fingerprint() const;

 private:
  friend class View;

  // Distance between arenas in addition to their size. Ranks tend to have the same tensor at the
  // same offset. At a distance of a power of two, these addresses collide in the way predictor of
  // AMD's L1 caches (14 times slower).
  static constexpr size_t kArenaSkew = 69 * 4096;

  int world_size_ = 0;
  size_t chunk_bytes_ = 0, packet_bytes_ = 0, arena_bytes_ = 0;
  size_t controls_ = 0, slots_ = 0, stages_ = 0, channels_ = 0, packets_ = 0, arenas_ = 0;
};

// Typed access to a segment. Does not own the memory. Copies are cheap and equal. Thread-safe.
//
// `round`, `chunk` and `index` count from 0 over the life of the group; buffers are reused in
// turns.
class View {
 public:
  View(const SegmentLayout& layout, void* base)
      : layout_(layout), base_(static_cast<std::byte*>(base)) {}

  const SegmentLayout& layout() const { return layout_; }
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
    return base_ + layout_.arenas_ + rank * (layout_.arena_bytes_ + SegmentLayout::kArenaSkew);
  }

 private:
  template <typename T>
  T& At(size_t offset) const {
    return *reinterpret_cast<T*>(base_ + offset);
  }
  size_t Pair(int from, int to) const { return static_cast<size_t>(from) * world_size() + to; }

  SegmentLayout layout_;
  std::byte* base_;
};

}  // namespace ddp::backends::shm
