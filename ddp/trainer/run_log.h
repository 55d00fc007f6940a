// What a run tells the world while it trains: event files, metrics.jsonl, and progress.
//
//   DDP_ASSIGN_OR_RETURN(auto log, RunLog::Create("runs/a", /*progress=*/true));
//   log->BeginEpoch(0, 10, steps, examples_per_step);
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "ddp/trainer/evaluate.h"
#include "ddp/trainer/logging/metric_sink.h"
#include "ddp/trainer/logging/progress.h"

namespace ddp::trainer {

// Ranks other than 0 have one that is silent. Thread-compatible; nothing is collective.
class RunLog {
 public:
  // `log_dir` empty: no files. `progress`: bar or lines on standard error.
  static absl::StatusOr<std::unique_ptr<RunLog>> Create(const std::string& log_dir, bool progress);

  absl::Status Text(absl::string_view tag,
                    const std::vector<std::pair<std::string, std::string>>& table);

  // The run goes on after `step`: what the files say of later steps is void. TensorBoard is told to
  // leave it out, and metrics.jsonl loses it.
  absl::Status ResumedAt(int64_t step);

  // `done`: of the epoch's `steps`, those that a run before this one has taken.
  void BeginEpoch(int64_t epoch, int64_t epochs, int64_t steps, int64_t examples_per_step,
                  int64_t done);
  void EndEpoch();

  // `due`: this step is to be recorded, not only shown. Reads `loss` from its device if so.
  absl::Status Step(int64_t step, int64_t step_in_epoch, bool due, const at::Tensor& loss,
                    double lr, std::optional<double> gradient_norm);
  // `record`: in the files too, which have it already if nothing was trained since.
  absl::Status Evaluated(int64_t epoch, int64_t step, const Evaluation& evaluation, bool record);

  // A line for the person who watches.
  void Print(absl::string_view line);

  absl::Status Flush();

 private:
  RunLog() = default;
  absl::Status Record(int64_t step, absl::Span<const logging::Metric> metrics);

  std::string log_dir_;
  std::vector<std::unique_ptr<logging::MetricSink>> sinks_;
  std::optional<logging::Progress> progress_;
  std::optional<double> last_loss_;
};

}  // namespace ddp::trainer
