// Measures the steps of a run, for benchmarks: the end of the first step and the time of the
// others.
//
//   StepReport report;
//   options.on_step = [&](int64_t, const at::Tensor& loss) {
//     report.Add(loss);
//     return StepAction::kContinue;
//   };
//   DDP_RETURN_IF_ERROR(report.Write(session, "report.json"));
#pragma once

#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "ddp/session/session.h"

namespace ddp::tools {

// Thread-compatible.
class StepReport {
 public:
  // Call it after each step. Reads the loss from its device, which synchronises.
  void Add(const at::Tensor& loss);

  // Collective. Rank 0 writes one JSON object to `path`: ranks; steps; first_loss and last_loss
  // (mean of the last 20), means over ranks; step_ms_median and step_ms_mean of rank 0, without the
  // first 10 steps; first_step_unix_s; pss_mib_per_rank (proportional set size, mean over ranks). A
  // value is null if the run is too short for it. Errors: those of WriteFileAtomically and
  // ReduceDict.
  absl::Status Write(const session::Session& session, const std::string& path) const;

 private:
  std::vector<double> losses_;
  std::vector<double> ends_s_;  // seconds since 1970
  double first_step_unix_s_ = 0;
};

}  // namespace ddp::tools
