// Broadcast and all-gather by direct copies from the memory of one process to another, where the
// kernel permits it. docs/shm_protocol.md, "Direct".

#include <algorithm>
#include <cstring>

#include "backends/shm/engine/collectives.h"
#include "backends/shm/engine/slices.h"

namespace ddp::backends::shm {
namespace {

constexpr size_t kPage = 4096;
constexpr uint64_t kOutOfReach = ~uint64_t{0};

template <typename T>
void Put(Slot& slot, const T& value) {
  static_assert(sizeof(T) <= kMailboxBytes);
  std::memcpy(slot.mail, &value, sizeof(value));
}

template <typename T>
T Take(const Slot& slot) {
  T value;
  std::memcpy(&value, slot.mail, sizeof(value));
  return value;
}

}  // namespace

// Direct copies are used if all ranks can use them: the ranks must agree on the algorithm.
Coroutine Collectives::FindOutDirect() {
  Slot& places = OpenSlot();
  Put(places, memory_.Self());
  co_await PublishSlot(places);
  if (!SameHashes()) co_return Mismatch();
  bool able = may_direct_;
  for (int rank = 0; rank < ranks_; ++rank) {
    able &= memory_.Attach(rank, Take<PeerMemory::Identity>(view_.slot(rank, round_)));
  }

  Slot& answers = OpenSlot();
  Put(answers, able);
  co_await PublishSlot(answers);
  if (!SameHashes()) co_return Mismatch();
  for (int rank = 0; rank < ranks_; ++rank) able &= Take<bool>(view_.slot(rank, round_));
  direct_ = able ? Direct::kYes : Direct::kNo;
  co_return absl::OkStatus();
}

Coroutine Collectives::MoveLarge(const Request& request) {
  const bool gathers = request.kind == Kind::kAllGather;
  const Buffer mine = gathers ? request.send[0] : Buffer{request.tensor, request.count};
  Slot& slot = OpenSlot();
  const uint64_t arena_offset = ArenaOffsetOf(mine);
  const bool exposed = arena_offset != kOutsideArena || memory_.IsReadableByPeers(mine);
  Put(slot, Where{exposed ? reinterpret_cast<uint64_t>(mine.data) : kOutOfReach, arena_offset});
  co_await PublishSlot(slot);
  if (!SameHashes() || !AllSame()) co_return Mismatch();
  bool in_arena = true, in_reach = true;
  for (int rank = 0; rank < ranks_; ++rank) {
    where_[rank] = Take<Where>(view_.slot(rank, round_));
    in_arena &= where_[rank].arena_offset != kOutsideArena;
    in_reach &= where_[rank].address != kOutOfReach;
  }

  if (!in_arena && gathers && ranks_ == 2) {
    const Coroutine swap =
        SwapInChunks(request, std::max(request.recv[0].bytes, request.recv[1].bytes));
    const absl::Status status = co_await swap;
    co_return status;
  }
  if (!in_arena && in_reach && direct_ == Direct::kUnknown) {
    const Coroutine find_out = FindOutDirect();
    const absl::Status status = co_await find_out;
    if (!status.ok()) co_return status;
  }
  if (!in_arena && (!in_reach || direct_ == Direct::kNo)) {
    const Coroutine in_chunks = gathers ? AllGatherInChunks(request) : BroadcastInChunks(request);
    const absl::Status status = co_await in_chunks;
    co_return status;
  }

  const absl::Status moved = gathers ? AllGatherDirect(request) : BroadcastDirect(request);
  if (!moved.ok()) co_return moved;
  // No rank changes or frees its tensor before all peers have read it.
  ++chunks_;
  signals_.Publish(&mine_.reduced, chunks_);
  co_await AllReduced(chunks_);
  AllHaveReduced(chunks_);
  co_return absl::OkStatus();
}

absl::Status Collectives::Fetch(int rank, size_t at, Buffer to) const {
  const Where& where = where_[rank];
  if (where.arena_offset == kOutsideArena) return memory_.Read(rank, where.address + at, to);
  Copy(to.data, view_.arena(rank) + where.arena_offset + at, to.bytes);
  return absl::OkStatus();
}

absl::Status Collectives::AllGatherDirect(const Request& request) {
  for (int i = 1; i < ranks_; ++i) {
    const absl::Status read = Fetch(Next(i), 0, request.recv[Next(i)]);
    if (!read.ok()) return read;
  }
  const Buffer& mine = request.send[0];
  Copy(request.recv[rank_].data, mine.data, mine.bytes);
  return absl::OkStatus();
}

// The root, which receives nothing, writes a share of the tensor of every peer, so that all ranks
// copy the same amount.
absl::Status Collectives::BroadcastDirect(const Request& request) {
  const size_t written = request.count / ranks_ / kPage * kPage;
  if (rank_ != request.root) {
    return Fetch(request.root, written, {request.tensor + written, request.count - written});
  }
  absl::Status status = BeginWriting();
  if (!status.ok()) return status;
  status = WriteToPeers({request.tensor, written});
  EndWriting();
  return status;
}

absl::Status Collectives::WriteToPeers(const Buffer& from) {
  for (int i = 1; i < ranks_; ++i) {
    const Where& where = where_[Next(i)];
    if (where.arena_offset != kOutsideArena) {
      Copy(view_.arena(Next(i)) + where.arena_offset, from.data, from.bytes);
      continue;
    }
    const absl::Status write = memory_.Write(Next(i), where.address, from);
    if (!write.ok()) return write;
  }
  return absl::OkStatus();
}

}  // namespace ddp::backends::shm
