#include "ddp/trainer/trainer.h"

#include "absl/strings/str_format.h"
#include "base/status.h"
#include "ddp/trainer/resume.h"
#include "ddp/trainer/run.h"
#include "ddp/trainer/setup.h"
#include "ddp/trainer/training_loop.h"

namespace ddp::trainer {

absl::StatusOr<Report> Train(const session::Session& session, const Task& task,
                             const data::Dataset& train, const data::Dataset& test,
                             const TrainerOptions& options) {
  Run run(session, task, train, test, options);
  DDP_RETURN_IF_ERROR(SetUp(run));
  DDP_RETURN_IF_ERROR(Resume(run));
  return TrainingLoop(run).Execute();
}

std::string Summary(const Report& report, double wall_seconds) {
  return absl::StrFormat("test accuracy %.4f loss %.4f epochs %d wall %.1f s", report.test.accuracy,
                         report.test.loss, report.epochs, wall_seconds);
}

}  // namespace ddp::trainer
