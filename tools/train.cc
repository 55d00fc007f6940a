// Trains a reference model on a reference data set, with everything chosen by flags.
//
//   bazel run //tools:train                                         # cnn on Fashion-MNIST, 2 ranks
//   bazel run //tools:train -- --model=mlp --nproc_per_node=4 --epochs=2
//   srun -N2 -n2 bazel-bin/tools/train --checkpoint_dir=/shared/run --resume=auto
//
// Flags and factories, nothing else: the loop is //ddp/trainer's.

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/reflection.h"
#include "absl/flags/usage.h"
#include "absl/log/globals.h"
#include "absl/log/initialize.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "ddp/trainer/session.h"
#include "ddp/trainer/trainer.h"
#include "tools/datasets/registry.h"
#include "tools/models/registry.h"
#include "tools/step_report.h"
#include "torch/utils.h"

ABSL_FLAG(std::string, model, "cnn", "what to train: mlp, cnn");
ABSL_FLAG(std::string, dataset, "fashion_mnist", "what to train on: fashion_mnist, synthetic");
ABSL_FLAG(std::string, data_dir, "",
          "folder of the data set's files; empty: the ones Bazel brought");
ABSL_FLAG(int64_t, train_size, 0, "use only so many training examples; 0: all");
ABSL_FLAG(int64_t, test_size, 0, "use only so many test examples; 0: all");

ABSL_FLAG(int64_t, epochs, 4, "passes over the training set");
ABSL_FLAG(int64_t, max_steps, 0, "stop after so many optimizer steps; 0: no limit");
ABSL_FLAG(int64_t, batch_size, 64, "examples per rank and forward");
ABSL_FLAG(int64_t, accumulate, 1, "forwards per optimizer step");
ABSL_FLAG(std::string, optimizer, "sgd", "sgd, adam, adamw");
ABSL_FLAG(double, lr, 0.05, "learning rate before the schedule");
ABSL_FLAG(double, momentum, 0.9, "of sgd");
ABSL_FLAG(double, weight_decay, 5e-4, "of the optimizer");
ABSL_FLAG(std::string, schedule, "cosine", "of the learning rate: constant, step, cosine");
ABSL_FLAG(int64_t, warmup_steps, 0, "optimizer steps of linear warm-up");
ABSL_FLAG(double, step_epochs, 1, "schedule step: epochs between decays");
ABSL_FLAG(double, gamma, 0.1, "schedule step: factor of each decay");
ABSL_FLAG(double, clip_norm, 0, "largest norm of the gradients; 0: no clipping");
ABSL_FLAG(int64_t, seed, 0, "of initialisation and of the order of examples");
ABSL_FLAG(bool, channels_last, true, "convolutional models on the CPU in channels-last order");
ABSL_FLAG(int, num_workers, 1, "loader threads per rank; 0: load in the training thread");

ABSL_FLAG(double, bucket_cap_mb, 25, "size of a gradient bucket in MiB");
ABSL_FLAG(bool, find_unused_parameters, false, "allow parameters that get no gradient");
ABSL_FLAG(bool, gradient_as_bucket_view, true, "gradients are views of the buckets");
ABSL_FLAG(bool, static_graph, false, "promise that the graph never changes");
ABSL_FLAG(bool, broadcast_buffers, true, "buffers from rank 0 before each forward");

ABSL_FLAG(std::string, launcher, "auto",
          "how ranks come to life: auto, local, mpi, slurm, torchrun");
ABSL_FLAG(
    std::string, nproc_per_node, "auto",
    "ranks on this machine. auto: what the launcher's environment says; started alone, one per "
    "GPU with --device=cuda, 2 otherwise");
ABSL_FLAG(std::string, backend, "auto",
          "process group: auto, or a backend's name (gloo, nccl, …), or by device such as "
          "cpu:shm,cuda:nccl; docs/backends.md");
ABSL_FLAG(std::string, device, "cpu", "cpu, cuda, auto");
ABSL_FLAG(std::string, interface, "",
          "network interface of gloo, hier and mpi; empty: GLOO_SOCKET_IFNAME or default");
ABSL_FLAG(std::string, hostname, "",
          "host name or address of this machine for gloo, hier and mpi, instead of --interface");
