// Trains a reference model on a reference data set, as chosen by flags.
//
//   bazel run //tools:train                                         # cnn on Fashion-MNIST, 2 ranks
//   bazel run //tools:train -- --model=mlp --nproc_per_node=4 --epochs=2
//   srun -N2 -n2 bazel-bin/tools/train --checkpoint_dir=/shared/run --resume=auto
//
// Only parses options and calls factories, and measures the steps with --bench_json; the training
// loop is //ddp/trainer.

#include <algorithm>
#include <cstdio>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/log/globals.h"
#include "absl/log/initialize.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/file.h"
#include "base/option_error.h"
#include "base/options.h"
#include "base/status.h"
#include "ddp/config/program.h"
#include "ddp/gather/gather.h"
#include "ddp/session/session.h"
#include "ddp/trainer/callbacks/monitors.h"
#include "ddp/trainer/trainer.h"
#include "nlohmann/json.hpp"
#include "tools/train_options.h"
#include "torch/utils.h"

namespace ddp::tools {
namespace {

constexpr size_t kWarmUpSteps = 10;
constexpr size_t kLastSteps = 20;
// It becomes null in JSON.
constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

double Mean(const std::vector<double>& values) {
  if (values.empty()) return kNone;
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double Median(std::vector<double> values) {
  if (values.empty()) return kNone;
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// Measures the steps of a run, for benchmarks: the end of the first step and the time of the
// others.
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

void StepReport::Add(const at::Tensor& loss) {
  losses_.push_back(loss.item<double>());
  ends_s_.push_back(absl::ToDoubleSeconds(absl::Nanoseconds(absl::GetCurrentTimeNanos())));
  if (ends_s_.size() == 1) first_step_unix_s_ = ends_s_[0];
}

absl::Status StepReport::Write(const session::Session& session, const std::string& path) const {
  std::vector<double> steps_ms;
  for (size_t i = kWarmUpSteps; i + 1 < ends_s_.size(); ++i) {
    steps_ms.push_back(1e3 * (ends_s_[i + 1] - ends_s_[i]));
  }
  const size_t last = std::min(kLastSteps, losses_.size());
  std::map<std::string, double> means = {
      {"first_loss", losses_.empty() ? kNone : losses_[0]},
      {"last_loss", Mean({losses_.end() - static_cast<int64_t>(last), losses_.end()})},
      {"pss_mib_per_rank", trainer::PssMib()}};
  DDP_ASSIGN_OR_RETURN(means, ReduceDict(session.process_group(), means, DictReduction::kMean));
  const nlohmann::json report = {{"ranks", session.size()},
                                 {"steps", losses_.size()},
                                 {"first_loss", means["first_loss"]},
                                 {"last_loss", means["last_loss"]},
                                 {"first_step_unix_s", first_step_unix_s_},
                                 {"step_ms_median", Median(steps_ms)},
                                 {"step_ms_mean", Mean(steps_ms)},
                                 {"pss_mib_per_rank", means["pss_mib_per_rank"]}};
  return session.Agree(session.is_main()
                           ? WriteFileAtomically(path, absl::StrCat(report.dump(), "\n"))
                           : absl::OkStatus());
}

// This is found out now, and not after the run.
absl::Status CheckBenchJson(const std::string& path) {
  absl::Status writable = MakeDirectories(DirectoryOf(path));
  if (writable.ok()) writable = ProveWritable(DirectoryOf(path));
  if (writable.ok()) return writable;
  return OptionError("bench_json", path, absl::StrCat("cannot be written: ", writable.message()),
                     writable.code());
}

absl::Status TrainAsRank(const session::Session& session, TrainOptions options) {
  const absl::Time start = absl::Now();
  trainer::Task task;
  datasets::Splits data;
  // Files and memory may fail on a single rank.
  DDP_RETURN_IF_ERROR(session.Agree(CatchStatus("", [&]() -> absl::Status {
    if (session.is_main() && !options.bench_json.empty()) {
      DDP_RETURN_IF_ERROR(CheckBenchJson(options.bench_json));
    }
    options.dataset.seed = options.trainer.seed;
    DDP_ASSIGN_OR_RETURN(data, datasets::Load(options.dataset));
    options.model.input_shape = data.input_shape;
    options.model.num_classes = data.num_classes;
    // Every rank makes the same model.
    torch::manual_seed(static_cast<uint64_t>(options.trainer.seed));
    DDP_ASSIGN_OR_RETURN(task, models::Make(options.model));
    return absl::OkStatus();
  })));

  StepReport report;
  if (!options.bench_json.empty()) {
    options.trainer.on_step = [&report](int64_t, const at::Tensor& loss) {
      report.Add(loss);
      return trainer::StepAction::kContinue;
    };
  }
  DDP_ASSIGN_OR_RETURN(const trainer::Report result,
                       trainer::Train(session, task, *data.train, *data.test, options.trainer));
  if (!options.bench_json.empty()) {
    DDP_RETURN_IF_ERROR(report.Write(session, options.bench_json));
  }
  if (session.is_main()) {
    const double wall = absl::ToDoubleSeconds(absl::Now() - start);
    std::printf("%s\n", trainer::Summary(result, wall).c_str());
    std::fflush(stdout);
  }
  return result.end.status();
}

int Main(int argc, char** argv) {
  absl::SetStderrThreshold(absl::LogSeverityAtLeast::kInfo);
  absl::InitializeLog();
  TrainOptions options;
  const OptionList list = ListOptions(options);
  config::Program program(
      list, {.about = "Trains a model, data-parallel.\nExample: bazel run //tools:train -- "
                      "--model=mlp --epochs=2",
             .launch = &options.session.launcher,
             .validate = [&] { return trainer::Validate(options.trainer); },
             .sweep_metric = "test/accuracy:max",
             .job_options = {{"log.dir", "{folder}"},
                             {"checkpoint.dir", "{folder}/checkpoints"},
                             {"checkpoint.resume", "auto"},
                             {"predictions", "{folder}/{name}"},
                             {"bench_json", "{folder}/{name}"}}});
  if (const std::optional<int> code = program.Start(argc, argv)) return *code;
  options.trainer.hyper_parameters = list.Table();
  // Where this process stops is no part of the run: a run that goes on is configured the same.
  const trainer::TrainerOptions stops = options.trainer, none;
  options.trainer.stop_at_step = none.stop_at_step;
  options.trainer.max_time = none.max_time;
  options.trainer.stop_signals = none.stop_signals;
  options.trainer.configuration = program.Configuration();
  options.trainer.stop_at_step = stops.stop_at_step;
  options.trainer.max_time = stops.max_time;
  options.trainer.stop_signals = stops.stop_signals;
  options.session.program_options = &program.options();
  return session::Run(
      options.session, program.argc(), program.argv(),
      [&](const session::Session& session) { return TrainAsRank(session, options); },
      program.explain());
}

}  // namespace
}  // namespace ddp::tools

int main(int argc, char** argv) { return ddp::tools::Main(argc, argv); }
