#include "ddp/trainer/run_log.h"

#include <unistd.h>

#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "ddp/trainer/logging/sink_registry.h"
#include "ddp/trainer/logging/tensorboard_writer.h"

namespace ddp::trainer {
namespace {

using Sinks = std::vector<std::unique_ptr<logging::MetricSink>>;

// Records from step `resumed_at` on are obsolete.
absl::StatusOr<Sinks> OpenSinks(const std::string& log_dir, const std::vector<std::string>& names,
                                std::optional<int64_t> resumed_at = std::nullopt) {
  Sinks sinks;
  // A name that is there twice would write each record twice.
  for (const std::string& name : std::set<std::string>(names.begin(), names.end())) {
    DDP_ASSIGN_OR_RETURN(const auto open, logging::SinkRegistry::Find(name));
    DDP_ASSIGN_OR_RETURN(auto sink, open({.log_dir = log_dir, .resumed_at_step = resumed_at}));
    sinks.push_back(std::move(sink));
  }
  return sinks;
}

}  // namespace

absl::StatusOr<std::unique_ptr<RunLog>> RunLog::Create(const std::string& log_dir,
                                                       const std::vector<std::string>& sinks,
                                                       bool progress) {
  auto log = std::unique_ptr<RunLog>(new RunLog());
  log->log_dir_ = log_dir;
  log->sink_names_ = sinks;
  if (!log_dir.empty()) {
    DDP_ASSIGN_OR_RETURN(log->sinks_, OpenSinks(log_dir, sinks));
  }
  if (progress) log->progress_.emplace(logging::ProgressOptions::ForDescriptor(STDERR_FILENO));
  return log;
}

absl::Status RunLog::HyperParameters(
    const std::vector<std::pair<std::string, std::string>>& table) {
  if (table.empty()) return absl::OkStatus();
  for (auto& sink : sinks_) {
    DDP_RETURN_IF_ERROR(sink->HyperParameters(table));
    DDP_RETURN_IF_ERROR(sink->Text("hyper_parameters", logging::HparamsTable(table), 0));
  }
  return absl::OkStatus();
}

absl::Status RunLog::ResumedAt(int64_t step) {
  if (sinks_.empty()) return absl::OkStatus();
  DDP_ASSIGN_OR_RETURN(sinks_, OpenSinks(log_dir_, sink_names_, step + 1));
  return absl::OkStatus();
}

void RunLog::BeginEpoch(int64_t epoch, int64_t epochs, int64_t steps, int64_t examples_per_step,
                        int64_t done) {
  epoch_ = {{"epoch", absl::StrCat(epoch + 1)},
            {"epochs", absl::StrCat(epochs)},
            {"steps", absl::StrCat(steps)}};
  if (!progress_) return;
  progress_->Begin(absl::StrCat("epoch ", epoch + 1, "/", epochs), steps, examples_per_step, done);
}

void RunLog::EndEpoch() {
  if (progress_) progress_->End();
}

absl::Status RunLog::Step(int64_t step, int64_t step_in_epoch, std::optional<double> loss,
                          absl::Span<const logging::Metric> metrics) {
  if (loss) last_loss_ = loss;
  std::vector<logging::Metric> all;
  if (loss) all.push_back({"train/loss", *loss});
  all.insert(all.end(), metrics.begin(), metrics.end());
  if (!all.empty()) {
    DDP_RETURN_IF_ERROR(Record(step, all));
    if (!epoch_.empty()) {
      epoch_.emplace_back("step_in_epoch", absl::StrCat(step_in_epoch));
      DDP_RETURN_IF_ERROR(Event(step, "epoch", std::exchange(epoch_, {})));
    }
  }
  if (progress_) progress_->Update(step_in_epoch, last_loss_);
  return absl::OkStatus();
}

absl::Status RunLog::Evaluated(const Position& position, const Evaluation* validation,
                               const Evaluation* test, bool record) {
  std::string line = absl::StrCat("epoch ", position.epoch);
  if (validation != nullptr) {
    if (position.sample > 0) absl::StrAppend(&line, " step ", position.step);
    absl::StrAppend(&line, ": val ", Describe(*validation));
  }
  if (test != nullptr) {
    absl::StrAppend(&line, validation != nullptr ? " " : ": ", "test ", Describe(*test));
  }
  Print(line);
  if (!record) return absl::OkStatus();
  std::map<std::string, double> values;
  if (validation != nullptr) values = Metrics(*validation, kValidation);
  if (test != nullptr) values.merge(Metrics(*test));
  std::vector<logging::Metric> metrics;
  for (const auto& [tag, value] : values) metrics.push_back({tag, value});
  metrics.push_back({"epoch", static_cast<double>(position.epoch)});
  DDP_RETURN_IF_ERROR(Record(position.step, metrics));
  return Flush();
}

void RunLog::Print(absl::string_view line) {
  if (progress_) progress_->Print(line);
}

void RunLog::Warn(absl::string_view line) {
  if (progress_) return Print(line);
  logging::Progress(logging::ProgressOptions::ForDescriptor(STDERR_FILENO)).Print(line);
}

absl::Status RunLog::Event(int64_t step, const std::string& event,
                           const std::vector<std::pair<std::string, std::string>>& fields) {
  std::vector<std::pair<std::string, std::string>> all = {{"event", event}};
  all.insert(all.end(), fields.begin(), fields.end());
  for (auto& sink : sinks_) DDP_RETURN_IF_ERROR(sink->Event(step, all));
  return Flush();
}

absl::Status RunLog::Ended(int64_t step, const std::string& reason, const std::string& saved) {
  return Event(step, "run_end", {{"reason", reason}, {"saved", saved}});
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
