// Which checkpoints of a run to delete. Needs neither torch nor the file system.
//
//   RetentionRules rules{.last = 3, .every = 10, .best =
//   ParseBestMetric("test/accuracy:max").value()}; for (const std::string& file :
//   ToDelete(candidates, rules, "epoch_12.pt")) …
//
// Kept is what any rule keeps. Functions are thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "checkpoint/name.h"

namespace ddp::checkpoint {

// "METRIC:max[:K]" or "METRIC:min[:K]": the K checkpoints with the greatest or least value.
struct BestMetric {
  std::string metric;  // may have colons and slashes
  bool greatest = true;
  int64_t count = 1;

  friend bool operator==(const BestMetric&, const BestMetric&) = default;
};

// InvalidArgument, saying what is expected.
absl::StatusOr<BestMetric> ParseBestMetric(absl::string_view text);

// A rule at its default keeps nothing, but if all are, all checkpoints are kept.
struct RetentionRules {
  int64_t last = 0;   // the newest ones, by name
  int64_t every = 0;  // epoch_N if N, step_S and epoch_N_step_S if S is a multiple of this
  // One per so many hours: the oldest, and each that is this long after the one kept before it.
  double hours = 0;
  std::optional<BestMetric> best = std::nullopt;

  // Whether every checkpoint is kept.
  bool keep_all() const { return last == 0 && every == 0 && hours == 0 && !best.has_value(); }
};

// What is known of a checkpoint.
struct Candidate {
  CheckpointName name;
  std::string file;
  absl::Time time = absl::InfinitePast();  // of the save
  // These are from that time; nullopt: not known, because its notes were lost. NaN counts as no
  // value.
  std::optional<std::map<std::string, double>> metrics = std::nullopt;
  bool pinned = false;
  bool verified = false;  // was read back after it was written
};

// Candidates that have the metric, the best first; of equal ones the older first.
std::vector<Candidate> BestFirst(std::vector<Candidate> candidates, const BestMetric& best);

// Files to delete, oldest first. Never deleted, besides what the rules keep: `saved`, which was
// saved just now; the newest; pinned ones; the newest verified one; and, with a rule for a metric,
// those whose metrics are not known. Nothing is deleted if the names have no common order (see
// SortByAge).
std::vector<std::string> ToDelete(std::vector<Candidate> candidates, const RetentionRules& rules,
                                  absl::string_view saved);

}  // namespace ddp::checkpoint
