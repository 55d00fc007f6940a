// What an operation came to on each rank. Coordinator::Agree gives one error, and cannot be told
// from a failure of the agreement itself, after which ranks may think differently.
//
//   // Collective. An error here: the ranks could not be asked.
//   DDP_ASSIGN_OR_RETURN(Outcomes outcomes, GatherOutcomes(ranks, Write()));
//   const absl::Status failed = FirstFailure(outcomes);  // the same on all ranks
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/coordinator.h"

namespace ddp::checkpoint {

// They are indexed by rank. Errors have code and message only, without payloads.
using Outcomes = std::vector<absl::StatusOr<std::string>>;

// Collective.
absl::StatusOr<Outcomes> GatherOutcomes(const Coordinator& ranks,
                                        const absl::StatusOr<std::string>& mine);

// The error of the lowest rank that has one, prefixed with "rank N: " if there are several ranks.
// One that all ranks have, and that names a rank, they have agreed on before: it stays as it is.
absl::Status FirstFailure(const Outcomes& outcomes);

// The same ranks, for a caller that may go on after an error: a coordinator of a job prints the
// errors of Agree and Broadcast (StoreCoordinator), and these are not printed. `ranks` must outlive
// it. Errors that come from another rank have no payloads.
class TryingRanks final : public Coordinator {
 public:
  explicit TryingRanks(const Coordinator& ranks) : ranks_(ranks) {}

  int rank() const override { return ranks_.rank(); }
  int size() const override { return ranks_.size(); }
  absl::Status Agree(const absl::Status& mine) const override;
  absl::StatusOr<std::string> Broadcast(const absl::StatusOr<std::string>& value) const override;
  absl::StatusOr<std::vector<std::string>> AllGather(const std::string& mine) const override {
    return ranks_.AllGather(mine);
  }
  absl::StatusOr<std::vector<std::string>> Gather(const std::string& mine) const override {
    return ranks_.Gather(mine);
  }

 private:
  const Coordinator& ranks_;
};

}  // namespace ddp::checkpoint
