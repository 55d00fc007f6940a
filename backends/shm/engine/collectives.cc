#include "backends/shm/engine/collectives.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "backends/shm/engine/slices.h"

namespace ddp::backends::shm {
Collectives::Collectives(const View& view, int rank, bool direct)
    : view_(view),
      rank_(rank),
      ranks_(view.world_size()),
      signals_(view, rank),
      mine_(view.control(rank)),
      may_direct_(direct),
      where_(ranks_) {}

Coroutine Collectives::Start(const Request& request) {
  signature_ = SignatureOf(request);
  ++sequence_;
  hash_ = signature_.Hash(sequence_);
  Record& record = mine_.records[sequence_ % kRecords];
  // A reader that finds the same sequence before and after has read the fields of that sequence.
  // Release, so that the new fields are not seen with the old sequence.
  record.sequence.store(0, std::memory_order_relaxed);
  record.what.store(signature_.what, std::memory_order_release);
  record.bytes.store(signature_.bytes, std::memory_order_release);
  record.sequence.store(sequence_, std::memory_order_release);

  switch (request.kind) {
    case Kind::kAllReduce:
    case Kind::kReduce: {
      const size_t bytes = signature_.bytes;
      return bytes <= kMaxSlotBytes ? AllReduceSmall(request) : AllReduceLarge(request);
    }
    case Kind::kReduceScatter:
      return signature_.bytes * ranks_ <= kMaxSlotBytes ? ReduceScatterSmall(request)
                                                        : ReduceScatterInChunks(request);
    case Kind::kAllGather: {
      size_t longest = 0;
      for (const Buffer& part : request.recv) longest = std::max(longest, part.bytes);
      if (longest <= kMaxSlotBytes) return AllGatherSmall(request);
      const bool large = ranks_ == 2 || longest >= kMinDirectBytes;
      return large ? MoveLarge(request) : AllGatherInChunks(request);
    }
    case Kind::kBroadcast:
      if (request.count <= kMaxSlotBytes) return BroadcastSmall(request);
      return request.count < kMinDirectBytes ? BroadcastInChunks(request) : MoveLarge(request);
    case Kind::kGather:
    case Kind::kScatter:
    case Kind::kAllToAll:
      return Exchange(request);
    default:
      return Barrier();
  }
}

absl::Status Collectives::CheckSame(int peer) const {
  const Record& record = view_.control(peer).records[sequence_ % kRecords];
  if (record.sequence.load(std::memory_order_acquire) != sequence_) return absl::OkStatus();
  const Signature theirs = {record.what.load(std::memory_order_acquire),
                            record.bytes.load(std::memory_order_acquire)};
  // The peer is ahead and has reused the record.
  if (record.sequence.load(std::memory_order_acquire) != sequence_) return absl::OkStatus();
  if (theirs == signature_) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the ranks call different things as collective ", sequence_,
                   " of this group: rank ", rank_, " ", ToString(signature_), ", rank ", peer, " ",
                   ToString(theirs), "; all ranks must make the same calls in the same order"));
}

Slot& Collectives::OpenSlot() { return view_.slot(rank_, ++round_); }

Reach Collectives::PublishSlot(Slot& slot) {
  signals_.Store(&slot.word, round_ << 16 | hash_);
  Reach slots = {reinterpret_cast<const std::byte*>(&view_.slot(0, round_).word),
                 2 * sizeof(Slot),
                 round_ << 16,
                 0,
                 ranks_,
                 rank_};
  // Polls before RingAll, whose fence is slow; counters that have been reached are not read again.
  slots.Ready();
  signals_.RingAll();
  return slots;
}

// A peer that is a round ahead writes its other slot, so these slots still belong to this round.
bool Collectives::SameHashes() const {
  for (int rank = 0; rank < ranks_; ++rank) {
    const uint64_t word = view_.slot(rank, round_).word.load(std::memory_order_relaxed);
    if ((word & 0xffff) != hash_) return false;
  }
  return true;
}

bool Collectives::AllSame() const {
  for (int rank = 0; rank < ranks_; ++rank) {
    if (!CheckSame(rank).ok()) return false;
  }
  return true;
}

