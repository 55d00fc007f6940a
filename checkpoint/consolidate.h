// For formats that rank 0 writes alone: gives it the tensors whose parts the ranks hold, and reads
// for all ranks what one of them has read.
//
//   DDP_ASSIGN_OR_RETURN(auto gathering, Gathering::Begin(std::move(state), ranks, move));
//   DDP_ASSIGN_OR_RETURN(Outcomes written, gathering->Run([&](TensorSource* source) {
//     return pt->Write(gathering->state(), path, source);
//   }, "saving"));
//   DDP_ASSIGN_OR_RETURN(std::optional<State> read,
//                        ReadByRank0(*pt, path, request, ranks, broadcast));
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/coordinator.h"
#include "checkpoint/cover.h"
#include "checkpoint/format.h"
#include "checkpoint/outcomes.h"
#include "checkpoint/state.h"

namespace ddp::checkpoint {

// The key of State::root under which such a checkpoint has State::per_rank, by key of its dicts:
// {key: [value of rank 0, value of rank 1, …]}.
inline constexpr char kPerRankEntries[] = "per_rank";

// What ranks have of their own (State::per_rank), by rank, as such a checkpoint has it under
// kPerRankEntries. A rank without an entry that another one has: InvalidArgument, or None in its
// place.
enum class MissingEntry { kRefused, kNone };
absl::StatusOr<c10::impl::GenericDict> ListsOfRanks(
    const std::vector<c10::impl::GenericDict>& by_rank, MissingEntry missing);

// A state on its way to rank 0, which gets tensors one by one, so that it needs memory for the
// largest of them only. Small tensors of `per_rank` come together, since of buffers there may be
// many on each rank: rank 0 holds at most 64 MiB of them. Thread-compatible. All ranks make the
// same calls.
class Gathering {
 public:
  // Collective. `move`: null: through the coordinator, which is slow for large tensors. `ranks`
  // outlives this. Entries of `per_rank` are sent to rank 0 at once, through the coordinator, but
  // for the tensors in them, which are sent as those in parts are.
  // Nothing is sent where the state has neither parts nor such entries: either all ranks have some,
  // or none. InvalidArgument, on every rank: parts that do not make up their tensor
  // (CheckCoverage), a path that is taken, an entry of another rank than its own, keys of entries
  // that differ between ranks.
  static absl::StatusOr<std::unique_ptr<Gathering>> Begin(State state, const Coordinator& ranks,
                                                          MoveToRank0 move = nullptr);

  // On rank 0, everything is in `root`: per_rank of all ranks under kPerRankEntries, and for each
  // of `sharded`, and each tensor in `per_rank`, one that TensorSource gives. Elsewhere, `root` is
  // as it was.
  const State& state() const { return state_; }
  State TakeState() { return std::move(state_); }

  // Whether there are tensors that TensorSource gives. The same on all ranks.
  bool has_parts() const { return !tensors_.empty(); }

  // Collective; requires has_parts(). Calls `write` on rank 0, with a source of the tensors, which
  // the other ranks send as it asks for them. What came of it on each rank: if one fails, all end.
  // An error here: the ranks could not be asked. `what` is the beginning of errors.
  absl::StatusOr<Outcomes> Run(absl::FunctionRef<absl::Status(TensorSource* source)> write,
                               absl::string_view what);

  // Collective; requires has_parts(). The same, with one result for all ranks: if one fails, it is
  // the error of the lowest such rank.
  absl::Status Give(absl::FunctionRef<absl::Status(TensorSource* source)> take);

  // Collective. On rank 0, all tensors are in `root`, whole and on the CPU; then has_parts() is
  // false. If a rank fails, all return its error.
  absl::Status MakeWhole();

 private:
  class Source;
  struct InGroup {
    size_t group;
    size_t offset;  // in the message of its rank
  };
  struct Sharded {
    std::string path;
    PartsOfRanks parts;
    std::optional<InGroup> in_group = {};  // a small tensor of another rank than 0
  };

  Gathering(State state, const Coordinator& ranks, MoveToRank0 move)
      : state_(std::move(state)), ranks_(ranks), move_(std::move(move)) {}

  absl::Status FindParts();
  absl::Status TakePerRankEntries();
  absl::Status Send(const Sharded& tensor) const;
  absl::Status SendGroup(size_t group) const;
  absl::Status Move(const Sharded& tensor, const RankShard& shard, const at::Tensor& bytes) const;
  absl::Status SendAll() const;

  State state_;
  const Coordinator& ranks_;
  const MoveToRank0 move_;
  std::vector<Sharded> tensors_;
  std::vector<std::vector<size_t>> groups_;   // indices of tensors_ that are sent together
  std::vector<at::Tensor> places_;            // on rank 0: of each, in its root
  std::map<std::string, ShardedTensor> own_;  // this rank's parts
  std::map<const c10::StorageImpl*, size_t> by_storage_;  // on rank 0: indices of tensors_
};

// Collective. Gathering::Begin and MakeWhole: on rank 0 the whole state, elsewhere `root` as it
// was.
absl::StatusOr<State> Consolidate(State state, const Coordinator& ranks,
                                  MoveToRank0 move = nullptr);

// Collective. What format.Read(path, request) gives on each rank, but each byte of the file is read
// once: what it is by rank 0, and the tensors' bytes by all ranks in turn, which give them to each
// other and put their CRCs together (ReadRequest::unread; where a rank does not see the file, or a
// format has no such CRC, by rank 0). Ranks keep of tensors the parts that they want. Tensors are
// contiguous, and share their memory only where they are one tensor. The errors of rank 0 are all
// ranks'. nullopt, on all ranks, where each has to read for itself: a value cannot be sent (a
// sparse tensor, a complex number), the ranks do not want the same, but for parts of tensors, or
// those parts are all that they want, or they leave out what cannot be read.
absl::StatusOr<std::optional<State>> ReadByRank0(Format& format, const std::string& path,
                                                 const ReadRequest& request,
                                                 const Coordinator& ranks,
                                                 const BroadcastBytes& broadcast);

// Returns, for a format's Read, `request` with the entries of ranks that it asks for, as a part of
// the root.
ReadRequest WithPerRankEntries(ReadRequest request);

// The reverse of Consolidate, of what was read: moves what `root` has under kPerRankEntries to
// `per_rank`, and keeps of it what `which` says for this rank of `ranks`; null: a world size of 1.
// What has another form stays where it is.
void TakePerRank(State& state, PerRank which, const Coordinator* ranks);

}  // namespace ddp::checkpoint
