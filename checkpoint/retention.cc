#include "checkpoint/retention.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace ddp::checkpoint {
namespace {

// Oldest first; false if the names have no common order.
bool SortCandidates(std::vector<Candidate>& candidates) {
  std::vector<NamedFile> files;
  for (const Candidate& candidate : candidates) files.push_back({candidate.name, candidate.file});
  if (!SortByAge(files).ok()) return false;
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.name < b.name; });
  return true;
}

bool IsMultiple(const CheckpointName& name, int64_t every) {
  const int64_t number = name.steps.has_value() ? *name.steps : *name.epochs;
  return number % every == 0;
}

// The value of `metric`; nullopt if it has none.
std::optional<double> ValueOf(const Candidate& candidate, const std::string& metric) {
  if (!candidate.metrics.has_value()) return std::nullopt;
  const auto found = candidate.metrics->find(metric);
  if (found == candidate.metrics->end() || std::isnan(found->second)) return std::nullopt;
  return found->second;
}

}  // namespace

absl::StatusOr<BestMetric> ParseBestMetric(absl::string_view text) {
  const auto invalid = [&] {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", text,
        "' is not of the form METRIC:max, METRIC:min, METRIC:max:COUNT or METRIC:min:COUNT"));
  };
  BestMetric best;
  absl::string_view rest = text;
  const auto take_last = [&]() -> std::optional<absl::string_view> {
    const size_t colon = rest.rfind(':');
    if (colon == absl::string_view::npos) return std::nullopt;
    const absl::string_view last = rest.substr(colon + 1);
    rest = rest.substr(0, colon);
    return last;
  };
  std::optional<absl::string_view> last = take_last();
  if (int64_t count = 0; last.has_value() && absl::SimpleAtoi(*last, &count)) {
    if (count < 1) return invalid();
    best.count = count;
    last = take_last();
  }
  if (!last.has_value() || rest.empty() || (*last != "max" && *last != "min")) return invalid();
  best.metric = std::string(rest);
  best.greatest = *last == "max";
  return best;
}

std::vector<Candidate> BestFirst(std::vector<Candidate> candidates, const BestMetric& best) {
  std::erase_if(candidates, [&](const Candidate& candidate) {
    return !ValueOf(candidate, best.metric).has_value();
  });
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.name < b.name; });
  std::stable_sort(candidates.begin(), candidates.end(),
                   [&](const Candidate& a, const Candidate& b) {
                     const double x = *ValueOf(a, best.metric);
                     const double y = *ValueOf(b, best.metric);
                     return best.greatest ? x > y : x < y;
                   });
  return candidates;
}

std::vector<std::string> ToDelete(std::vector<Candidate> candidates, const RetentionRules& rules,
                                  absl::string_view saved) {
  if (rules.keep_all() || !SortCandidates(candidates)) return {};
  std::set<std::string> kept;
  const int64_t last = std::max<int64_t>(rules.last, 1);
  const int64_t size = static_cast<int64_t>(candidates.size());
  for (int64_t i = std::max<int64_t>(size - last, 0); i < size; ++i) {
    kept.insert(candidates[static_cast<size_t>(i)].file);
  }

  const absl::Duration apart = absl::Hours(1) * rules.hours;
  std::optional<absl::Time> before;
  const Candidate* newest_verified = nullptr;
  for (const Candidate& candidate : candidates) {
    bool keep = candidate.pinned || candidate.file == saved;
    keep = keep || (rules.every > 0 && IsMultiple(candidate.name, rules.every));
    keep = keep || (rules.best.has_value() && !candidate.metrics.has_value());
    // The clock may have been set back, or the run resumed from an older one.
    if (rules.hours > 0 &&
        (!before.has_value() || absl::AbsDuration(candidate.time - *before) >= apart)) {
      before = candidate.time;
      keep = true;
    }
    if (keep) kept.insert(candidate.file);
    if (candidate.verified) newest_verified = &candidate;
  }
  if (newest_verified != nullptr) kept.insert(newest_verified->file);

  if (rules.best.has_value()) {
    std::vector<Candidate> best = BestFirst(candidates, *rules.best);
    for (size_t i = 0; i < best.size() && static_cast<int64_t>(i) < rules.best->count; ++i) {
      kept.insert(best[i].file);
    }
  }

  std::vector<std::string> deleted;
  for (const Candidate& candidate : candidates) {
    if (kept.count(candidate.file) == 0) deleted.push_back(candidate.file);
  }
  return deleted;
}

}  // namespace ddp::checkpoint
