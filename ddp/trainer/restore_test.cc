// What a run checks, says and writes when it resumes; resume_test.cc compares results.

#include <filesystem>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "checkpoint/manager.h"
#include "ddp/trainer/trainer_testing.h"
#include "gtest/gtest.h"

namespace ddp::trainer {
namespace {

class RestoreTest : public testing::Test {
 protected:
  RestoreTest()
      : folder_(absl::StrCat(testing::TempDir(), "/",
                             testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::remove_all(folder_);
    options_ = Quiet();
    options_.checkpoint.manager.directory = folder_ + "/checkpoints";
    options_.checkpoint.resume = "auto";
  }

  // Trains up to this step; 20 are an epoch. Goes on with the newest checkpoint, if there is one.
  absl::StatusOr<Report> TrainTo(int64_t step) {
    options_.max_steps = step;
    absl::StatusOr<Report> report = absl::UnknownError("not trained");
    RunRanks(1, [&](const session::Session& session) {
      report = Train(session, LineTask(), Halves(320), Halves(60), options_);
    });
    return report;
  }

  // TrainTo, which must succeed; returns what it has printed.
  std::string PrintedTo(int64_t step) {
    options_.log.progress = true;
    testing::internal::CaptureStderr();
    const auto report = TrainTo(step);
    const std::string printed = testing::internal::GetCapturedStderr();
    EXPECT_TRUE(report.ok()) << report.status();
    return printed;
  }

  std::string ConfigIn(int64_t step) const {
    auto state = checkpoint::Manager::Load(
        absl::StrCat(options_.checkpoint.manager.directory, "/epoch_0_step_", step, ".pt"));
    EXPECT_TRUE(state.ok()) << state.status();
    if (!state.ok() || !state->root.contains("config")) return "no config";
    return state->root.at("config").toStringRef();
  }

  const std::string folder_;
  TrainerOptions options_;
};

TEST_F(RestoreTest, AnotherSeedIsRefused) {
  ASSERT_TRUE(TrainTo(3).ok());
  options_.seed = 1;
  const absl::Status refused = TrainTo(6).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
  EXPECT_TRUE(absl::StrContains(refused.message(), "trained with seed 0")) << refused;
  options_.seed = 0;
  EXPECT_TRUE(TrainTo(6).ok());
}

TEST_F(RestoreTest, EntriesThatMakeNoSenseAreRefusedByName) {
  struct Entry {
    std::string key;
    c10::IValue value;
    std::vector<std::string> words;
  };
  const std::vector<Entry> entries = {
      {"epoch", std::string("one"), {"'epoch'", "integer"}},
      {"step", at::zeros({}), {"'step'", "integer"}},
      {"epoch", int64_t{-1}, {"negative", "epoch -1"}},
      {"sample", int64_t{-16}, {"negative", "sample -16"}},
      {"step", int64_t{-3}, {"negative", "step -3"}},
      {"rng", c10::List<at::Tensor>(), {"'rng'", "list of 1 states"}},
      {"rng", int64_t{1}, {"'rng'", "list of 1 states"}},
      {"scaler", int64_t{1}, {"'scaler'", "dict"}},
      {"bucket_order", int64_t{1}, {"'bucket_order'", "list of integers"}},
      {"bucket_order", c10::List<double>({0.5}), {"'bucket_order'", "list of integers"}},
  };
  options_.precision = "fp16";  // has a scaler
  for (const Entry& entry : entries) {
    SCOPED_TRACE(absl::StrCat(entry.key, ": ", entry.words[1]));
    std::filesystem::remove_all(folder_);
    options_.checkpoint.save.callback = [&](checkpoint::State& state) {
      state.root.insert_or_assign(entry.key, entry.value);
    };
    ASSERT_TRUE(TrainTo(3).ok());
    const absl::Status refused = TrainTo(6).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
    EXPECT_TRUE(absl::StrContains(refused.message(), "cannot resume from ")) << refused;
    for (const std::string& word : entry.words) {
      EXPECT_TRUE(absl::StrContains(refused.message(), word)) << refused;
    }
  }
}

TEST_F(RestoreTest, AnotherConfigurationHasAFileOfItsOwn) {
  const std::string first = "lr: 0.5\n", second = "lr: 0.25\n";
  options_.log.dir = folder_ + "/logs";
  const std::string file = options_.log.dir + "/config.yaml";
  options_.configuration = first;
  ASSERT_TRUE(TrainTo(3).ok());
  EXPECT_EQ(ReadFile(file).value_or(""), first);
  ASSERT_TRUE(TrainTo(5).ok());
  EXPECT_FALSE(std::filesystem::exists(options_.log.dir + "/config_step_3.yaml"));
  options_.configuration = second;
  ASSERT_TRUE(TrainTo(7).ok());
  EXPECT_EQ(ReadFile(file).value_or(""), first);
  EXPECT_EQ(ReadFile(options_.log.dir + "/config_step_5.yaml").value_or(""), second);
  EXPECT_EQ(ConfigIn(3), first);
  EXPECT_EQ(ConfigIn(5), first);
  EXPECT_EQ(ConfigIn(7), second);
  options_.configuration = "";
  ASSERT_TRUE(TrainTo(9).ok());
  EXPECT_EQ(ConfigIn(9), "no config");
}

TEST_F(RestoreTest, AnotherScheduleIsReported) {
  constexpr char kDifference[] = "warmup_steps 7, saved 0";
  PrintedTo(3);
  const std::string same = PrintedTo(5);
  EXPECT_FALSE(absl::StrContains(same, ", saved ")) << same;
  options_.schedule.warmup_steps = 7;
  const std::string other = PrintedTo(7);
  EXPECT_TRUE(absl::StrContains(other, kDifference)) << other;
}

// This happens with --resume=PATH and a folder on each machine's own disk.
TEST_F(RestoreTest, AnotherFileOnAnotherRankIsRefused) {
  ASSERT_TRUE(TrainTo(3).ok());
  ASSERT_TRUE(TrainTo(6).ok());
  const std::string folder = options_.checkpoint.manager.directory;
  options_.checkpoint.manager.directory = "";
  for (const bool eval_only : {false, true}) {
    options_.eval_only = eval_only;
    RunRanks(2, [&](const session::Session& session) {
      TrainerOptions options = options_;
      options.checkpoint.resume =
          absl::StrCat(folder, "/epoch_0_step_", session.rank() == 0 ? 3 : 6, ".pt");
      const absl::Status refused =
          Train(session, LineTask(), Halves(320), Halves(60), options).status();
      EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
      for (const char* word : {"different checkpoints", "'position'", "rank 1"}) {
        EXPECT_TRUE(absl::StrContains(refused.message(), word)) << refused;
      }
    });
  }
}

}  // namespace
}  // namespace ddp::trainer
