// Trains a reference model on a reference data set, as chosen by flags.
//
//   bazel run //tools:train                                         # cnn on Fashion-MNIST, 2 ranks
//   bazel run //tools:train -- --model=mlp --nproc_per_node=4 --epochs=2
//   srun -N2 -n2 bazel-bin/tools/train --checkpoint_dir=/shared/run --resume=auto
//
// Only parses options and calls factories; the training loop is //ddp/trainer.

#include <cstdio>
#include <optional>
#include <string>

#include "absl/log/globals.h"
#include "absl/log/initialize.h"
#include "absl/time/clock.h"
#include "base/options.h"
#include "base/status.h"
#include "ddp/config/program.h"
#include "ddp/session/session.h"
#include "ddp/trainer/trainer.h"
#include "tools/step_report.h"
#include "tools/train_options.h"
#include "torch/utils.h"

namespace ddp::tools {
namespace {

absl::Status TrainAsRank(const session::Session& session, TrainOptions options) {
  const absl::Time start = absl::Now();
  trainer::Task task;
  datasets::Splits data;
  // Files and memory may fail on a single rank.
  DDP_RETURN_IF_ERROR(session.Agree(CatchStatus("", [&]() -> absl::Status {
    options.dataset.seed = options.trainer.seed;
    DDP_ASSIGN_OR_RETURN(data, datasets::Load(options.dataset));
    options.model.input_shape = data.input_shape;
    options.model.num_classes = data.num_classes;
    // The same model on every rank.
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
  return absl::OkStatus();
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
  options.trainer.configuration = program.Configuration();
  return session::Run(
      options.session, program.argc(), program.argv(),
      [&](const session::Session& session) { return TrainAsRank(session, options); },
      program.explain());
}

}  // namespace
}  // namespace ddp::tools

int main(int argc, char** argv) { return ddp::tools::Main(argc, argv); }
