// The algorithms: each collective as a coroutine over the shared segment.
//
//   Collectives collectives(view, rank);
//   Task task = collectives.Start(request);
//   while (!task.Advance()) { ... }      // every rank runs the same requests in the same order
//
// Small messages go by a slot that every rank writes and every other reads (one flag); all others
// in chunks through a stage per rank, of which kStages are under way at once; an all-reduce or a
// reduce-scatter of tensors that all lie in the arena copies nothing; large tensors of which every rank gets the same
// go straight from one process to the other where the kernel lets them. docs/shm_protocol.md has
// the pictures, and what makes each buffer free again.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "backends/shm/engine/layout.h"
#include "backends/shm/engine/peer_memory.h"
#include "backends/shm/engine/request.h"
#include "backends/shm/engine/signals.h"
#include "backends/shm/engine/task.h"

namespace ddp::backends::shm {

// The state that goes from one collective to the next: counts that are equal on all ranks, since
// all make the same calls. Thread-compatible. One task at a time.
class Collectives {
 public:
  // Up to so many bytes go by slots.
  static constexpr size_t kSmall = 1024;
  static_assert(kSmall <= sizeof(Slot::body));
  // From so many bytes of one rank on, reading its memory beats two copies.
  static constexpr size_t kDirectFrom = 32 << 10;
  // From so many bytes for each rank on, swapping pays for its round of slots, and between two
  // ranks always.
  static constexpr size_t kSwapFrom = 8 << 10;

  Collectives(const View& view, int rank, bool direct = true);

  // `request` stays where it is until the task is finished or destroyed. The task's status is an
  // error only where the ranks' requests do not fit together, which nobody can go on from.
  Task Start(const Request& request);

  // How many have been started: the number of the one under way.
  uint64_t sequence() const { return sequence_; }

  // If `peer` calls, as its collective of this number, something else: an error that shows both.
  // A look at shared memory; for the slow path too.
  absl::Status CheckSame(int peer) const;

  // Whether `peer` may be writing to a tensor of the collective under way. It begins no more once
  // the group's failure is set, or this rank has left.
  bool WritesToPeers(int peer) const {
    return view_.control(peer).writing.load(std::memory_order_seq_cst) != 0;
  }

 private:
  Task Barrier();
  Task AllReduceSmall(const Request& request);
  Task AllReduceInChunks(const Request& request);
  Task AllReduceInArena(const Request& request);
  Task AllReduceLarge(const Request& request);
  Task ReduceScatterSmall(const Request& request);
  Task ReduceScatterInChunks(const Request& request);
  Task AllGatherSmall(const Request& request);
  Task AllGatherInChunks(const Request& request);
  Task BroadcastSmall(const Request& request);
  Task BroadcastInChunks(const Request& request);
  Task Exchange(const Request& request);
  Task SwapInChunks(const Request& request, size_t longest);
  Task MoveLarge(const Request& request);

  // One small message from every rank to every other.
  Slot& OpenSlot();               // this rank's of the next round: write it, then
  Reach PublishSlot(Slot& slot);  // gives: until all peers have published theirs
  void ReduceSlots(const Request& request, size_t bytes, size_t at) const;
  bool SameHashes() const;

  // Once the slots hold the offsets.
  static constexpr uint64_t kOutsideArena = ~uint64_t{0};
  uint64_t ArenaOffsetOf(const Buffer& mine) const;
  uint64_t ArenaOffset(int rank) const;
  bool AllInArena() const;
  void ReduceArenas(const Request& request) const;
  void ReduceFromArenas(const Request& request) const;

  // Whether all ranks can get at each other's memory.
  Task FindOutDirect();
  // Around what this rank writes to peers' tensors. Unavailable if they may have taken them back.
  absl::Status BeginWriting();
  void EndWriting() { mine_.writing.store(0, std::memory_order_release); }

  // Where a rank's tensor is: in its process, if others can get at it there, and in its arena.
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

  // The stage for chunk `index` of the group's life: this rank's is free once StageFree is reached;
  // then open it, write, publish.
  std::byte* Stage(int rank, uint64_t index) const { return view_.stage(rank, index); }
  Reach StageFree(uint64_t index) const;
  std::byte* OpenStage(uint64_t index);
  void PublishStage(uint64_t index);

  // What each rank has for each other, a quota of a chunk at a time: where `from` puts what is for
  // `to`. A pair of ranks has two places per stage, and swaps them with every chunk: who writes
  // there has read there the last time, so that it need not take the lines from the other's cache.
  // Swapping is for after a round of slots, in which every rank said that it has nothing to do with
  // the stages any more; without, places are opened as the own stage is, once it is free.
  size_t Quota() const { return view_.layout().chunk_bytes() / ranks_ / kCacheLine * kCacheLine; }
  std::byte* Place(int from, int to, uint64_t index) const;
  void OpenPlaces(uint64_t index, bool swap);

  int Next(int i) const { return (rank_ + i) % ranks_; }
  // What this rank may count on every peer having reduced, so that it need not look again.
  void AllHaveReduced(uint64_t chunks) { known_reduced_ = std::max(known_reduced_, chunks); }

  const View view_;
  const int rank_;
  const int ranks_;
  const Signals signals_;
  Control& mine_;

  uint64_t sequence_ = 0;
  Signature signature_;
  uint64_t hash_ = 0;
  uint64_t round_ = 0;   // of slots
  uint64_t chunks_ = 0;  // of stages: what `staged` and `reduced` of every rank come to
  uint64_t known_reduced_ = 0;
  // What every peer's `reduced` must have come to before the stage may be written again.
  uint64_t stage_busy_until_[kStages] = {};
  bool swapped_[kStages] = {};

  enum class Direct { kUnknown, kNo, kYes };
  const bool may_direct_;
  Direct direct_ = Direct::kUnknown;
  PeerMemory memory_;
  std::vector<Where> where_;  // of the collective under way, by rank
};

}  // namespace ddp::backends::shm
