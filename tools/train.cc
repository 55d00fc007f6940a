// Trains a reference model on a reference data set, as chosen by flags.
//
//   bazel run //tools:train                                         # cnn on Fashion-MNIST, 2 ranks
//   bazel run //tools:train -- --model=mlp --nproc_per_node=4 --epochs=2
//   bazel run //tools:train -- --model=gpt --max_steps=200          # a language model
//   srun -N2 -n2 bazel-bin/tools/train --checkpoint_dir=/shared/run --resume=auto
//
// Only parses options and calls factories; the training loop is //ddp/trainer.

#include <cstdio>
#include <memory>
#include <optional>

#include "absl/log/globals.h"
#include "absl/log/initialize.h"
#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "base/options.h"
#include "base/status.h"
#include "ddp/config/program.h"
#include "ddp/session/session.h"
#include "ddp/trainer/trainer.h"
#include "tools/datasets/augmented.h"
#include "tools/run_folder.h"
#include "tools/step_report.h"
#include "tools/train_options.h"
#include "torch/utils.h"

namespace ddp::tools {
namespace {

absl::Status TrainAsRank(const session::Session& session, TrainOptions options) {
  const absl::Time start = absl::Now();
  trainer::Task task;
  datasets::Splits data;
  std::shared_ptr<const data::AnyDataset> train;
  StepReport report(options.trainer.dry_run ? "" : options.bench_json);
  // Files and memory may fail on a single rank.
  DDP_RETURN_IF_ERROR(session.Agree(CatchStatus("", [&]() -> absl::Status {
    DDP_RETURN_IF_ERROR(report.CheckPath(session));
    options.dataset.seed = options.trainer.seed;
    options.dataset.context = models::ContextOf(options.model);
    DDP_ASSIGN_OR_RETURN(data, datasets::Load(options.dataset));
    DDP_ASSIGN_OR_RETURN(train, datasets::Augmented(data, options.dataset));
    options.model.input_shape = data.input_shape;
    options.model.num_classes = data.num_classes;
    options.model.token = data.token;
    // Every rank makes the same model.
    torch::manual_seed(static_cast<uint64_t>(options.trainer.seed));
    DDP_ASSIGN_OR_RETURN(task, models::Make(options.model));
    return absl::OkStatus();
  })));
  if (session.is_main()) std::fputs(data.about.c_str(), stderr);
  for (auto& own : models::CallbacksOf(options.model)) options.trainer.callbacks.push_back(own);
  options.trainer.on_step = report.OnStep();
  DDP_ASSIGN_OR_RETURN(const trainer::Report result,
                       trainer::Train(session, task, *train, *data.test, options.trainer));
  DDP_RETURN_IF_ERROR(report.Write(session, trainer::Metrics(result.test)));
  if (session.is_main()) {
    std::puts(trainer::Summary(result, absl::ToDoubleSeconds(absl::Now() - start)).c_str());
    std::fflush(stdout);
  }
  return result.end.status();
}

int Main(int argc, char** argv) {
  absl::SetStderrThreshold(absl::LogSeverityAtLeast::kInfo);
  absl::InitializeLog();
  TrainOptions options;
  config::Program program(
      ListOptions(options),
      {.about = "Trains a model, data-parallel.\nExample: bazel run //tools:train -- "
                "--model=mlp --epochs=2",
       .launch = &options.session.launcher,
       .validate = [&] { return Validate(options); },
       .sweep_metric = "test/accuracy:max",
       .implied = [&] { return Implied(options); },
       .job_options = {{"log.dir", "{folder}"},
                       {"checkpoint.dir", "{folder}/checkpoints"},
                       {"predictions", "{folder}/{name}"},
                       {"bench_json", "{folder}/{name}"},
                       // Ranks append: jobs that share this folder would write into each other's.
                       {"launcher.local.log_dir", "{folder}/{name}"}},
       .resume = ResumeOf(options.trainer),
       .process_options = {"stop_at_step", "max_time", "stop_signals"},
       .leaves_nothing = [&] { return options.trainer.dry_run; }});
  if (const std::optional<int> code = program.Start(argc, argv)) return *code;
  RecordRun(program, options.trainer);
  options.session.program_options = &program.options();
  return session::Run(
      options.session, program.argc(), program.argv(),
      [&](const session::Session& session) { return TrainAsRank(session, options); },
      program.explain());
}

}  // namespace
}  // namespace ddp::tools

int main(int argc, char** argv) { return ddp::tools::Main(argc, argv); }
