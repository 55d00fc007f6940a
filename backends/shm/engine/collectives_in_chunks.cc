// The algorithms for messages larger than a slot: chunk by chunk through the stages. A rank writes
// chunk c + 1 while its peers work on chunk c.

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "backends/shm/engine/collectives.h"
#include "backends/shm/engine/slices.h"

namespace ddp::backends::shm {
namespace {

// The input of a reduce-scatter, if all ranks' parts lie one after the other; null otherwise.
Buffer WholeInput(const Request& request) {
  Buffer whole = request.send[0];
  for (size_t rank = 1; rank < request.send.size(); ++rank) {
    if (request.send[rank].data != whole.data + whole.bytes) return {};
    whole.bytes += request.send[rank].bytes;
  }
  return whole;
}

}  // namespace

Coroutine Collectives::AllReduceInChunks(const Request& request) {
  const size_t element = ElementSize(request.reduction.dtype);
  const size_t chunk_count = view_.layout().chunk_bytes() / element;
  const uint64_t chunks = CeilDiv(request.count, chunk_count);
  const uint64_t first = chunks_;
  const bool takes_result = request.kind == Kind::kAllReduce || request.root == rank_;
  chunks_ += chunks;

  // Rank r reduces slice r of a chunk. Every rank writes the slices of the others to its stage. The
  // owner of a slice writes the sum to where it has just read: these cache lines are the cheapest
  // to write, and each rank finds its results in its own stage.
  const auto slices_of = [&](uint64_t chunk) {
    return Slices(std::min(chunk_count, request.count - chunk * chunk_count), ranks_, element);
  };
  const auto stage_in = [&](uint64_t chunk) {
    const std::byte* tensor = request.tensor + chunk * chunk_count * element;
    std::byte* stage = OpenStage(first + chunk);
    const Slices slices = slices_of(chunk);
    for (int i = 1; i < ranks_; ++i) {
      const size_t at = slices.Begin(Next(i)) * element;
      Copy(stage + at, tensor + at, slices.Size(Next(i)) * element);
    }
    PublishStage(first + chunk);
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
      co_await StageFree(first + chunk);
      stage_in(chunk);
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

Coroutine Collectives::ReduceScatterInChunks(const Request& request) {
  const bool swaps = ranks_ == 2 || signature_.bytes >= kMinSwapBytes;
  const size_t element = ElementSize(request.reduction.dtype);
  if (swaps) {
    Slot& slot = OpenSlot();
    const uint64_t offset = ArenaOffsetOf(WholeInput(request));
    std::memcpy(slot.mail, &offset, sizeof(offset));
    co_await PublishSlot(slot);
    if (!SameHashes() || !AllSame()) co_return Mismatch();
    if (AllInArena()) {
      ReduceFromArenas(request);
      // No rank changes its input before all peers have read it.
      ++chunks_;
      signals_.Publish(&mine_.reduced, chunks_);
      co_await AllReduced(chunks_);
      AllHaveReduced(chunks_);
      co_return absl::OkStatus();
    }
  }
  const size_t quota_count = Quota() / element;
  const uint64_t chunks = CeilDiv(request.count, quota_count);
  const uint64_t first = chunks_;
  chunks_ += chunks;

  for (uint64_t chunk = 0; chunk <= chunks; ++chunk) {
    if (chunk < chunks) {
      if (!swaps) co_await StageFree(first + chunk);
      OpenPlaces(first + chunk, swaps);
      const size_t at = chunk * quota_count;
      const size_t count = std::min(quota_count, request.count - at);
      for (int i = 1; i < ranks_; ++i) {
        Copy(Place(rank_, Next(i), first + chunk), request.send[Next(i)].data + at * element,
             count * element);
      }
      PublishStage(first + chunk);
    }
    if (chunk == 0) continue;
    co_await AllStaged(first + chunk);
    if (chunk == 1 && !AllSame()) co_return Mismatch();
    const size_t at = (chunk - 1) * quota_count;
    const void* sources[kMaxRanks];
    for (int rank = 0; rank < ranks_; ++rank) {
      sources[rank] = rank == rank_ ? request.send[rank].data + at * element
                                    : Place(rank, rank_, first + chunk - 1);
    }
    void* result = request.tensor + at * element;
    Reduce(request.reduction, &result, 1, sources, ranks_,
           std::min(quota_count, request.count - at));
    signals_.Publish(&mine_.reduced, first + chunk);
  }
  co_return absl::OkStatus();
}

Coroutine Collectives::AllGatherInChunks(const Request& request) {
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
      co_await StageFree(first + chunk);
      std::byte* stage = OpenStage(first + chunk);
      const Buffer& mine = request.send[0];
      const size_t at = chunk * chunk_bytes;
      const size_t bytes = size_of(mine.bytes, chunk);
      if (bytes != 0) CopyToShared(stage, mine.data + at, bytes);
      PublishStage(first + chunk);
      if (bytes != 0) Copy(request.recv[rank_].data + at, mine.data + at, bytes);
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
      const size_t bytes = size_of(part.bytes, last);
      if (bytes != 0) Copy(part.data + last * chunk_bytes, Stage(peer, first + last), bytes);
    }
    signals_.Publish(&mine_.reduced, first + last + 1);
  }
  co_return absl::OkStatus();
}

Coroutine Collectives::BroadcastInChunks(const Request& request) {
  const size_t chunk_bytes = view_.layout().chunk_bytes();
  const uint64_t chunks = CeilDiv(request.count, chunk_bytes);
  const uint64_t first = chunks_;
  chunks_ += chunks;

  for (uint64_t chunk = 0; chunk < chunks; ++chunk) {
    std::byte* tensor = request.tensor + chunk * chunk_bytes;
    const size_t bytes = std::min(chunk_bytes, request.count - chunk * chunk_bytes);
    if (rank_ == request.root) {
      // The readers report when they are done, because they do not wait for each other.
      co_await StageFree(first + chunk);
      std::byte* stage = OpenStage(first + chunk);
      CopyToShared(stage, tensor, bytes);
      PublishStage(first + chunk);
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

Coroutine Collectives::Exchange(const Request& request) {
  // Only sender and receiver know a size, but all ranks must agree on the number of rounds.
  const size_t row_bytes = ranks_ * sizeof(uint64_t);
  static_assert(kMaxRanks * sizeof(uint64_t) <= sizeof(Slot::body));
  Slot& sizes = OpenSlot();
  for (int rank = 0; rank < ranks_; ++rank) {
    const uint64_t bytes = request.send[rank].bytes;
    std::memcpy(sizes.Message(row_bytes) + rank * sizeof(bytes), &bytes, sizeof(bytes));
  }
  co_await PublishSlot(sizes);
  // The hash of 16 bits is not enough where peers write to each other's stages.
  if (!SameHashes() || !AllSame()) co_return Mismatch();
  uint64_t longest = 0;
  for (int from = 0; from < ranks_; ++from) {
    const std::byte* row = view_.slot(from, round_).Message(row_bytes);
    for (int to = 0; to < ranks_; ++to) {
      uint64_t bytes;
      std::memcpy(&bytes, row + to * sizeof(bytes), sizeof(bytes));
      longest = std::max(longest, bytes);
      if (to == rank_ && bytes != request.recv[from].bytes) {
        co_return absl::FailedPreconditionError(
            absl::StrCat(Name(request.kind), ": rank ", from, " sends ", bytes, " bytes to rank ",
                         rank_, ", which expects ", request.recv[from].bytes, " from it"));
      }
    }
  }

  const Coroutine swap = SwapInChunks(request, longest);
  const absl::Status status = co_await swap;
  co_return status;
}

Coroutine Collectives::SwapInChunks(const Request& request, size_t longest) {
  const size_t quota = Quota();
  const uint64_t chunks = CeilDiv(longest, quota);
  const uint64_t first = chunks_;
  chunks_ += chunks;
  const auto piece_of = [&](const Buffer& part, uint64_t chunk) {
    const size_t at = std::min(part.bytes, chunk * quota);
    return Buffer{part.data + at, std::min(quota, part.bytes - at)};
  };
  const auto sent_to = [&](int rank) -> const Buffer& {
    return request.send[request.kind == Kind::kAllGather ? 0 : rank];
  };

  for (uint64_t chunk = 0; chunk <= chunks; ++chunk) {
    if (chunk < chunks) {
      OpenPlaces(first + chunk, /*swap=*/true);
      for (int i = 1; i < ranks_; ++i) {
        const Buffer piece = piece_of(sent_to(Next(i)), chunk);
        Copy(Place(rank_, Next(i), first + chunk), piece.data, piece.bytes);
      }
      PublishStage(first + chunk);
      const Buffer piece = piece_of(sent_to(rank_), chunk);
      Copy(piece_of(request.recv[rank_], chunk).data, piece.data, piece.bytes);
    }
    if (chunk == 0) continue;
    for (int i = 1; i < ranks_; ++i) {
      // Also wait for ranks that send nothing to this one: they have then read the places to which
      // the next chunk is written.
      co_await Staged(Next(i), first + chunk);
      const Buffer piece = piece_of(request.recv[Next(i)], chunk - 1);
      Copy(piece.data, Place(Next(i), rank_, first + chunk - 1), piece.bytes);
    }
    signals_.Publish(&mine_.reduced, first + chunk);
  }
  co_return absl::OkStatus();
}

}  // namespace ddp::backends::shm