absl::Status Collectives::Mismatch() const {
  for (int rank = 0; rank < ranks_; ++rank) {
    absl::Status same = CheckSame(rank);
    if (!same.ok()) return same;
  }
  return absl::FailedPreconditionError(
      absl::StrCat("the ranks call different things as collective ", sequence_,
                   " of this group, which on rank ", rank_, " is ", ToString(signature_),
                   "; all ranks must make the same calls in the same order"));
}

Reach Collectives::Staged(int peer, uint64_t chunks) const {
  Reach reach = AllStaged(chunks);
  reach.peer = peer;
  reach.end = peer + 1;
  return reach;
}

Reach Collectives::AllStaged(uint64_t chunks) const {
  return {reinterpret_cast<const std::byte*>(&view_.control(0).staged),
          sizeof(Control),
          chunks,
          0,
          ranks_,
          rank_};
}

Reach Collectives::StageFree(uint64_t index) const {
  const uint64_t busy_until = stage_busy_until_[index % kStages];
  return busy_until <= known_reduced_ ? Reach() : AllReduced(busy_until);
}

std::byte* Collectives::OpenStage(uint64_t index) {
  AllHaveReduced(stage_busy_until_[index % kStages]);
  stage_busy_until_[index % kStages] = index + 1;
  return Stage(rank_, index);
}

std::byte* Collectives::Place(int from, int to, uint64_t index) const {
  return swapped_[index % kStages] ? Stage(to, index) + from * Quota()
                                   : Stage(from, index) + to * Quota();
}

void Collectives::OpenPlaces(uint64_t index, bool swap) {
  swapped_[index % kStages] = swap && !swapped_[index % kStages];
  if (!swap) AllHaveReduced(stage_busy_until_[index % kStages]);
  stage_busy_until_[index % kStages] = index + 1;
}

void Collectives::PublishStage(uint64_t index) { signals_.Publish(&mine_.staged, index + 1); }

Reach Collectives::AllReduced(uint64_t chunks) const {
  return {reinterpret_cast<const std::byte*>(&view_.control(0).reduced),
          sizeof(Control),
          chunks,
          0,
          ranks_,
          rank_};
}

void Collectives::ReduceSlots(const Request& request, size_t bytes, size_t at) const {
  const void* sources[kMaxRanks];
  for (int rank = 0; rank < ranks_; ++rank) {
    sources[rank] = view_.slot(rank, round_).Message(bytes) + at;
  }
  void* result = request.tensor;
  Reduce(request.reduction, &result, 1, sources, ranks_, request.count);
}

Coroutine Collectives::Barrier() {
  co_await PublishSlot(OpenSlot());
  if (!SameHashes()) co_return Mismatch();
  co_return absl::OkStatus();
}

Coroutine Collectives::AllReduceSmall(const Request& request) {
  const size_t bytes = signature_.bytes;
  Slot& slot = OpenSlot();
  std::byte* mine = slot.Message(bytes);
  Copy(mine, request.tensor, bytes);
  co_await PublishSlot(slot);
  if (!SameHashes()) co_return Mismatch();

  if (request.kind == Kind::kAllReduce || request.root == rank_) {
    ReduceSlots(request, bytes, /*at=*/0);
  }
  co_return absl::OkStatus();
}

Coroutine Collectives::AllReduceLarge(const Request& request) {
  if (view_.layout().arena_bytes() == 0 || request.kind != Kind::kAllReduce) {
    return AllReduceInChunks(request);
  }
  return AllReduceInArena(request);
}

Coroutine Collectives::AllReduceInArena(const Request& request) {
  Slot& slot = OpenSlot();
  const uint64_t offset = ArenaOffsetOf({request.tensor, signature_.bytes});
  std::memcpy(slot.mail, &offset, sizeof(offset));
  co_await PublishSlot(slot);
  if (!SameHashes()) co_return Mismatch();

  if (!AllSame()) co_return Mismatch();

  if (!AllInArena()) {
    const Coroutine chunks = AllReduceInChunks(request);
    const absl::Status status = co_await chunks;
    co_return status;
  }
  // All slots are published, so the tensors of all ranks are complete.
  const absl::Status begun = BeginWriting();
  if (!begun.ok()) co_return begun;
  ReduceArenas(request);
  EndWriting();
  ++chunks_;
  signals_.Publish(&mine_.reduced, chunks_);
  co_await AllReduced(chunks_);
  AllHaveReduced(chunks_);
  co_return absl::OkStatus();
}

