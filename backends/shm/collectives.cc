#include "backends/shm/collectives.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace ddp::backends::shm {
namespace {

constexpr size_t kSmall = 4096;
static_assert(kSmall <= sizeof(Slot::body));
constexpr uint64_t kOutsideArena = ~uint64_t{0};

void Copy(void* to, const void* from, size_t bytes) {
  if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
}

// Where a message of so many bytes lies in a slot: beside its flag if it fits.
std::byte* Message(Slot& slot, size_t bytes) {
  return bytes <= kMailboxBytes ? slot.mail : slot.body;
}

// A part of `count` elements per rank, whole cache lines where it can be.
struct Slices {
  Slices(size_t count, int ranks, size_t element) : count(count) {
    const size_t line = std::max<size_t>(1, kCacheLine / element);
    each = (count + ranks - 1) / ranks;
    each = (each + line - 1) / line * line;
  }
  size_t Begin(int rank) const { return std::min(count, each * rank); }
  size_t Size(int rank) const { return Begin(rank + 1) - Begin(rank); }

  size_t count;
  size_t each;
};

uint64_t CeilDiv(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

}  // namespace

Collectives::Collectives(const View& view, int rank)
    : view_(view),
      rank_(rank),
      ranks_(view.world_size()),
      signals_(view, rank),
      mine_(view.control(rank)) {}

Task Collectives::Start(const Request& request) {
  signature_ = SignatureOf(request);
  ++sequence_;
  hash_ = signature_.Hash(sequence_);
  Record& record = mine_.records[sequence_ % kRecords];
  // A reader that finds the same sequence before and after has read what belongs to it. Release,
  // so that the new fields are not seen with the old sequence.
  record.sequence.store(0, std::memory_order_relaxed);
  record.what.store(signature_.what, std::memory_order_release);
  record.bytes.store(signature_.bytes, std::memory_order_release);
  record.sequence.store(sequence_, std::memory_order_release);

  switch (request.kind) {
    case Kind::kAllReduce:
    case Kind::kReduce: {
      const size_t bytes = signature_.bytes;
      return bytes <= kSmall ? AllReduceSmall(request) : AllReduceLarge(request);
    }
    case Kind::kReduceScatter:
      return signature_.bytes * ranks_ <= kSmall ? ReduceScatterSmall(request)
                                                 : ReduceScatterInChunks(request);
    case Kind::kAllGather: {
      const bool small = std::all_of(request.recv.begin(), request.recv.end(),
                                     [](const Buffer& part) { return part.bytes <= kSmall; });
      return small ? AllGatherSmall(request) : AllGatherInChunks(request);
    }
    case Kind::kBroadcast:
      return request.count <= kSmall ? BroadcastSmall(request) : BroadcastInChunks(request);
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
  // The peer is further by now and has reused the record.
  if (record.sequence.load(std::memory_order_acquire) != sequence_) return absl::OkStatus();
  if (theirs == signature_) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the ranks call different things as collective ", sequence_,
                   " of this group: rank ", rank_, " ", ToString(signature_), ", rank ", peer, " ",
                   ToString(theirs), "; all ranks must make the same calls in the same order"));
}

Slot& Collectives::OpenSlot() { return view_.slot(rank_, ++round_); }

void Collectives::PublishSlot(Slot& slot) { signals_.Store(&slot.word, round_ << 16 | hash_); }

void Collectives::PrefetchNextSlot(size_t bytes) const {
  constexpr size_t kWorthIt = 1024;
  Slot& next = view_.slot(rank_, round_ + 1);
  __builtin_prefetch(&next.word, /*write=*/1);
  if (bytes <= kMailboxBytes) return;
  for (size_t at = 0; at < std::min(bytes, kWorthIt); at += kCacheLine) {
    __builtin_prefetch(next.body + at, /*write=*/1);
  }
}

Reach Collectives::AllSlots() const {
  return {reinterpret_cast<const std::byte*>(&view_.slot(0, round_).word),
          2 * sizeof(Slot),
          round_ << 16,
          0,
          ranks_,
          rank_};
}

