#include "tools/train_options.h"

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/option_list.h"
#include "base/runfiles.h"
#include "gtest/gtest.h"

namespace ddp::tools {
namespace {

// Path of each option and its shortest flag. Add new options here, so that a review sees when a
// short name conflicts with another.
constexpr char kShortNames[] = R"(
accumulate accumulate
batch_size batch_size
bench_json bench_json
check_agreement_every check_agreement_every
checkpoint.async async
checkpoint.check_staging check_staging
checkpoint.continuous continuous
checkpoint.dir checkpoint_dir
checkpoint.every checkpoint_every
checkpoint.every_minutes checkpoint_every_minutes
checkpoint.every_steps checkpoint_every_steps
checkpoint.format format
checkpoint.init_from init_from
checkpoint.init_key init_key
checkpoint.init_map init_map
checkpoint.init_strict init_strict
checkpoint.keep keep_checkpoints
checkpoint.keep_best keep_best
checkpoint.keep_every keep_every
checkpoint.keep_hours keep_hours
checkpoint.keep_last keep_last
checkpoint.on_save_error on_save_error
checkpoint.resume resume
checkpoint.save_optimizer save_optimizer
checkpoint.save_param_scheduler save_param_scheduler
checkpoint.verify verify
clip_norm clip_norm
clip_norm_type clip_norm_type
clip_value clip_value
comm_hook.name comm_hook
comm_hook.powersgd.matrix_approximation_rank matrix_approximation_rank
comm_hook.powersgd.min_compression_rate min_compression_rate
comm_hook.powersgd.orthogonalization_epsilon orthogonalization_epsilon
comm_hook.powersgd.random_seed random_seed
comm_hook.powersgd.start_iter start_iter
comm_hook.powersgd.use_error_feedback use_error_feedback
comm_hook.powersgd.warm_start warm_start
data_parallel.broadcast_buffers broadcast_buffers
data_parallel.bucket_cap_mb bucket_cap_mb
data_parallel.find_unused_parameters find_unused_parameters
data_parallel.gradient_as_bucket_view gradient_as_bucket_view
data_parallel.ignored ignored
data_parallel.init_sync init_sync
data_parallel.static_graph static_graph
dataset.augment augment
dataset.csv.columns columns
dataset.csv.delimiter delimiter
dataset.csv.missing missing
dataset.csv.normalise normalise
dataset.csv.test test
dataset.csv.train train
dataset.csv.unknown unknown
dataset.data_dir data_dir
dataset.images.mean mean
dataset.images.size size
dataset.images.std std
dataset.name dataset
dataset.test_size test_size
dataset.text.cross_documents cross_documents
dataset.text.files files
dataset.text.held_out held_out
dataset.text.separator separator
dataset.text.sequence_length sequence_length
dataset.text.tokens tokens
dataset.text.vocab_size vocab_size
dataset.text.weights weights
dataset.train_size train_size
device device
drop_last drop_last
dry_run dry_run
early_stopping.metric early_stopping
early_stopping.min_delta min_delta
early_stopping.patience early_stopping_patience
ema.decay decay
ema.eval eval_ema
ema.warmup warmup
epochs epochs
eval_batch_size eval_batch_size
eval_only eval_only
even_batches even_batches
grad_scaler.backoff_factor backoff_factor
grad_scaler.growth_factor growth_factor
grad_scaler.growth_interval growth_interval
grad_scaler.init_scale init_scale
group.backend backend
group.hier.chunk_bytes chunk_bytes
group.hier.cross cross
group.hier.local local
group.hier.packing packing
group.hier.window window
group.hostname hostname
group.interface interface
group.join_timeout_s join_timeout_s
group.nccl.high_priority_stream high_priority_stream
group.nccl.nonblocking nonblocking
group.shm.arena arena
group.shm.arena_mb arena_mb
group.shm.segment_mb segment_mb
group.stall_s stall_s
group.timeout_s timeout_s
guard.anomaly_deviations anomaly_deviations
guard.anomaly_window anomaly_window
guard.on_anomaly on_anomaly
join.divide_by_initial_world_size divide_by_initial_world_size
join.throw_on_early_termination throw_on_early_termination
launcher.grace_s grace_s
launcher.local.local_ranks_filter local_ranks_filter
launcher.local.log_dir local_log_dir
launcher.local.master_addr master_addr
launcher.local.master_port master_port
launcher.local.node_rank node_rank
launcher.local.numa_binding numa_binding
launcher.local.redirects redirects
launcher.local.stop_timeout_s stop_timeout_s
launcher.local.tee tee
launcher.max_restarts max_restarts
launcher.name launcher
launcher.nnodes nnodes
launcher.nproc_per_node nproc_per_node
launcher.slurm.account slurm_account
launcher.slurm.clusters slurm_clusters
launcher.slurm.constraint slurm_constraint
launcher.slurm.cpus_per_task slurm_cpus_per_task
launcher.slurm.dependency slurm_dependency
launcher.slurm.dry_run slurm_dry_run
launcher.slurm.extra slurm_extra
launcher.slurm.gpus_per_node slurm_gpus_per_node
launcher.slurm.job_name slurm_job_name
launcher.slurm.label slurm_label
launcher.slurm.max_requeues slurm_max_requeues
launcher.slurm.mem slurm_mem
launcher.slurm.on_interrupt on_interrupt
launcher.slurm.partition slurm_partition
launcher.slurm.qos slurm_qos
launcher.slurm.requeue slurm_requeue
launcher.slurm.setup slurm_setup
launcher.slurm.signal slurm_signal
launcher.slurm.srun_args slurm_srun_args
launcher.slurm.stage_dir stage_dir
launcher.slurm.time slurm_time
launcher.slurm.wait slurm_wait
log.dir log_dir
log.every log_every
log.progress progress
log.sinks sinks
max_steps max_steps
max_time max_time
metrics metrics
model.channels_last channels_last
model.gpt.context context
model.gpt.depth depth
model.gpt.dropout dropout
model.gpt.heads heads
model.gpt.layers layers
model.gpt.width width
model.name model
model_wrapper model_wrapper
monitor.gradient_norm gradient_norm
monitor.learning_rates learning_rates
monitor.memory memory
monitor.throughput throughput
num_workers num_workers
optimizer.alpha alpha
optimizer.amsgrad amsgrad
optimizer.betas betas
optimizer.centered centered
optimizer.dampening dampening
optimizer.eps eps
optimizer.groups groups
optimizer.initial_accumulator_value initial_accumulator_value
optimizer.lr lr
optimizer.lr_decay lr_decay
optimizer.momentum momentum
optimizer.name optimizer
optimizer.nesterov nesterov
optimizer.no_decay no_decay
optimizer.weight_decay weight_decay
pin_memory pin_memory
precision precision
predictions predictions
prefetch_factor prefetch_factor
schedule.anneal anneal
schedule.div_factor div_factor
schedule.end_factor end_factor
schedule.final_div_factor final_div_factor
schedule.gamma gamma
schedule.milestones milestones
schedule.min_factor min_factor
schedule.name schedule
schedule.pct_start pct_start
schedule.plateau.cooldown plateau_cooldown
schedule.plateau.factor plateau_factor
schedule.plateau.metric plateau_metric
schedule.plateau.min_lr plateau_min_lr
schedule.plateau.mode plateau_mode
schedule.plateau.patience plateau_patience
schedule.plateau.threshold plateau_threshold
schedule.plateau.threshold_mode plateau_threshold_mode
schedule.power power
schedule.start_factor start_factor
schedule.step_epochs step_epochs
schedule.warmup_epochs warmup_epochs
schedule.warmup_samples warmup_samples
schedule.warmup_steps warmup_steps
seed seed
shuffle shuffle
stop_at_step stop_at_step
stop_signals stop_signals
sync_bn sync_bn
validate.every validate_every
validate.every_minutes validate_every_minutes
validate.every_steps validate_every_steps
validation_size validation_size
work_timeout_s work_timeout_s
zero.master_weights master_weights
zero.overlap_gather overlap_gather
zero.partition partition
zero.stage stage
)";

// Options that are no part of what a job of a sweep is, besides the launcher's.
TEST(TrainOptionsTest, IncidentalOptions) {
  TrainOptions options;
  std::set<std::string> incidental;
  const OptionList list = ListOptions(options);
  for (const OptionRef& option : list.options()) {
    if (option.incidental) incidental.insert(option.path);
  }
  for (const char* const path : {"num_workers",
                                 "log.every",
                                 "log.progress",
                                 "group.timeout_s",
                                 "group.join_timeout_s",
                                 "group.stall_s",
                                 "work_timeout_s",
                                 "max_time",
                                 "stop_at_step",
                                 "bench_json",
                                 "prefetch_factor",
                                 "pin_memory",
                                 "checkpoint.every",
                                 "checkpoint.every_steps",
                                 "checkpoint.async",
                                 "checkpoint.continuous",
                                 "checkpoint.keep_last",
                                 "checkpoint.verify",
                                 "monitor.learning_rates",
                                 "group.shm.arena_mb"}) {
    EXPECT_EQ(incidental.count(path), 1) << path;
  }
  for (const char* const path :
       {"seed", "batch_size", "optimizer.lr", "group.backend", "precision", "launcher.nnodes",
        "launcher.nproc_per_node", "device", "checkpoint.init_from", "checkpoint.resume", "dry_run",
        "checkpoint.save_optimizer"}) {
    EXPECT_EQ(incidental.count(path), 0) << path;
  }
}

// A rank that lacks a path would train on other data, or save and load nothing.
TEST(TrainOptionsTest, PathsAreSetOnAllRanksOrNone) {
  TrainOptions options;
  const OptionList list = ListOptions(options);
  for (const char* const path :
       {"checkpoint.dir", "checkpoint.resume", "checkpoint.init_from", "predictions", "bench_json",
        "dataset.data_dir", "dataset.text.files"}) {
    EXPECT_EQ((*list.Find(path))->across_ranks, OptionAcrossRanks::kAllRanksOrNone) << path;
  }
}

TEST(TrainOptionsTest, WhatIsARanksOwnMayDiffer) {
  TrainOptions options;
  const OptionList list = ListOptions(options);
  for (const char* const path :
       {"log.dir", "log.progress", "group.interface", "group.hostname", "device"}) {
    ASSERT_TRUE(list.Find(path).ok()) << path;
    EXPECT_EQ((*list.Find(path))->across_ranks, OptionAcrossRanks::kMayDiffer) << path;
  }
  for (const char* const path : {"optimizer.lr", "seed", "precision", "batch_size"}) {
    EXPECT_EQ((*list.Find(path))->across_ranks, OptionAcrossRanks::kSame) << path;
  }
}

// The table of docs/options.md names all of them, and no others.
TEST(TrainOptionsTest, ThePageListsWhatNeedNotBeTheSameOnAllRanks) {
  const auto page = Runfile("libtorch_ddp/docs/options.md");
  ASSERT_TRUE(page.ok()) << page.status();
  const auto text = ReadFile(*page);
  ASSERT_TRUE(text.ok()) << text.status();
  TrainOptions options;
  const OptionList list = ListOptions(options);
  const std::map<std::string, std::string> short_names = list.ShortNames();
  for (const auto& [kind, row] : std::vector<std::pair<OptionAcrossRanks, std::string>>{
           {OptionAcrossRanks::kMayDiffer, "| `.MayDiffer()`: "},
           {OptionAcrossRanks::kAllRanksOrNone, "| `.OnAllRanksOrNone()`: "}}) {
    SCOPED_TRACE(row);
    const size_t begin = text->find(row);
    ASSERT_NE(begin, std::string::npos);
    const size_t names = begin + row.size();
    // Each second part is between backquotes.
    const std::vector<std::string> parts =
        absl::StrSplit(text->substr(names, text->find(" | ", names) - names), '`');
    std::set<std::string> listed, expected;
    for (size_t i = 1; i < parts.size(); i += 2) listed.insert(parts[i]);
    for (const OptionRef& option : list.options()) {
      // Of `device` the page speaks below the table.
      if (option.across_ranks != kind || option.path == "device") continue;
      const auto found = short_names.find(option.path);
      expected.insert(absl::StartsWith(option.path, "launcher.") ? "launcher.…"
                      : found == short_names.end()               ? option.path
                                                                 : found->second);
    }
    EXPECT_EQ(listed, expected);
  }
}

TEST(TrainOptionsTest, NoTwoOptionsHaveOneName) {
  TrainOptions options;
  const OptionList list = ListOptions(options);
  EXPECT_TRUE(list.CheckNames().ok()) << list.CheckNames();
}

TEST(TrainOptionsTest, ShortNames) {
  TrainOptions options;
  const OptionList list = ListOptions(options);
  std::string found = "\n";
  for (const auto& [path, name] : list.ShortNames()) absl::StrAppend(&found, path, " ", name, "\n");
  EXPECT_EQ(found, kShortNames);
}

// Established flags keep their meaning.
TEST(TrainOptionsTest, FlagsOfBefore) {
  const std::vector<std::pair<std::string, std::string>> flags = {
      {"model", "model.name"},
      {"dataset", "dataset.name"},
      {"data_dir", "dataset.data_dir"},
      {"train_size", "dataset.train_size"},
      {"test_size", "dataset.test_size"},
      {"epochs", "epochs"},
      {"max_steps", "max_steps"},
      {"batch_size", "batch_size"},
      {"accumulate", "accumulate"},
      {"optimizer", "optimizer.name"},
      {"lr", "optimizer.lr"},
      {"momentum", "optimizer.momentum"},
      {"weight_decay", "optimizer.weight_decay"},
      {"schedule", "schedule.name"},
      {"warmup_steps", "schedule.warmup_steps"},
      {"step_epochs", "schedule.step_epochs"},
      {"gamma", "schedule.gamma"},
      {"clip_norm", "clip_norm"},
      {"seed", "seed"},
      {"channels_last", "model.channels_last"},
      {"num_workers", "num_workers"},
      {"bucket_cap_mb", "data_parallel.bucket_cap_mb"},
      {"find_unused_parameters", "data_parallel.find_unused_parameters"},
      {"gradient_as_bucket_view", "data_parallel.gradient_as_bucket_view"},
      {"static_graph", "data_parallel.static_graph"},
      {"broadcast_buffers", "data_parallel.broadcast_buffers"},
      {"launcher", "launcher.name"},
      {"nproc_per_node", "launcher.nproc_per_node"},
      {"backend", "group.backend"},
      {"device", "device"},
      {"interface", "group.interface"},
      {"hostname", "group.hostname"},
      {"shm_arena", "group.shm.arena"},
      {"shm_segment_mb", "group.shm.segment_mb"},
      {"nccl_high_priority_stream", "group.nccl.high_priority_stream"},
      {"nccl_nonblocking", "group.nccl.nonblocking"},
      {"timeout_s", "group.timeout_s"},
      {"join_timeout_s", "group.join_timeout_s"},
      {"stall_s", "group.stall_s"},
      {"checkpoint_format", "checkpoint.format"},
      {"checkpoint_dir", "checkpoint.dir"},
      {"checkpoint_every", "checkpoint.every"},
      {"checkpoint_every_steps", "checkpoint.every_steps"},
      {"checkpoint_every_minutes", "checkpoint.every_minutes"},
      {"checkpoint_async", "checkpoint.async"},
      {"checkpoint_check_staging", "checkpoint.check_staging"},
      {"checkpoint_continuous", "checkpoint.continuous"},
      {"keep_checkpoints", "checkpoint.keep"},
      {"keep", "checkpoint.keep"},
      {"keep_last", "checkpoint.keep_last"},
      {"keep_best", "checkpoint.keep_best"},
      {"checkpoint_verify", "checkpoint.verify"},
      {"on_save_error", "checkpoint.on_save_error"},
      {"save_optimizer", "checkpoint.save_optimizer"},
      {"save_param_scheduler", "checkpoint.save_param_scheduler"},
      {"resume", "checkpoint.resume"},
      {"eval_only", "eval_only"},
      {"log_dir", "log.dir"},
      {"log_every", "log.every"},
      {"bench_json", "bench_json"},
      {"slurm_dry_run", "launcher.slurm.dry_run"},
      {"dry_run", "dry_run"},
      {"validate_every", "validate.every"},
  };
  TrainOptions options;
  const OptionList list = ListOptions(options);
  for (const auto& [flag, path] : flags) {
    const auto option = list.Find(flag);
    ASSERT_TRUE(option.ok()) << flag << ": " << option.status();
    EXPECT_EQ((*option)->path, path) << flag;
  }
}

TEST(TrainOptionsTest, NamesOfOtherProgramsLeadToOurs) {
  TrainOptions options;
  const OptionList list = ListOptions(options);
  for (const auto& [name, ours] : std::vector<std::pair<std::string, std::string>>{
           {"learning_rate", "lr, learning_rates"}, {"batch", "batch_size"}}) {
    EXPECT_EQ(list.Find(name).status().message(),
              absl::StrCat("there is no option '", name, "'; did you mean ", ours, "?"));
  }
}

TEST(TrainOptionsTest, DefaultsAreValid) {
  TrainOptions options;
  EXPECT_TRUE(ListOptions(options).Validate().ok()) << ListOptions(options).Validate();
  EXPECT_TRUE(Validate(options).ok()) << Validate(options);
}

TEST(TrainOptionsTest, ASweepIsSortedByValidationDataWhereThereAreSome) {
  using Values = std::vector<std::pair<std::string, std::string>>;
  TrainOptions options;
  EXPECT_EQ(Implied(options), Values());
  options.trainer.validation_size = 0.1;
  EXPECT_EQ(Implied(options), (Values{{"sweep_metric", "val/accuracy:max"}}));
}

TEST(TrainOptionsTest, AnOptionOfAnotherModelOrDataSetIsRefused) {
  TrainOptions options;
  OptionList list = ListOptions(options);
  ASSERT_TRUE(list.Set("depth", "3").ok());
  EXPECT_EQ(Validate(options).message(),
            "model.gpt.depth=3 has no effect: it is of model=gpt, and model=cnn is chosen");
  options.model.name = "gpt";
  options.dataset.name = "text";
  ASSERT_TRUE(list.Set("files", "a.txt").ok());
  EXPECT_TRUE(Validate(options).ok()) << Validate(options);
  options.dataset.name = "tensors";
  EXPECT_TRUE(absl::StartsWith(Validate(options).message(), "dataset.text.files="))
      << Validate(options);
}

TEST(TrainOptionsTest, ARequeuedJobWithoutSavesIsRefused) {
  TrainOptions options;
  options.session.launcher.name = "slurm";
  OptionList list = ListOptions(options);
  ASSERT_TRUE(list.Set("slurm_requeue", "true").ok());
  options.trainer.checkpoint.manager.directory = "run";
  EXPECT_TRUE(Validate(options).ok()) << Validate(options);
  options.trainer.checkpoint.every = 0;
  EXPECT_EQ(Validate(options).message(),
            "launcher.slurm.requeue=true needs checkpoints to go on from, and the program saves "
            "none: checkpoint.every");
  options.trainer.checkpoint.every_steps = 5;
  EXPECT_TRUE(Validate(options).ok()) << Validate(options);
}

}  // namespace
}  // namespace ddp::tools