// Either this rank sees that a peer has failed or left, or that peer sees that this rank writes.
absl::Status Collectives::BeginWriting() {
  mine_.writing.store(1, std::memory_order_seq_cst);
  absl::Status gone;
  if (view_.header().failure.state.load(std::memory_order_seq_cst) != Failure::kNone) {
    gone = absl::UnavailableError("the group has failed");
  }
  for (int rank = 0; rank < ranks_ && gone.ok(); ++rank) {
    if (view_.control(rank).state.load(std::memory_order_seq_cst) == RankState::kLeft) {
      gone = absl::UnavailableError(
          absl::StrCat("Connection closed by peer: rank ", rank, " has left the group"));
    }
  }
  if (!gone.ok()) EndWriting();
  return gone;
}

uint64_t Collectives::ArenaOffsetOf(const Buffer& mine) const {
  const std::byte* arena = view_.arena(rank_);
  const bool inside =
      mine.data >= arena && mine.data + mine.bytes <= arena + view_.layout().arena_bytes();
  return inside ? mine.data - arena : kOutsideArena;
}

uint64_t Collectives::ArenaOffset(int rank) const {
  uint64_t offset;
  std::memcpy(&offset, view_.slot(rank, round_).mail, sizeof(offset));
  return offset;
}

bool Collectives::AllInArena() const {
  for (int rank = 0; rank < ranks_; ++rank) {
    if (ArenaOffset(rank) == kOutsideArena) return false;
  }
  return true;
}

// Reduces this rank's slice of the tensors of all ranks, in place.
void Collectives::ReduceArenas(const Request& request) const {
  const size_t element = ElementSize(request.reduction.dtype);
  const Slices slices(request.count, ranks_, element);
  const void* sources[kMaxRanks];
  void* results[kMaxRanks];
  for (int rank = 0; rank < ranks_; ++rank) {
    std::byte* tensor = view_.arena(rank) + ArenaOffset(rank);
    sources[rank] = results[rank] = tensor + slices.Begin(rank_) * element;
  }
  Reduce(request.reduction, results, ranks_, sources, ranks_, slices.Size(rank_));
}

// This rank's part of all inputs, read where they are.
void Collectives::ReduceFromArenas(const Request& request) const {
  const size_t at = rank_ * request.count * ElementSize(request.reduction.dtype);
  const void* sources[kMaxRanks];
  for (int rank = 0; rank < ranks_; ++rank)
    sources[rank] = view_.arena(rank) + ArenaOffset(rank) + at;
  void* result = request.tensor;
  Reduce(request.reduction, &result, 1, sources, ranks_, request.count);
}

Coroutine Collectives::ReduceScatterSmall(const Request& request) {
  const size_t part = signature_.bytes;
  Slot& slot = OpenSlot();
  std::byte* mine = slot.Message(part * ranks_);
  for (int rank = 0; rank < ranks_; ++rank) {
    Copy(mine + rank * part, request.send[rank].data, part);
  }
  co_await PublishSlot(slot);
  if (!SameHashes()) co_return Mismatch();

  ReduceSlots(request, part * ranks_, /*at=*/rank_ * part);
  co_return absl::OkStatus();
}

Coroutine Collectives::AllGatherSmall(const Request& request) {
  const Buffer& mine = request.send[0];
  Slot& slot = OpenSlot();
  Copy(slot.Message(mine.bytes), mine.data, mine.bytes);
  co_await PublishSlot(slot);
  if (!SameHashes()) co_return Mismatch();

  for (int rank = 0; rank < ranks_; ++rank) {
    const Buffer& part = request.recv[rank];
    const std::byte* from =
        rank == rank_ ? mine.data : view_.slot(rank, round_).Message(part.bytes);
    Copy(part.data, from, part.bytes);
  }
  co_return absl::OkStatus();
}

Coroutine Collectives::BroadcastSmall(const Request& request) {
  Slot& slot = OpenSlot();
  if (rank_ == request.root) Copy(slot.Message(request.count), request.tensor, request.count);
  co_await PublishSlot(slot);
  if (!SameHashes()) co_return Mismatch();
  if (rank_ != request.root) {
    Copy(request.tensor, view_.slot(request.root, round_).Message(request.count), request.count);
  }
  co_return absl::OkStatus();
}

}  // namespace ddp::backends::shm