// A peer that is a round ahead writes its other slot, so these still are of this round.
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
    sources[rank] = Message(view_.slot(rank, round_), bytes) + at;
  }
  void* result = request.tensor;
  Reduce(request.reduction, &result, 1, sources, ranks_, request.count);
}

Task Collectives::Barrier() {
  PublishSlot(OpenSlot());
  Reach slots = AllSlots();
  const bool there = slots.Reached();
  signals_.RingAll();
  if (!there) co_await slots;
  if (!SameHashes()) co_return Mismatch();
  co_return absl::OkStatus();
}

Task Collectives::AllReduceSmall(const Request& request) {
  const size_t bytes = signature_.bytes;
  Slot& slot = OpenSlot();
  std::byte* mine = Message(slot, bytes);
  Copy(mine, request.tensor, bytes);
  PublishSlot(slot);
  Reach slots = AllSlots();
  const bool there = slots.Reached();
  signals_.RingAll();
  if (!there) co_await slots;
  if (!SameHashes()) co_return Mismatch();

  PrefetchNextSlot(bytes);
  if (request.kind == Kind::kAllReduce || request.root == rank_) {
    ReduceSlots(request, bytes, /*at=*/0);
  }
  co_return absl::OkStatus();
}

Task Collectives::AllReduceLarge(const Request& request) {
  if (view_.layout().arena_bytes() == 0 || request.kind != Kind::kAllReduce) {
    return AllReduceInChunks(request);
  }
  return AllReduceInArena(request);
}

