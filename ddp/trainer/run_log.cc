#include "ddp/trainer/run_log.h"

#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status.h"
#include "ddp/trainer/logging/jsonl_writer.h"
#include "ddp/trainer/logging/tensorboard_writer.h"

namespace ddp::trainer {
namespace {

using Sinks = std::vector<std::unique_ptr<logging::MetricSink>>;

// Records from step `resumed_at` on are obsolete.
absl::StatusOr<Sinks> OpenSinks(const std::string& log_dir,
                                std::optional<int64_t> resumed_at = std::nullopt) {
  Sinks sinks;
  DDP_ASSIGN_OR_RETURN(auto events, logging::TensorBoardWriter::Create(
                                        {.log_dir = log_dir, .resumed_at_step = resumed_at}));
  DDP_ASSIGN_OR_RETURN(
      auto lines, logging::JsonlWriter::Open(absl::StrCat(log_dir, "/metrics.jsonl"), resumed_at));
  sinks.push_back(std::move(events));
  sinks.push_back(std::move(lines));
  return sinks;
}

}  // namespace

absl::StatusOr<std::unique_ptr<RunLog>> RunLog::Create(const std::string& log_dir, bool progress) {
  auto log = std::unique_ptr<RunLog>(new RunLog());
  log->log_dir_ = log_dir;
  if (!log_dir.empty()) {
    DDP_ASSIGN_OR_RETURN(log->sinks_, OpenSinks(log_dir));
  }
  if (progress) log->progress_.emplace(logging::ProgressOptions::ForDescriptor(STDERR_FILENO));
  return log;
}

absl::Status RunLog::Text(absl::string_view tag,
                          const std::vector<std::pair<std::string, std::string>>& table) {
  if (table.empty()) return absl::OkStatus();
  for (auto& sink : sinks_) {
    DDP_RETURN_IF_ERROR(sink->Text(tag, logging::HparamsTable(table), 0));
  }
  return absl::OkStatus();
}

absl::Status RunLog::ResumedAt(int64_t step) {
  if (sinks_.empty()) return absl::OkStatus();
  DDP_ASSIGN_OR_RETURN(sinks_, OpenSinks(log_dir_, step + 1));
  return absl::OkStatus();
}

void RunLog::BeginEpoch(int64_t epoch, int64_t epochs, int64_t steps, int64_t examples_per_step,
                        int64_t done) {
  if (!progress_) return;
  progress_->Begin(absl::StrCat("epoch ", epoch + 1, "/", epochs), steps, examples_per_step, done);
}

void RunLog::EndEpoch() {
  if (progress_) progress_->End();
}

absl::Status RunLog::Step(int64_t step, int64_t step_in_epoch, std::optional<double> loss,
                          absl::Span<const logging::Metric> metrics) {
  if (loss) {
    last_loss_ = loss;
    std::vector<logging::Metric> all = {{"train/loss", *loss}};
    all.insert(all.end(), metrics.begin(), metrics.end());
    DDP_RETURN_IF_ERROR(Record(step, all));
  }
  if (progress_) progress_->Update(step_in_epoch, last_loss_);
  return absl::OkStatus();
}

absl::Status RunLog::Evaluated(int64_t epoch, int64_t step, const Evaluation& evaluation,
                               bool record) {
  Print(absl::StrFormat("epoch %d: test accuracy %.4f loss %.4f", epoch, evaluation.accuracy,
                        evaluation.loss));
  if (!record) return absl::OkStatus();
  DDP_RETURN_IF_ERROR(Record(step, {{"test/accuracy", evaluation.accuracy},
                                    {"test/loss", evaluation.loss},
                                    {"epoch", static_cast<double>(epoch)}}));
  return Flush();
}

void RunLog::Print(absl::string_view line) {
  if (progress_) progress_->Print(line);
}

void RunLog::Warn(absl::string_view line) {
  if (progress_) return Print(line);
  logging::Progress(logging::ProgressOptions::ForDescriptor(STDERR_FILENO)).Print(line);
}

absl::Status RunLog::Flush() {
  for (auto& sink : sinks_) DDP_RETURN_IF_ERROR(sink->Flush());
  return absl::OkStatus();
}

absl::Status RunLog::Record(int64_t step, absl::Span<const logging::Metric> metrics) {
  for (auto& sink : sinks_) DDP_RETURN_IF_ERROR(sink->Scalars(step, metrics));
  return absl::OkStatus();
}

}  // namespace ddp::trainer
