// Runs beside each other: a table for the shell, and JSON.
//
//   std::vector<std::string> tags = SelectTags(runs, "loss");
//   fputs(PlotTable(runs, tags, orders).c_str(), stdout);
//
// Thread-safe.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"
#include "tools/plot_runs.h"

namespace ddp::tools {

// Whether the largest value of a tag is its best, by tag; others are told by KnownOrder.
using BestOrders = std::map<std::string, bool>;

// True: the largest value is the best (accuracy, F1, AUC, …), false: the smallest (loss,
// perplexity, …); nullopt for other tags, as a learning rate: none is. Decided by the words of the
// part after the last '/'.
std::optional<bool> KnownOrder(absl::string_view tag);

// All tags of the runs, sorted, in which the regular expression (ECMAScript) `pattern` is found;
// empty: all. InvalidArgument, the problem alone, for what is no regular expression.
absl::StatusOr<std::vector<std::string>> SelectTags(const std::vector<LoggedRun>& runs,
                                                    const std::string& pattern);

// The options in which the runs differ, by path, each with the value in every run ("-": none).
std::map<std::string, std::vector<std::string>> DifferingOptions(
    const std::vector<LoggedRun>& runs);

// Lists, per tag, the last value of each run and the best one with its step; of several runs also
// the differences to the first run, and the options in which they differ.
std::string PlotTable(const std::vector<LoggedRun>& runs, const std::vector<std::string>& tags,
                      const BestOrders& orders);

// {"runs": [{"name", "folder", "options", "tags": {TAG: {"last", "last_step", "best", "best_step",
// "points", "not_finite"}}}], "differing_options": [PATH…]}; best is null where a tag has none.
nlohmann::ordered_json PlotJson(const std::vector<LoggedRun>& runs,
                                const std::vector<std::string>& tags, const BestOrders& orders);

}  // namespace ddp::tools
