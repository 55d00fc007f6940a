// Results of a sweep: sweep.jsonl and a table.
//
//   DDP_ASSIGN_OR_RETURN(SweepMetric metric, ParseSweepMetric("test/accuracy:max"));
//   DDP_RETURN_IF_ERROR(WriteSweepFile("runs/sweep.jsonl", jobs, results));
//   puts(SweepTable(jobs, results, metric).c_str());
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "ddp/config/job.h"

namespace ddp::config {

struct SweepMetric {
  std::string name;  // empty: none
  bool largest_first = true;
};

// Parses "NAME", "NAME:max" or "NAME:min"; "" means no metric. The message of InvalidArgument is
// the problem alone.
absl::StatusOr<SweepMetric> ParseSweepMetric(absl::string_view text);

// Cells in columns as wide as their widest cell, two blanks between them, none at the ends of
// lines; one line per row. `rows` is not empty, and its rows have one length.
std::string AlignedTable(const std::vector<std::vector<std::string>>& rows);

// Replaces `path` atomically. Each job is one line with a JSON object: id, overrides, status,
// reason, build, metrics, folder.
absl::Status WriteSweepFile(const std::string& path, const std::vector<Job>& jobs,
                            const std::vector<JobResult>& results);

// The table has one line per job: finished ones by the metric, best first, then those without it,
// then the others with the reason; with the number of its attempts, if a job has begun more than
// once, and with the builds of the program, if there are several. Running ones have the last values
// of the metric and of the training loss, and their progress where the result has it. Ends with a
// newline.
std::string SweepTable(const std::vector<Job>& jobs, const std::vector<JobResult>& results,
                       const SweepMetric& metric);

}  // namespace ddp::config