Task Collectives::AllReduceInArena(const Request& request) {
  const size_t bytes = signature_.bytes;
  std::byte* arena = view_.arena(rank_);
  const bool inside =
      request.tensor >= arena && request.tensor + bytes <= arena + view_.layout().arena_bytes();
  Slot& slot = OpenSlot();
  const uint64_t offset = inside ? request.tensor - arena : kOutsideArena;
  std::memcpy(slot.mail, &offset, sizeof(offset));
  PublishSlot(slot);
  Reach slots = AllSlots();
  const bool there = slots.Reached();
  signals_.RingAll();
  if (!there) co_await slots;
  if (!SameHashes()) co_return Mismatch();

  if (!AllSame()) co_return Mismatch();

  if (!AllInArena()) {
    const Task chunks = AllReduceInChunks(request);
    const absl::Status status = co_await chunks;
    co_return status;
  }
  // Everybody's tensor is complete, as everybody's slot says.
  ReduceArenas(request);
  ++chunks_;
  signals_.Publish(&mine_.reduced, chunks_);
  co_await AllReduced(chunks_);
  AllHaveReduced(chunks_);
  co_return absl::OkStatus();
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

// This rank's slice of all of them, in place.
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

Task Collectives::AllReduceInChunks(const Request& request) {
  const size_t element = ElementSize(request.reduction.dtype);
  const size_t chunk_count = view_.layout().chunk_bytes() / element;
  const uint64_t chunks = CeilDiv(request.count, chunk_count);
  const uint64_t first = chunks_;
  const bool takes_result = request.kind == Kind::kAllReduce || request.root == rank_;
  chunks_ += chunks;

  // A chunk's slice r is reduced by rank r. Every rank puts the others' slices into its stage; the
  // owner of a slice writes the sum to where it has just read: those cache lines are the cheapest
  // to write, and are where each rank looks for its results.
  const auto slices_of = [&](uint64_t chunk) {
    return Slices(std::min(chunk_count, request.count - chunk * chunk_count), ranks_, element);
  };
  const auto stage_in = [&](uint64_t chunk) {
    const std::byte* tensor = request.tensor + chunk * chunk_count * element;
    std::byte* stage = Stage(rank_, first + chunk);
    const Slices slices = slices_of(chunk);
    for (int i = 1; i < ranks_; ++i) {
      const size_t at = slices.Begin(Next(i)) * element;
      Copy(stage + at, tensor + at, slices.Size(Next(i)) * element);
    }
    signals_.Publish(&mine_.staged, first + chunk + 1);
  };
  const auto reduce = [&](uint64_t chunk) {
    const Slices slices = slices_of(chunk);
    const size_t at = slices.Begin(rank_) * element;
    std::byte* tensor = request.tensor + chunk * chunk_count * element + at;
    const void* sources[kMaxRanks];
    void* results[kMaxRanks];
    int num_results = 0;
    if (takes_result) results[num_results++] = tensor;
    for (int rank = 0; rank < ranks_; ++rank) {
      std::byte* theirs = Stage(rank, first + chunk) + at;
      sources[rank] = rank == rank_ ? tensor : theirs;
      const bool wants = request.kind == Kind::kAllReduce || request.root == rank;
      if (rank != rank_ && wants) results[num_results++] = theirs;
    }
    Reduce(request.reduction, results, num_results, sources, ranks_, slices.Size(rank_));
    signals_.Publish(&mine_.reduced, first + chunk + 1);
  };
  const auto copy_out = [&](uint64_t chunk) {
    std::byte* tensor = request.tensor + chunk * chunk_count * element;
    const std::byte* stage = Stage(rank_, first + chunk);
    const Slices slices = slices_of(chunk);
    for (int i = 1; i < ranks_; ++i) {
      const size_t at = slices.Begin(Next(i)) * element;
      Copy(tensor + at, stage + at, slices.Size(Next(i)) * element);
    }
  };

  for (uint64_t chunk = 0; chunk <= chunks; ++chunk) {
    if (chunk < chunks) {
      const uint64_t busy = stage_busy_until_[(first + chunk) % kStages];
      if (busy > known_reduced_) co_await AllReduced(busy);
      AllHaveReduced(busy);
      stage_in(chunk);
      stage_busy_until_[(first + chunk) % kStages] = first + chunk + 1;
    }
    if (chunk == 0) continue;
    const uint64_t last = chunk - 1;
    co_await AllStaged(first + last + 1);
    if (last == 0 && !AllSame()) co_return Mismatch();
    reduce(last);
    if (!takes_result) continue;
    co_await AllReduced(first + last + 1);
    AllHaveReduced(first + last + 1);
    copy_out(last);
  }
  co_return absl::OkStatus();
}

Task Collectives::ReduceScatterSmall(const Request& request) {
  const size_t part = signature_.bytes;
  Slot& slot = OpenSlot();
  std::byte* mine = Message(slot, part * ranks_);
  for (int rank = 0; rank < ranks_; ++rank) {
    Copy(mine + rank * part, request.send[rank].data, part);
  }
  PublishSlot(slot);
  Reach slots = AllSlots();
  const bool there = slots.Reached();
  signals_.RingAll();
  if (!there) co_await slots;
  if (!SameHashes()) co_return Mismatch();

  ReduceSlots(request, part * ranks_, /*at=*/rank_ * part);
  co_return absl::OkStatus();
}

Task Collectives::ReduceScatterInChunks(const Request& request) {
  const size_t element = ElementSize(request.reduction.dtype);
  // Of each rank's part, so much at a time.
  const size_t quota = view_.layout().chunk_bytes() / ranks_ / kCacheLine * kCacheLine;
  const size_t quota_count = quota / element;
  const uint64_t chunks = CeilDiv(request.count, quota_count);
  const uint64_t first = chunks_;
  chunks_ += chunks;

  for (uint64_t chunk = 0; chunk <= chunks; ++chunk) {
    if (chunk < chunks) {
      const uint64_t busy = stage_busy_until_[(first + chunk) % kStages];
      if (busy > known_reduced_) co_await AllReduced(busy);
      AllHaveReduced(busy);
      const size_t count = std::min(quota_count, request.count - chunk * quota_count);
      std::byte* stage = Stage(rank_, first + chunk);
      for (int i = 1; i < ranks_; ++i) {
        const int peer = Next(i);
        Copy(stage + peer * quota, request.send[peer].data + chunk * quota_count * element,
             count * element);
      }
      stage_busy_until_[(first + chunk) % kStages] = first + chunk + 1;
      signals_.Publish(&mine_.staged, first + chunk + 1);
    }
    if (chunk == 0) continue;
    const uint64_t last = chunk - 1;
    co_await AllStaged(first + last + 1);
    if (last == 0 && !AllSame()) co_return Mismatch();
    const size_t at = last * quota_count * element;
    const void* sources[kMaxRanks];
    for (int rank = 0; rank < ranks_; ++rank) {
      sources[rank] =
          rank == rank_ ? request.send[rank].data + at : Stage(rank, first + last) + rank_ * quota;
    }
    void* result = request.tensor + at;
    Reduce(request.reduction, &result, 1, sources, ranks_,
           std::min(quota_count, request.count - last * quota_count));
    signals_.Publish(&mine_.reduced, first + last + 1);
  }
  co_return absl::OkStatus();
}

Task Collectives::AllGatherSmall(const Request& request) {
  const Buffer& mine = request.send[0];
  Slot& slot = OpenSlot();
  Copy(Message(slot, mine.bytes), mine.data, mine.bytes);
  PublishSlot(slot);
  Reach slots = AllSlots();
  const bool there = slots.Reached();
  signals_.RingAll();
  if (!there) co_await slots;
  if (!SameHashes()) co_return Mismatch();

  for (int rank = 0; rank < ranks_; ++rank) {
    const Buffer& part = request.recv[rank];
    const std::byte* from =
        rank == rank_ ? mine.data : Message(view_.slot(rank, round_), part.bytes);
    Copy(part.data, from, part.bytes);
  }
  co_return absl::OkStatus();
}

Task Collectives::AllGatherInChunks(const Request& request) {
  const size_t chunk_bytes = view_.layout().chunk_bytes();
  size_t longest = 0;
  for (const Buffer& part : request.recv) longest = std::max(longest, part.bytes);
  const uint64_t chunks = CeilDiv(longest, chunk_bytes);
  const uint64_t first = chunks_;
  chunks_ += chunks;
  const auto size_of = [&](size_t bytes, uint64_t chunk) {
    return std::min(chunk_bytes, bytes - std::min(bytes, chunk * chunk_bytes));
  };

  for (uint64_t chunk = 0; chunk <= chunks; ++chunk) {
    if (chunk < chunks) {
      const uint64_t busy = stage_busy_until_[(first + chunk) % kStages];
      if (busy > known_reduced_) co_await AllReduced(busy);
      AllHaveReduced(busy);
      const Buffer& mine = request.send[0];
      const size_t at = chunk * chunk_bytes;
      const size_t bytes = size_of(mine.bytes, chunk);
      Copy(Stage(rank_, first + chunk), mine.data + at, bytes);
      stage_busy_until_[(first + chunk) % kStages] = first + chunk + 1;
      signals_.Publish(&mine_.staged, first + chunk + 1);
      Copy(request.recv[rank_].data + at, mine.data + at, bytes);
    }
    if (chunk == 0) continue;
    const uint64_t last = chunk - 1;
    for (int i = 1; i < ranks_; ++i) {
      const int peer = Next(i);
      co_await Staged(peer, first + last + 1);
      if (last == 0) {
        if (const absl::Status same = CheckSame(peer); !same.ok()) co_return same;
      }
      const Buffer& part = request.recv[peer];
      Copy(part.data + last * chunk_bytes, Stage(peer, first + last), size_of(part.bytes, last));
    }
    signals_.Publish(&mine_.reduced, first + last + 1);
  }
  co_return absl::OkStatus();
}

Task Collectives::BroadcastSmall(const Request& request) {
  Slot& slot = OpenSlot();
  if (rank_ == request.root) Copy(Message(slot, request.count), request.tensor, request.count);
  PublishSlot(slot);
  Reach slots = AllSlots();
  const bool there = slots.Reached();
  signals_.RingAll();
  if (!there) co_await slots;
  if (!SameHashes()) co_return Mismatch();
  if (rank_ != request.root) {
    Copy(request.tensor, Message(view_.slot(request.root, round_), request.count), request.count);
  }
  co_return absl::OkStatus();
}

Task Collectives::BroadcastInChunks(const Request& request) {
  const size_t chunk_bytes = view_.layout().chunk_bytes();
  const uint64_t chunks = CeilDiv(request.count, chunk_bytes);
  const uint64_t first = chunks_;
  chunks_ += chunks;

  for (uint64_t chunk = 0; chunk < chunks; ++chunk) {
    std::byte* tensor = request.tensor + chunk * chunk_bytes;
    const size_t bytes = std::min(chunk_bytes, request.count - chunk * chunk_bytes);
    if (rank_ == request.root) {
      // The readers say when they are done, as they do not wait for each other.
      const uint64_t busy = stage_busy_until_[(first + chunk) % kStages];
      if (busy > known_reduced_) co_await AllReduced(busy);
      AllHaveReduced(busy);
      Copy(Stage(rank_, first + chunk), tensor, bytes);
      stage_busy_until_[(first + chunk) % kStages] = first + chunk + 1;
      signals_.Publish(&mine_.staged, first + chunk + 1);
    } else {
      co_await Staged(request.root, first + chunk + 1);
      if (chunk == 0) {
        if (const absl::Status same = CheckSame(request.root); !same.ok()) co_return same;
      }
      Copy(tensor, Stage(request.root, first + chunk), bytes);
      signals_.PublishTo(request.root, &mine_.reduced, first + chunk + 1);
    }
  }
  co_return absl::OkStatus();
}

Task Collectives::Exchange(const Request& request) {
  // Who sends how much to whom is known to the two alone, and rounds must be agreed on by all.
  const size_t row_bytes = ranks_ * sizeof(uint64_t);
  static_assert(kMaxRanks * sizeof(uint64_t) <= kSmall);
  Slot& sizes = OpenSlot();
  for (int rank = 0; rank < ranks_; ++rank) {
    const uint64_t bytes = request.send[rank].bytes;
    std::memcpy(Message(sizes, row_bytes) + rank * sizeof(bytes), &bytes, sizeof(bytes));
  }
  PublishSlot(sizes);
  Reach slots = AllSlots();
  const bool there = slots.Reached();
  signals_.RingAll();
  if (!there) co_await slots;
  if (!SameHashes()) co_return Mismatch();
  uint64_t longest = 0;
  for (int from = 0; from < ranks_; ++from) {
    const std::byte* row = Message(view_.slot(from, round_), row_bytes);
    for (int to = 0; to < ranks_; ++to) {
      uint64_t bytes;
      std::memcpy(&bytes, row + to * sizeof(bytes), sizeof(bytes));
      if (to != from) longest = std::max(longest, bytes);
      if (to == rank_ && bytes != request.recv[from].bytes) {
        co_return absl::FailedPreconditionError(
            absl::StrCat(Name(request.kind), ": rank ", from, " sends ", bytes, " bytes to rank ",
                         rank_, ", which expects ", request.recv[from].bytes, " from it"));
      }
    }
  }

  Copy(request.recv[rank_].data, request.send[rank_].data, request.send[rank_].bytes);
  const size_t quota = view_.layout().chunk_bytes() / ranks_ / kCacheLine * kCacheLine;
  const uint64_t chunks = CeilDiv(longest, quota);
  const uint64_t first = chunks_;
  chunks_ += chunks;
  const auto size_of = [&](size_t bytes, uint64_t chunk) {
    return std::min(quota, bytes - std::min(bytes, chunk * quota));
  };
  for (uint64_t chunk = 0; chunk <= chunks; ++chunk) {
    if (chunk < chunks) {
      const uint64_t busy = stage_busy_until_[(first + chunk) % kStages];
      if (busy > known_reduced_) co_await AllReduced(busy);
      AllHaveReduced(busy);
      for (int i = 1; i < ranks_; ++i) {
        const Buffer& part = request.send[Next(i)];
        Copy(Stage(rank_, first + chunk) + Next(i) * quota, part.data + chunk * quota,
             size_of(part.bytes, chunk));
      }
      stage_busy_until_[(first + chunk) % kStages] = first + chunk + 1;
      signals_.Publish(&mine_.staged, first + chunk + 1);
    }
    if (chunk == 0) continue;
    const uint64_t last = chunk - 1;
    for (int i = 1; i < ranks_; ++i) {
      const int peer = Next(i);
      const Buffer& part = request.recv[peer];
      if (size_of(part.bytes, last) == 0) continue;
      co_await Staged(peer, first + last + 1);
      Copy(part.data + last * quota, Stage(peer, first + last) + rank_ * quota,
           size_of(part.bytes, last));
    }
    signals_.Publish(&mine_.reduced, first + last + 1);
  }
  co_return absl::OkStatus();
}

}  // namespace ddp::backends::shm
