// Output of a run: TensorBoard event files, metrics.jsonl, and progress.
//
//   DDP_ASSIGN_OR_RETURN(auto log, RunLog::Create("runs/a", {"jsonl"}, /*progress=*/true));
//   log->BeginEpoch(0, 10, steps, examples_per_step, /*done=*/0);
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "ddp/trainer/evaluate.h"
#include "ddp/trainer/logging/metric_sink.h"
#include "ddp/trainer/logging/progress.h"
#include "ddp/trainer/position.h"

namespace ddp::trainer {

// Ranks other than 0 use one without files and progress. Thread-compatible; not collective. Errors
// name the file; ResourceExhausted if the disk is full.
class RunLog {
 public:
  // Empty `log_dir`: no files. `sinks`: names in logging::SinkRegistry. `progress`: a bar or lines
  // on standard error.
  static absl::StatusOr<std::unique_ptr<RunLog>> Create(const std::string& log_dir,
                                                        const std::vector<std::string>& sinks,
                                                        bool progress);

  absl::Status HyperParameters(const std::vector<std::pair<std::string, std::string>>& table);

  // The run was resumed after `step`, so records of later steps are obsolete: TensorBoard ignores
  // them, and they are removed from metrics.jsonl.
  absl::Status ResumedAt(int64_t step);

  // `done`: how many of the epoch's `steps` an earlier run has taken. The files get an event with
  // the numbers, after the first of the epoch's steps that they record.
  void BeginEpoch(int64_t epoch, int64_t epochs, int64_t steps, int64_t examples_per_step,
                  int64_t done);
  void EndEpoch();

  // Whether anything is shown or written.
  bool active() const { return progress_ || !sinks_.empty(); }

  // Records `loss`, if there is one, and `metrics`, if there are any, for this step in the files.
  absl::Status Step(int64_t step, int64_t step_in_epoch, std::optional<double> loss,
                    absl::Span<const logging::Metric> metrics);
  // Writes values to the files.
  absl::Status Record(int64_t step, absl::Span<const logging::Metric> metrics);
  // Reports one evaluation, or both, at `position`; null: not evaluated. `record`: also write to
  // the files; pass false if they already contain this evaluation.
  absl::Status Evaluated(const Position& position, const Evaluation* validation,
                         const Evaluation* test, bool record);

  // Prints a line, if progress is shown.
  void Print(absl::string_view line);
  // Prints it on standard error in any case.
  void Warn(absl::string_view line);

  // Records what has happened at a step, as names and texts. Flushes.
  absl::Status Event(int64_t step, const std::string& event,
                     const std::vector<std::pair<std::string, std::string>>& fields);
  // Records why and where the run has ended, and from which checkpoint it goes on (empty: none).
  // Flushes.
  absl::Status Ended(int64_t step, const std::string& reason, const std::string& saved);

  absl::Status Flush();

 private:
  RunLog() = default;

  std::string log_dir_;
  std::vector<std::string> sink_names_;
  std::vector<std::unique_ptr<logging::MetricSink>> sinks_;
  std::optional<logging::Progress> progress_;
  std::optional<double> last_loss_;
  // Of BeginEpoch; empty once they are in the files.
  std::vector<std::pair<std::string, std::string>> epoch_;
};

}  // namespace ddp::trainer