ABSL_FLAG(bool, shm_arena, true,
          "shm, hier: gradient buckets live in memory that the ranks of a host share");
ABSL_FLAG(int64_t, shm_segment_mb, 256,
          "shm, hier: most that the ranks of a host share for messages, in MiB");
ABSL_FLAG(bool, nccl_high_priority_stream, false,
          "nccl: collectives overtake kernels of other streams");
ABSL_FLAG(bool, nccl_nonblocking, false, "nccl: communicators are made in the background");
ABSL_FLAG(double, timeout_s, 300, "longest that one collective may take, in seconds");
ABSL_FLAG(double, join_timeout_s, 60,
          "longest that ranks wait for each other at the start, in seconds");
ABSL_FLAG(double, stall_s, 30,
          "a collective that takes longer is reported, with the ranks that have not called it, in "
          "seconds; 0: never");

ABSL_FLAG(std::string, checkpoint_format, "pt", "pt");
ABSL_FLAG(std::string, checkpoint_dir, "", "folder of checkpoints; empty: none");
ABSL_FLAG(int64_t, checkpoint_every, 1,
          "epochs between checkpoints; the last complete one is saved, too; 0: none");
ABSL_FLAG(int, keep_checkpoints, 0, "newest checkpoints to keep; 0: all");
ABSL_FLAG(bool, save_optimizer, true, "checkpoints hold the optimizer's state");
ABSL_FLAG(bool, save_param_scheduler, true, "checkpoints hold the schedule");
ABSL_FLAG(std::string, resume, "",
          "auto: the newest of checkpoint_dir, if any; or a checkpoint's path");
ABSL_FLAG(bool, eval_only, false, "evaluate the checkpoint that --resume names, and train nothing");
ABSL_FLAG(std::string, log_dir, "",
          "folder of TensorBoard event files and metrics.jsonl; empty: none");
ABSL_FLAG(int64_t, log_every, 10, "optimizer steps between two records of metrics");
ABSL_FLAG(std::string, bench_json, "", "write measurements of the steps to this file");

