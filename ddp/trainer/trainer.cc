#include "ddp/trainer/trainer.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/exit_code.h"
#include "base/status.h"
#include "base/stop_signals.h"
#include "ddp/trainer/resume.h"
#include "ddp/trainer/run.h"
#include "ddp/trainer/setup.h"
#include "ddp/trainer/training_loop.h"

namespace ddp::trainer {

absl::StatusOr<Report> Train(const session::Session& session, const Task& task,
                             const data::AnyDataset& train, const data::AnyDataset& test,
                             const TrainerOptions& options) {
  Run run(session, task, train, test, options);
  DDP_RETURN_IF_ERROR(SetUp(run));
  DDP_RETURN_IF_ERROR(Resume(run));
  return TrainingLoop(run).Execute();
}

std::string RunEnd::Name() const {
  switch (reason) {
    case EndReason::kEnd:
      return "end";
    case EndReason::kMaxSteps:
      return "max_steps";
    case EndReason::kStopAtStep:
      return "stop_at_step";
    case EndReason::kMaxTime:
      return "max_time";
    case EndReason::kCallback:
      return "callback";
    case EndReason::kSignal:
      return absl::StrCat("signal ", StopSignalName(signal));
  }
  return "";
}

absl::Status RunEnd::status() const {
  return reason == EndReason::kSignal ? EndedBy(signal) : absl::OkStatus();
}

std::string Summary(const Report& report, double wall_seconds) {
  const RunEnd& end = report.end;
  const std::string stopped =
      end.early()
          ? absl::StrCat(
                "stopped by ", end.Name(), end.why.empty() ? "" : absl::StrCat(" (", end.why, ")"),
                " after step ", report.steps,
                end.saved.empty() ? ": nothing was saved" : absl::StrCat(": saved ", end.saved),
                "\n")
          : "";
  const std::string test = report.test.examples > 0 ? absl::StrCat("test ", Describe(report.test))
                                                    : "test not evaluated";
  return absl::StrFormat("%s%s epochs %d wall %.1f s", stopped, test, report.epochs, wall_seconds);
}

}  // namespace ddp::trainer
