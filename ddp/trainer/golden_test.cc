// Checkpoints that earlier versions wrote resume, and end with the model that the uninterrupted run
// of that version had: testdata/version_N_SETTING.pt and SETTING_end.pt.
//
//   version 1  at the end of an epoch
//           2  a position within an epoch: "sample"
//           3  the order of gradients in buckets, with several ranks: "bucket_order"; "config"
//           4  the size of the data set, and schedules that go on in another world: "dataset_size",
//              "progress", more entries in "scheduler"
//           5  in format sharded, names of parameters in the optimizer's state, not numbers
//
// Those of versions 4 and 5 were written by them. Those before were made of them: Python's torch
// left out what that version did not write. version_4_adamw.sharded was written by version 5, with
// numbers in the place of names. What a later version writes is added, and none is removed.
#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/runfiles.h"
#include "checkpoint/manager.h"
#include "ddp/trainer/trainer_testing.h"
#include "gtest/gtest.h"

namespace ddp::trainer {
namespace {

struct Golden {
  int version;
  const char* setting;
  int world_size = 1;
  double dropout = 0;
  std::string optimizer = "sgd";
  std::string precision = "fp32";
  std::string format = "pt";  // sharded: with stage 1 of ZeRO, whose runs end as those without it
};

checkpoint::State Load(const std::string& name) {
  const std::string path = Runfile("libtorch_ddp/ddp/trainer/testdata/" + name).value();
  absl::StatusOr<checkpoint::State> state = checkpoint::Manager::Load(path);
  EXPECT_TRUE(state.ok()) << state.status();
  return state.ok() ? *std::move(state) : checkpoint::State();
}

// A copy: Bazel's own files are links, and in a folder of format sharded those are refused.
std::string CopyOf(const std::string& path) {
  if (!std::filesystem::is_directory(path)) return path;
  const std::string copy =
      absl::StrCat(testing::TempDir(), "/golden_test_", path.substr(path.rfind('/') + 1));
  std::filesystem::remove_all(copy);
  std::filesystem::create_directories(copy);
  for (const auto& file : std::filesystem::directory_iterator(path)) {
    std::filesystem::copy_file(file.path(), std::filesystem::path(copy) / file.path().filename());
  }
  return copy;
}

class GoldenTest : public testing::TestWithParam<Golden> {};

TEST_P(GoldenTest, ResumesAndEndsWithTheSameModel) {
  const Golden& golden = GetParam();
  TrainerOptions options = Quiet();
  options.optimizer = {.name = golden.optimizer, .lr = 0.05};
  options.schedule.name = "cosine";
  options.clip_norm = 0.5;
  options.precision = golden.precision;
  options.grad_scaler = {.init_scale = 1e9, .backoff_factor = 1e-4, .growth_interval = 4};
  options.zero.stage = golden.format == "sharded";
  options.checkpoint.resume =
      CopyOf(Runfile(absl::StrCat("libtorch_ddp/ddp/trainer/testdata/version_", golden.version, "_",
                                  golden.setting, ".", golden.format))
                 .value());
  c10::impl::GenericDict got = checkpoint::NewTree();
  RunRanks(golden.world_size, [&](const session::Session& session) {
    Task task = NetTask(golden.dropout);
    const auto report = Train(session, task, Halves(330), Halves(60), options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->epochs, 2);
    if (session.rank() != 0) return;
    for (const auto& tensor : task.module->named_parameters()) {
      got.insert(tensor.key(), tensor.value().detach().clone());
    }
    for (const auto& tensor : task.module->named_buffers()) {
      got.insert(tensor.key(), tensor.value().clone());
    }
  });
  const c10::impl::GenericDict expected =
      Load(absl::StrCat(golden.setting, "_end.pt")).root.at("model").toGenericDict();
  ASSERT_EQ(got.size(), expected.size());
  // The files were written on another processor, which may round otherwise.
  const double tolerance = golden.precision == "fp32" ? 1e-4 : 1e-2;
  for (const auto& entry : expected) {
    // The gradient of a bias before a BatchNorm is nothing but rounding, of which AdamW makes steps
    // of full size; the mean goes with it.
    const std::string& name = entry.key().toStringRef();
    if (golden.optimizer == "adamw" && (name == "in.bias" || name == "norm.running_mean")) continue;
    const at::Tensor a = entry.value().toTensor().to(at::kDouble);
    const at::Tensor b = got.at(name).toTensor().to(at::kDouble);
    EXPECT_TRUE(at::allclose(a, b, tolerance, tolerance)) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, GoldenTest,
    testing::Values(Golden{1, "one_rank_dropout", 1, 0.3}, Golden{2, "one_rank_dropout", 1, 0.3},
                    Golden{3, "adamw", 2, 0, "adamw"}, Golden{4, "one_rank_dropout", 1, 0.3},
                    Golden{4, "adamw", 2, 0, "adamw"}, Golden{4, "fp16", 2, 0, "sgd", "fp16"},
                    Golden{4, "adamw", 2, 0, "adamw", "fp32", "sharded"},
                    Golden{5, "adamw", 2, 0, "adamw", "fp32", "sharded"}),
    [](const auto& info) {
      return absl::StrCat("Version", info.param.version, "_", info.param.setting, "_",
                          info.param.format);
    });

}  // namespace
}  // namespace ddp::trainer
