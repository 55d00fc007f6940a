// The algorithms: each collective as a coroutine over the shared segment.
//
//   Collectives collectives(view, rank);
//   Task task = collectives.Start(request);
//   while (!task.Advance()) { ... }      // every rank runs the same requests in the same order
//
// Small messages go by a slot that every rank writes and every other reads (one flag); all others
// in chunks through a stage per rank, of which kStages are under way at once; an all-reduce of
// tensors that all lie in the arena moves nothing. docs/shm_protocol.md has the pictures, and what
// makes each buffer free again.
#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"
#include "backends/shm/layout.h"
#include "backends/shm/request.h"
#include "backends/shm/signals.h"
#include "backends/shm/task.h"

namespace ddp::backends::shm {

// The state that goes from one collective to the next: counts that are equal on all ranks, since
// all make the same calls. Thread-compatible. One task at a time.
class Collectives {
 public:
  // Up to so many bytes go by slots.
  static constexpr size_t kSmall = 2048;
  static_assert(kSmall <= sizeof(Slot::body));

  Collectives(const View& view, int rank);

  // `request` stays where it is until the task is finished or destroyed. The task's status is an
  // error only where the ranks' requests do not fit together, which nobody can go on from.
  Task Start(const Request& request);

  // How many have been started: the number of the one under way.
  uint64_t sequence() const { return sequence_; }

  // If `peer` calls, as its collective of this number, something else: an error that shows both.
  // A look at shared memory; for the slow path too.
  absl::Status CheckSame(int peer) const;

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

  // One small message from every rank to every other.
  Slot& OpenSlot();               // this rank's of the next round: write it, then
  Reach PublishSlot(Slot& slot);  // gives: until all peers have published theirs
  // Peers have read what this rank's other slot held: have its lines here by the next round.
  void PrefetchNextSlot(size_t bytes) const;
  void ReduceSlots(const Request& request, size_t bytes, size_t at) const;
  bool SameHashes() const;

  // Once the slots hold the offsets.
  uint64_t ArenaOffset(int rank) const;
  bool AllInArena() const;
  void ReduceArenas(const Request& request) const;

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
};

}  // namespace ddp::backends::shm
