#include "ddp/trainer/trainer.h"

#include "absl/strings/str_format.h"
#include "ddp/trainer/training_run.h"

namespace ddp::trainer {

absl::StatusOr<Report> Train(const session::Session& session, const Task& task,
                             const data::Dataset& train, const data::Dataset& test,
                             const TrainerOptions& options) {
  return TrainingRun(session, task, train, test, options).Execute();
}

std::string Summary(const Report& report, double wall_seconds) {
  return absl::StrFormat("test accuracy %.4f loss %.4f epochs %d wall %.1f s", report.test.accuracy,
                         report.test.loss, report.epochs, wall_seconds);
}

}  // namespace ddp::trainer
