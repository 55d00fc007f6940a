#include "ddp/trainer/trainer.h"

#include <filesystem>
#include <functional>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/file.h"
#include "base/status.h"
#include "ddp/collective_status.h"
#include "ddp/trainer/resume.h"
#include "ddp/trainer/run.h"
#include "ddp/trainer/setup.h"
#include "ddp/trainer/training_loop.h"

namespace ddp::trainer {

namespace {

// Does the work of a run, and tells its callbacks if it fails.
absl::StatusOr<Report> Execute(Run& run, const std::function<absl::StatusOr<Report>()>& work) {
  absl::StatusOr<Report> report = CatchCollective("", work);
  if (!report.ok()) run.callbacks.Exception(report.status());
  return report;
}

absl::StatusOr<Report> DryRun(const session::Session& session, const Task& task,
                              const data::AnyDataset& train, const data::AnyDataset* validation,
                              const data::AnyDataset& test, const TrainerOptions& given) {
  TrainerOptions options = given;
  options.log.dir = "";
  std::string folder;
  // Later than the run, which may have a thread that writes.
  const absl::Cleanup remove = [&] {
    std::error_code ignored;
    if (session.is_main() && !folder.empty()) std::filesystem::remove_all(folder, ignored);
  };
  Run run(session, task, train, validation, test, options);
  // A run that starts meanwhile removes only what no process holds (checkpoint::Folder).
  std::optional<DirectoryLock> held;
  int64_t before = 0;
  const auto work = [&]() -> absl::StatusOr<Report> {
    DDP_RETURN_IF_ERROR(SetUp(run));
    DDP_RETURN_IF_ERROR(Resume(run));
    DDP_RETURN_IF_ERROR(UseTemporaryFolder(run, given, folder));
    if (session.is_main() && !folder.empty()) {
      absl::StatusOr<DirectoryLock> lock = DirectoryLock::Shared(folder);
      if (lock.ok()) held.emplace(*std::move(lock));
    }
    before = run.position.step;
    options.stop_at_step = before + 2;
    return TrainingLoop(run).Execute();
  };
  DDP_ASSIGN_OR_RETURN(Report report, Execute(run, work));
  const int64_t steps = report.steps - before;
  // Without a folder of its own nothing was saved: what is there is another run's.
  const std::string saved =
      folder.empty() ? "" : std::filesystem::path(report.last_checkpoint).filename().string();
  report.dry_run = absl::StrCat(
      "dry run: ", steps, steps == 1 ? " step" : " steps", ", evaluated ",
      report.validation.examples > 0 ? absl::StrCat(report.validation.examples, " validation and ")
                                     : "",
      report.test.examples, " test examples, ",
      saved.empty() ? "saved nothing" : absl::StrCat("saved ", saved, " and removed it"));
  report.last_checkpoint = report.best_checkpoint = "";
  if (report.end.reason != EndReason::kSignal) report.end = {};
  report.end.saved = "";
  return report;
}

absl::StatusOr<Report> TrainOn(const session::Session& session, const Task& task,
                               const data::AnyDataset& train, const data::AnyDataset* validation,
                               const data::AnyDataset& test, const TrainerOptions& options) {
  if (options.dry_run) return DryRun(session, task, train, validation, test, options);
  Run run(session, task, train, validation, test, options);
  return Execute(run, [&]() -> absl::StatusOr<Report> {
    DDP_RETURN_IF_ERROR(SetUp(run));
    DDP_RETURN_IF_ERROR(Resume(run));
    if (!options.eval_only) run.folders.Claim(*run.log);  // a later life of the run goes on there
    return TrainingLoop(run).Execute();
  });
}

}  // namespace

absl::StatusOr<Report> Train(const session::Session& session, const Task& task,
                             const data::AnyDataset& train, const data::AnyDataset& test,
                             const TrainerOptions& options) {
  return TrainOn(session, task, train, nullptr, test, options);
}

absl::StatusOr<Report> Train(const session::Session& session, const Task& task,
                             const data::AnyDataset& train, const data::AnyDataset& validation,
                             const data::AnyDataset& test, const TrainerOptions& options) {
  return TrainOn(session, task, train, &validation, test, options);
}

std::string Summary(const Report& report, double wall_seconds) {
  constexpr char kByTestData[] = " (chosen by test data: on other data expect less)\n";
  const RunEnd& end = report.end;
  const bool has_test = report.test.examples > 0, has_validation = report.validation.examples > 0;
  std::string text = has_test ? report.test.table : report.validation.table;
  if (!report.dry_run.empty()) absl::StrAppend(&text, report.dry_run, "\n");
  if (!report.best_checkpoint.empty()) {
    absl::StrAppend(&text, "best checkpoint ", report.best_checkpoint, " by ", report.best_by,
                    absl::StartsWith(report.best_by, kTest) ? kByTestData : "\n");
  }
  for (const std::string& choice : report.by_test_data) {
    absl::StrAppend(&text, choice, kByTestData);
  }
  if (!report.last_checkpoint.empty() && report.last_checkpoint != end.saved) {
    absl::StrAppend(&text, "last checkpoint ", report.last_checkpoint, "\n");
  }
  if (end.early()) {
    absl::StrAppend(
        &text, "stopped by ", end.Name(), end.why.empty() ? "" : absl::StrCat(" (", end.why, ")"),
        " after step ", report.steps,
        end.saved.empty() ? ": nothing was saved" : absl::StrCat(": saved ", end.saved), "\n");
  }
  if (has_validation) absl::StrAppend(&text, "val ", Describe(report.validation), "\n");
  return absl::StrFormat("%stest %s epochs %d wall %.1f s", text,
                         has_test ? Describe(report.test) : "not evaluated", report.epochs,
                         wall_seconds);
}

}  // namespace ddp::trainer
