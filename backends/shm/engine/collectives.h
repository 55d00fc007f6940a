// The algorithms of the collectives, each a coroutine over the shared segment.
//
//   Collectives collectives(view, rank);
//   Coroutine coroutine = collectives.Start(request);
//   while (!coroutine.Advance()) { ... }      // collective: all ranks, same requests, same order
//
// Which path the data takes:
//   - Small messages: each rank writes a slot, which all others read. One flag, one round.
//   - An all-reduce of tensors that are in the arena on all ranks: reduced in place, no copies.
//   - A reduce-scatter of inputs that are in the arena on all ranks: read where they are.
//   - Large tensors that all ranks receive (broadcast, all-gather): copied directly from process to
//     process, where the kernel permits it (peer_memory.h).
//   - All others: in chunks through a stage per rank, at most kStages of them in flight.
// docs/shm_protocol.md has diagrams, and the rules by which each buffer becomes free again.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "backends/shm/engine/coroutine.h"
#include "backends/shm/engine/layout.h"
#include "backends/shm/engine/peer_memory.h"
#include "backends/shm/engine/request.h"
#include "backends/shm/engine/signals.h"

namespace ddp::backends::shm {

// The state that is kept from one collective to the next: counters that are equal on all ranks,
// because all make the same calls. Thread-compatible. At most one unfinished coroutine at a time.
class Collectives {
 public:
  // Largest message sent through slots, in bytes.
  static constexpr size_t kMaxSlotBytes = 1024;
  static_assert(kMaxSlotBytes <= sizeof(Slot::body));
  // Smallest message per rank, in bytes, for which direct reading is faster than two copies.
  static constexpr size_t kMinDirectBytes = 32 << 10;
  // Smallest message per pair of ranks, in bytes, for which swapping places (see OpenPlaces) is
  // faster although it needs a round of slots. With two ranks swapping is always used.
  static constexpr size_t kMinSwapBytes = 8 << 10;

  Collectives(const View& view, int rank, bool direct = true);

  // `request` is borrowed until the coroutine is finished or destroyed. The coroutine fails only if
  // the requests of the ranks do not match, or a peer has ended during a direct transfer; the group
  // cannot be used afterwards.
  Coroutine Start(const Request& request);

  // Number of collectives started; also the number of the current one, from 1.
  uint64_t sequence() const { return sequence_; }

  // FailedPrecondition, with both calls, if `peer` has called something else as its collective of
  // this number. Reads shared memory only.
  absl::Status CheckSame(int peer) const;

  // Whether `peer` may be writing to a tensor of the current collective. It does not start to write
  // once the group's failure is set or this rank has left.
  bool WritesToPeers(int peer) const {
    return view_.control(peer).writing.load(std::memory_order_seq_cst) != 0;
  }

 private:
  Coroutine Barrier();
  Coroutine AllReduceSmall(const Request& request);
  Coroutine AllReduceInChunks(const Request& request);
  Coroutine AllReduceInArena(const Request& request);
  Coroutine AllReduceLarge(const Request& request);
  Coroutine ReduceScatterSmall(const Request& request);
  Coroutine ReduceScatterInChunks(const Request& request);
  Coroutine AllGatherSmall(const Request& request);
  Coroutine AllGatherInChunks(const Request& request);
  Coroutine BroadcastSmall(const Request& request);
  Coroutine BroadcastInChunks(const Request& request);
  Coroutine Exchange(const Request& request);
  Coroutine SwapInChunks(const Request& request, size_t longest);
  Coroutine MoveLarge(const Request& request);

  // A round of slots: one small message from every rank to every other. Write to OpenSlot(), then
  // await the result of PublishSlot: all peers have published theirs.
  Slot& OpenSlot();
  Reach PublishSlot(Slot& slot);
  void ReduceSlots(const Request& request, size_t bytes, size_t at) const;
  bool SameHashes() const;

  // Offsets of the ranks' tensors in their arenas, exchanged through slots.
  static constexpr uint64_t kOutsideArena = ~uint64_t{0};
  uint64_t ArenaOffsetOf(const Buffer& mine) const;
  uint64_t ArenaOffset(int rank) const;
  bool AllInArena() const;
  void ReduceArenas(const Request& request) const;
  void ReduceFromArenas(const Request& request) const;

  // Finds out whether all ranks can read and write each other's memory.
  Coroutine FindOutDirect();
  // Enclose writes to tensors of peers. Unavailable if peers may have returned them to their
  // callers.
  absl::Status BeginWriting();
  void EndWriting() { mine_.writing.store(0, std::memory_order_release); }

  // Location of a rank's tensor: the address in its process, if peers can read it there, and the
  // offset in its arena.
  struct Where {
    uint64_t address;
    uint64_t arena_offset;
  };
  absl::Status Fetch(int rank, size_t at, Buffer to) const;
  absl::Status AllGatherDirect(const Request& request);
  absl::Status BroadcastDirect(const Request& request);
  absl::Status WriteToPeers(const Buffer& from);

  bool AllSame() const;
  absl::Status Mismatch() const;

  Reach Staged(int peer, uint64_t chunks) const;
  Reach AllStaged(uint64_t chunks) const;
  Reach AllReduced(uint64_t chunks) const;

  // The stage for chunk `index`, counted over the life of the group. To write this rank's own:
  // await StageFree, then OpenStage, write, PublishStage.
  std::byte* Stage(int rank, uint64_t index) const { return view_.stage(rank, index); }
  Reach StageFree(uint64_t index) const;
  std::byte* OpenStage(uint64_t index);
  void PublishStage(uint64_t index);

  // Different data for each pair of ranks, Quota() bytes per chunk. Place() is where rank `from`
  // writes data for rank `to`. A pair of ranks has two places per stage. With `swap` they exchange
  // them with every chunk: a rank writes where it has read the last time, so that the lines are in
  // its own cache. Swapping requires a round of slots before, after which no rank uses the stages;
  // without it, places are opened like the own stage, once that is free.
  size_t Quota() const { return view_.layout().chunk_bytes() / ranks_ / kCacheLine * kCacheLine; }
  std::byte* Place(int from, int to, uint64_t index) const;
  void OpenPlaces(uint64_t index, bool swap);

  int Next(int i) const { return (rank_ + i) % ranks_; }
  // Notes that every peer has reduced `chunks` chunks, so that this need not be checked again.
  void AllHaveReduced(uint64_t chunks) { known_reduced_ = std::max(known_reduced_, chunks); }

  const View view_;
  const int rank_;
  const int ranks_;
  const Signals signals_;
  Control& mine_;

  uint64_t sequence_ = 0;
  Signature signature_;
  uint64_t hash_ = 0;
  uint64_t round_ = 0;   // rounds of slots
  uint64_t chunks_ = 0;  // chunks through stages: the final `staged` and `reduced` of every rank
  uint64_t known_reduced_ = 0;
  // The value that every peer's `reduced` must reach before the stage may be written again.
  uint64_t stage_busy_until_[kStages] = {};
  bool swapped_[kStages] = {};

  enum class Direct { kUnknown, kNo, kYes };
  const bool may_direct_;
  Direct direct_ = Direct::kUnknown;
  PeerMemory memory_;
  std::vector<Where> where_;  // of the current collective, by rank
};

}  // namespace ddp::backends::shm
