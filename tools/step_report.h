// Measures the steps of a run, for benchmarks: the end of the first step and the time of the
// others.
//
//   StepReport report("out.json");
//   DDP_RETURN_IF_ERROR(report.CheckPath(session));
//   options.on_step = report.OnStep();
//   …
//   DDP_RETURN_IF_ERROR(report.Write(session, {{"test_loss", 0.5}}));
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "ddp/session/session.h"
#include "ddp/trainer/options.h"

namespace ddp::tools {

// Does nothing if the path is empty. Thread-compatible.
class StepReport {
 public:
  explicit StepReport(std::string path) : path_(std::move(path)) {}

  // Whether rank 0 can write the file: OptionError for bench_json. It is found out at the start,
  // and not after the run. Not collective.
  absl::Status CheckPath(const session::Session& session) const;

  // Returns a function for TrainerOptions::on_step; null if the path is empty. It reads the loss
  // from its device, which synchronises. The report must outlive it.
  std::function<trainer::StepAction(int64_t, const at::Tensor&)> OnStep();

  // Collective. Rank 0 writes one JSON object: ranks; steps; first_loss and last_loss (mean of the
  // last 20), means over ranks; step_ms_median and step_ms_mean of rank 0, without the first 10
  // steps; first_step_unix_s; pss_mib_per_rank (proportional set size after those, or in the end of
  // a shorter run, mean over ranks); and `further` values. A value is null if the run is too short
  // for it. Errors: those of WriteFileAtomically and ReduceDict.
  absl::Status Write(const session::Session& session,
                     const std::map<std::string, double>& further) const;

 private:
  const std::string path_;
  std::vector<double> losses_;
  std::vector<double> ends_s_;  // seconds since 1970
  double first_step_unix_s_ = 0;
  std::optional<double> pss_mib_;
};

}  // namespace ddp::tools
