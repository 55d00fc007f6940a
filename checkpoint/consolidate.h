// For formats that rank 0 writes alone: makes the parts of all ranks whole, and reads for all ranks
// what one of them has read.
//
//   DDP_ASSIGN_OR_RETURN(state, Consolidate(std::move(state), ranks));
//   if (ranks.rank() == 0) DDP_RETURN_IF_ERROR(pt->Write(state, path));
//   DDP_ASSIGN_OR_RETURN(std::optional<State> read,
//                        ReadByRank0(*pt, path, request, ranks, broadcast));
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/coordinator.h"
#include "checkpoint/format.h"
#include "checkpoint/state.h"

namespace ddp::checkpoint {

// The key of State::root under which such a checkpoint has State::per_rank, by key of its dicts:
// {key: [value of rank 0, value of rank 1, …]}.
inline constexpr char kPerRankEntries[] = "per_rank";

// Moves bytes from rank `from`, which is not 0, to rank 0. Every rank calls it, with a tensor of
// one dimension of bytes on the CPU: on `from` they are sent, on rank 0 received; on other ranks it
// is undefined. Example: send and recv of a process group.
using MoveToRank0 = std::function<absl::Status(int from, const at::Tensor& bytes)>;

// Collective. On rank 0, the state with all of `sharded` in `root`, whole and on the CPU, and
// `per_rank` of all ranks under kPerRankEntries; elsewhere, `root` as it was. Tensors are
// moved one by one, by `move`; null: through the coordinator, which is slow for large ones. Not a
// collective call, and returns `state` as it is, where it has neither parts nor per-rank entries:
// either all ranks have some, or none. InvalidArgument, on every rank: parts that do not make up
// their tensor (CheckCoverage), a path that is taken, an entry of another rank than its own, keys
// of entries that differ between ranks.
absl::StatusOr<State> Consolidate(State state, const Coordinator& ranks,
                                  const MoveToRank0& move = nullptr);

// Collective. What format.Read(path, request) gives on each rank, but rank 0 alone reads the file,
// and each byte once: the others get the values from it, and keep of tensors the parts that they
// want. Tensors are contiguous, and share their memory only where they are one tensor. The errors
// of rank 0 are all ranks'. nullopt, on all ranks, where each has to read for itself: a value
// cannot be sent (a sparse tensor, a complex number), the ranks do not want the same, but for parts
// of tensors, or those parts are all that they want, or they leave out what cannot be read.
absl::StatusOr<std::optional<State>> ReadByRank0(Format& format, const std::string& path,
                                                 const ReadRequest& request,
                                                 const Coordinator& ranks,
                                                 const BroadcastBytes& broadcast);

// For a format's Read: `request`, and the entries of ranks that it asks for, as a part of the root.
ReadRequest WithPerRankEntries(ReadRequest request);

// The reverse of Consolidate, of what was read: moves what `root` has under kPerRankEntries to
// `per_rank`, and keeps of it what `which` says for this rank of `ranks`; null: a world size of 1.
// What has another form stays where it is.
void TakePerRank(State& state, PerRank which, const Coordinator* ranks);

}  // namespace ddp::checkpoint
