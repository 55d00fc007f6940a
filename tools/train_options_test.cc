#include "tools/train_options.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/option_flags.h"
#include "gtest/gtest.h"

namespace ddp::tools {
namespace {

// Path of each option, and the shortest flag that means it. A new option is one line here too: that
// its short name takes none from another is seen in review.
const std::vector<std::pair<std::string, std::string>> kShortNames = {
    {"bench_json", "bench_json"},
};

TEST(TrainOptionsTest, NoTwoOptionsHaveOneName) {
  TrainOptions options;
  const OptionList list = ListOptions(options);
  EXPECT_TRUE(list.CheckNames().ok()) << list.CheckNames();
}

TEST(TrainOptionsTest, ShortNames) {
  TrainOptions options;
  const OptionList list = ListOptions(options);
  const auto names = list.ShortNames();
  const std::vector<std::pair<std::string, std::string>> found(names.begin(), names.end());
  EXPECT_EQ(found, kShortNames);
}

// Command lines of the past mean what they meant.
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
      {"keep_checkpoints", "checkpoint.keep"},
      {"save_optimizer", "checkpoint.save_optimizer"},
      {"save_param_scheduler", "checkpoint.save_param_scheduler"},
      {"resume", "checkpoint.resume"},
      {"eval_only", "eval_only"},
      {"log_dir", "log.dir"},
      {"log_every", "log.every"},
      {"bench_json", "bench_json"},
  };
  TrainOptions options;
  const OptionList list = ListOptions(options);
  for (const auto& [flag, path] : flags) {
    const auto option = list.Find(flag);
    ASSERT_TRUE(option.ok()) << flag << ": " << option.status();
    EXPECT_EQ((*option)->path, path) << flag;
  }
}

TEST(TrainOptionsTest, DefaultsAreValid) {
  TrainOptions options;
  EXPECT_TRUE(ListOptions(options).Validate().ok()) << ListOptions(options).Validate();
  EXPECT_TRUE(trainer::Validate(options.trainer).ok());
}

}  // namespace
}  // namespace ddp::tools