namespace ddp::tools {
namespace {

constexpr int kUsageError = 2;

// Options' names are the flags' names: "lr=-1 must be …" becomes "--lr=-1 must be …".
absl::Status AsFlag(const absl::Status& status) {
  if (status.ok() || absl::StartsWith(status.message(), "--")) return status;
  const absl::string_view message = status.message();
  const size_t end = message.find('=');
  if (end == absl::string_view::npos ||
      absl::FindCommandLineFlag(message.substr(0, end)) == nullptr) {
    return status;
  }
  return absl::Status(status.code(), absl::StrCat("--", message));
}

absl::StatusOr<absl::Duration> Seconds(absl::string_view name, double seconds) {
  if (!(seconds > 0) || seconds > 1e7) {
    return absl::InvalidArgumentError(
        absl::StrCat("--", name, "=", seconds, " must be more than 0 and at most 1e7 seconds"));
  }
  return absl::Seconds(seconds);
}

absl::StatusOr<backends::ShmOptions> ShmFlags() {
  const int64_t segment_mb = absl::GetFlag(FLAGS_shm_segment_mb);
  if (segment_mb < 1 || segment_mb > 1 << 20) {
    return absl::InvalidArgumentError(absl::StrCat("--shm_segment_mb=", segment_mb,
                                                   " must be at least 1 and at most 1048576 MiB"));
  }
  backends::ShmOptions options;
  options.segment_bytes = segment_mb << 20;
  if (!absl::GetFlag(FLAGS_shm_arena)) options.arena_bytes = 0;
  return options;
}

absl::StatusOr<std::optional<int>> NprocPerNode() {
  const std::string text = absl::GetFlag(FLAGS_nproc_per_node);
  if (text == "auto") return std::nullopt;
  int nproc = 0;
  if (!absl::SimpleAtoi(text, &nproc) || nproc < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--nproc_per_node='", text, "' must be a number of ranks, 1 or more, or auto"));
  }
  return nproc;
}

absl::StatusOr<trainer::SessionOptions> SessionFlags() {
  trainer::SessionOptions options;
  options.launcher = absl::GetFlag(FLAGS_launcher);
  DDP_ASSIGN_OR_RETURN(options.nproc_per_node, NprocPerNode());
  options.backend = absl::GetFlag(FLAGS_backend);
  options.device = absl::GetFlag(FLAGS_device);
  options.default_nproc_per_node = trainer::DefaultNprocPerNode(options.device, /*on_cpu=*/2);
  DDP_ASSIGN_OR_RETURN(options.timeout, Seconds("timeout_s", absl::GetFlag(FLAGS_timeout_s)));
  DDP_ASSIGN_OR_RETURN(options.join_timeout,
                       Seconds("join_timeout_s", absl::GetFlag(FLAGS_join_timeout_s)));
  const double stall_s = absl::GetFlag(FLAGS_stall_s);
  if (!(stall_s >= 0) || stall_s > 1e7) {
    return absl::InvalidArgumentError(
        absl::StrCat("--stall_s=", stall_s, " must be at most 1e7 seconds, or 0 for no reports"));
  }
  options.stall = absl::Seconds(stall_s);
  options.interface = absl::GetFlag(FLAGS_interface);
  options.hostname = absl::GetFlag(FLAGS_hostname);
  DDP_ASSIGN_OR_RETURN(options.shm, ShmFlags());
  options.nccl = {.high_priority_stream = absl::GetFlag(FLAGS_nccl_high_priority_stream),
                  .nonblocking_init = absl::GetFlag(FLAGS_nccl_nonblocking)};
  DDP_RETURN_IF_ERROR(trainer::Validate(options));
  return options;
}

// Every flag that is ours, for the logs.
std::vector<std::pair<std::string, std::string>> FlagTable() {
  std::vector<std::pair<std::string, std::string>> table;
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    if (absl::EndsWith(flag->Filename(), "tools/train.cc")) {
      table.emplace_back(std::string(name), flag->CurrentValue());
    }
  }
  std::sort(table.begin(), table.end());
  return table;
}

absl::StatusOr<trainer::TrainerOptions> TrainerFlags() {
  trainer::TrainerOptions options;
  options.epochs = absl::GetFlag(FLAGS_epochs);
  options.max_steps = absl::GetFlag(FLAGS_max_steps);
  options.batch_size = absl::GetFlag(FLAGS_batch_size);
  options.accumulate = absl::GetFlag(FLAGS_accumulate);
  options.clip_norm = absl::GetFlag(FLAGS_clip_norm);
  options.seed = absl::GetFlag(FLAGS_seed);
  options.optimizer = {.name = absl::GetFlag(FLAGS_optimizer),
                       .lr = absl::GetFlag(FLAGS_lr),
                       .momentum = absl::GetFlag(FLAGS_momentum),
                       .weight_decay = absl::GetFlag(FLAGS_weight_decay)};
  options.schedule = absl::GetFlag(FLAGS_schedule);
  options.warmup_steps = absl::GetFlag(FLAGS_warmup_steps);
  options.step_epochs = absl::GetFlag(FLAGS_step_epochs);
  options.gamma = absl::GetFlag(FLAGS_gamma);
  options.data_parallel = {.bucket_cap_mb = absl::GetFlag(FLAGS_bucket_cap_mb),
                           .find_unused_parameters = absl::GetFlag(FLAGS_find_unused_parameters),
                           .gradient_as_bucket_view = absl::GetFlag(FLAGS_gradient_as_bucket_view),
                           .static_graph = absl::GetFlag(FLAGS_static_graph),
                           .broadcast_buffers = absl::GetFlag(FLAGS_broadcast_buffers)};
  options.num_workers = absl::GetFlag(FLAGS_num_workers);
  options.log_every = absl::GetFlag(FLAGS_log_every);
  options.log_dir = absl::GetFlag(FLAGS_log_dir);
  options.checkpoint_dir = absl::GetFlag(FLAGS_checkpoint_dir);
  options.checkpoint_format = absl::GetFlag(FLAGS_checkpoint_format);
  options.checkpoint_every = absl::GetFlag(FLAGS_checkpoint_every);
  options.keep_checkpoints = absl::GetFlag(FLAGS_keep_checkpoints);
  options.save.save_optimizer = absl::GetFlag(FLAGS_save_optimizer);
  options.save.save_param_scheduler = absl::GetFlag(FLAGS_save_param_scheduler);
  options.resume = absl::GetFlag(FLAGS_resume);
  options.eval_only = absl::GetFlag(FLAGS_eval_only);
  options.hyper_parameters = FlagTable();
  DDP_RETURN_IF_ERROR(trainer::Validate(options));
  return options;
}

absl::Status TrainAsRank(const trainer::Session& session, trainer::TrainerOptions options) {
  const absl::Time start = absl::Now();
  trainer::Task task;
  datasets::Splits data;
  DDP_RETURN_IF_ERROR(session.Agree(CatchStatus("", [&]() -> absl::Status {
    DDP_ASSIGN_OR_RETURN(datasets::DatasetFactory load,
                         datasets::DatasetRegistry::Find(absl::GetFlag(FLAGS_dataset)));
    DDP_ASSIGN_OR_RETURN(data, load({.data_dir = absl::GetFlag(FLAGS_data_dir),
                                     .train_size = absl::GetFlag(FLAGS_train_size),
                                     .test_size = absl::GetFlag(FLAGS_test_size),
                                     .seed = options.seed}));
    DDP_ASSIGN_OR_RETURN(models::ModelFactory make,
                         models::ModelRegistry::Find(absl::GetFlag(FLAGS_model)));
    torch::manual_seed(static_cast<uint64_t>(options.seed));  // the same model on every rank
    DDP_ASSIGN_OR_RETURN(task,
                         make({.input_shape = data.input_shape, .num_classes = data.num_classes}));
    return absl::OkStatus();
  })));
  task.channels_last = task.channels_last && absl::GetFlag(FLAGS_channels_last);

  StepReport report;
  const std::string bench_json = absl::GetFlag(FLAGS_bench_json);
  if (!bench_json.empty()) {
    options.on_step = [&report](int64_t, const at::Tensor& loss) {
      report.Add(loss);
      return trainer::StepAction::kContinue;
    };
  }
  DDP_ASSIGN_OR_RETURN(trainer::Report result,
                       trainer::Train(session, task, *data.train, *data.test, options));
  if (!bench_json.empty()) DDP_RETURN_IF_ERROR(report.Write(session, bench_json));
  if (session.is_main()) {
    const double wall = absl::ToDoubleSeconds(absl::Now() - start);
    std::printf("%s\n", trainer::Summary(result, wall).c_str());
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "trains a model, data-parallel, with launcher, backend, model, data set and checkpoint "
      "format chosen by flags.\nExample: bazel run //tools:train -- --model=mlp --epochs=2");
  const std::vector<char*> rest = absl::ParseCommandLine(argc, argv);
  absl::SetStderrThreshold(absl::LogSeverityAtLeast::kInfo);
  absl::InitializeLog();
  const auto fail = [](const absl::Status& status) {
    std::fprintf(stderr, "error: %s\n", std::string(AsFlag(status).message()).c_str());
    return kUsageError;
  };
  if (rest.size() > 1) {
    return fail(absl::InvalidArgumentError(
        absl::StrCat("'", rest[1], "' is not a flag; flags look like --epochs=2")));
  }
  // `bazel run` starts programs in their runfiles; paths that people give mean where they are.
  if (const char* folder = std::getenv("BUILD_WORKING_DIRECTORY"); folder != nullptr) {
    if (chdir(folder) != 0) {
      return fail(absl::NotFoundError(absl::StrCat("BUILD_WORKING_DIRECTORY=", folder,
                                                   " cannot be entered: relative paths have no "
                                                   "meaning")));
    }
  }
  absl::StatusOr<trainer::SessionOptions> session = SessionFlags();
  if (!session.ok()) return fail(session.status());
  absl::StatusOr<trainer::TrainerOptions> options = TrainerFlags();
  if (!options.ok()) return fail(options.status());
  if (absl::Status known = models::ModelRegistry::Find(absl::GetFlag(FLAGS_model)).status();
      !known.ok()) {
    return fail(known);
  }
  if (absl::Status known = datasets::DatasetRegistry::Find(absl::GetFlag(FLAGS_dataset)).status();
      !known.ok()) {
    return fail(known);
  }
  return trainer::Run(*session, argc, argv, [&options](const trainer::Session& rank) {
    return TrainAsRank(rank, *options);
  });
}

}  // namespace
}  // namespace ddp::tools

int main(int argc, char** argv) { return ddp::tools::Main(argc, argv); }
