// Reads what runs have logged: the curves of metrics.jsonl and the options of config.yaml.
//
//   DDP_ASSIGN_OR_RETURN(FoundRuns found, ReadRuns({"runs/a", "runs/sweep"}));
//   for (const LoggedRun& run : found.runs) run.curves.at("train/loss").points.back().value;
//
// Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ddp::tools {

struct CurvePoint {
  int64_t step = 0;
  double value = 0;  // may be NaN or infinite
};

// The values of one tag. Not empty; steps increase.
struct Curve {
  std::vector<CurvePoint> points;

  // The point with the largest or smallest finite value, the first of several; nullopt: none is
  // finite.
  std::optional<CurvePoint> Best(bool largest) const;
  // Returns how many values are NaN or infinite.
  int64_t NotFinite() const;
};

struct LoggedRun {
  std::string name;    // its folder, without the folders that all runs have in common
  std::string folder;  // as given, or found in what was given
  std::map<std::string, Curve> curves;         // by tag
  std::map<std::string, std::string> options;  // values by path; of the last start of the run
};

struct FoundRuns {
  std::vector<LoggedRun> runs;        // each folder once; empty only if there are errors
  std::vector<std::string> warnings;  // what was left out, with its file
  std::vector<std::string> errors;    // folders and runs that could not be read, by name
};

// Each folder is that of a run, with a metrics.jsonl, or one that has such folders, as a sweep's.
// One that cannot be read, or is none of these, is an error in the result, and the others are read
// nevertheless. A run or a sweep that has no values yet is a warning.
//
// Where a tag's steps go back, as after a resume, its later lines count. A last line that is not
// finished is left out, and so are lines that are no records, with a warning. Options are those of
// config.yaml, or of the last config_step_N.yaml; without these files of the table
// "hyper_parameters" in metrics.jsonl. The paths of logs and checkpoints are left out.
//
// NotFound if there is nothing to show: no run has values, though all could be read.
absl::StatusOr<FoundRuns> ReadRuns(const std::vector<std::string>& folders);

}  // namespace ddp::tools
