// Saves on a thread of their own: what they wait for, and what becomes of a run whose save fails.

#include "ddp/trainer/async_save.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/coordinator.h"
#include "base/threads_testing.h"
#include "checkpoint/manager.h"
#include "ddp/trainer/callback.h"
#include "ddp/trainer/saver_testing.h"
#include "gtest/gtest.h"

namespace ddp::trainer {
namespace {

TEST(AsyncSaveTest, OnlyTheFirstOfARunMakesCallsOfTheSession) {
  TrainerOptions options = OptionsOfRun({"adam", 2, "adam"}, FolderFor("run"));
  options.checkpoint.manager.format = "sharded";
  options.checkpoint.every_steps = 3;
  options.checkpoint.async = true;
  std::map<int64_t, int64_t> rounds[2];
  backends::RunRankThreads(2, "gloo", [&](const launchers::Rank& rank, const auto& group) {
    TrainerOptions mine = options;
    mine.on_step = [&](int64_t step, const at::Tensor&) {
      rounds[rank.rank][step] = group.training_thread->rounds_begun();
      return StepAction::kContinue;
    };
    const session::Session session(rank, group, c10::Device(c10::kCPU));
    EXPECT_TRUE(Train(session, NetTask(), Halves(kExamples), Halves(60), mine).ok());
  });
  for (const auto& of : rounds) EXPECT_GT(of.at(5), of.at(2));   // the save of step 3
  for (const auto& of : rounds) EXPECT_EQ(of.at(10), of.at(5));  // those of steps 6 and 9
}

// Not in the process group either. What one rank cannot copy is the result on all.
TEST(AsyncSaveTest, ARepeatedStartWaitsForNoRank) {
  const checkpoint::ManagerOptions options{
      .directory = FolderFor("run"), .format = "sharded", .on_save_error = "continue"};
  std::promise<void> started[4];
  std::atomic<bool> waits = false;
  RunRanks(2, [&](const session::Session& session) {
    const auto ranks = SavingRanks::Create(session).value();
    const auto manager = checkpoint::Manager::Create(options, *ranks).value();
    AsyncSave async(session, *manager, *ranks, /*check_staging=*/true);
    for (int step = 0; step < 4; ++step) {
      checkpoint::State state;
      state.root.insert("model", at::full({4}, step, at::kFloat));
      const c10::complex<double> nan(NAN, 0);  // no copy is equal to it
      if (step == 3 && session.rank() == 1) state.root.insert("nan", nan);
      const bool is_second = session.rank() == step % 2;
      if (is_second && step > 0 && !waits) {
        const auto ready = std::future_status::ready;
        waits = started[step].get_future().wait_for(std::chrono::minutes(1)) != ready;
        EXPECT_FALSE(waits) << "the other rank's Start waits for this one's, in step " << step;
      }
      EXPECT_TRUE(async.Start(absl::StrCat("epoch_", step + 1), state, {}).ok());
      if (!is_second) started[step].set_value();
      const absl::Status saved = async.Join().value().saved.status();
      EXPECT_EQ(absl::IsDataLoss(saved), step == 3) << saved;
      EXPECT_TRUE(manager->GoesOnAfter(saved)) << saved;
    }
  });
  EXPECT_EQ(Names(options.directory).size(), 3);
}

// What there is in a folder of checkpoints.
struct Contents {
  std::map<std::string, std::map<std::string, std::string>> bytes;
  std::string newest, best;

  friend bool operator==(const Contents&, const Contents&) = default;
};
Contents ContentsOf(const std::string& folder) {
  Contents contents;
  for (const std::string& name : Names(folder)) {
    contents.bytes[name] = BytesIn(absl::StrCat(folder, "/", name));
  }
  const SingleRank rank;
  auto manager = checkpoint::Manager::Create({.directory = folder, .read_only = true}, rank);
  EXPECT_TRUE(manager.ok()) << manager.status();
  if (!manager.ok()) return contents;
  contents.newest = (*manager)->Newest()->value_or("none");
  contents.best = (*manager)->Best("test/loss:min")->value_or("none");
  return contents;
}

void WaitForEndOfThread(int id) {
  const std::string thread = absl::StrCat("/proc/self/task/", id);
  while (std::filesystem::exists(thread)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

class AsyncFailureTest : public testing::TestWithParam<std::string> {
 protected:
  // All ranks save every 3 steps and at the ends of epochs, and keep 2 beside the best. With two
  // ranks an epoch has 11 steps.
  TrainerOptions Options(const Setting& setting) const {
    TrainerOptions options = OptionsOfRun(setting, FolderFor("run"));
    options.epochs = 500;
    options.checkpoint.every_steps = 3;
    options.checkpoint.async = true;
    options.checkpoint.manager.format = GetParam();
    options.checkpoint.manager.keep_last = 2;
    options.checkpoint.manager.keep_best = "test/loss:min";
    return options;
  }
  // A rank that writes: in format pt only rank 0 does.
  int writer() const { return GetParam() == "pt" ? 0 : 1; }
};

INSTANTIATE_TEST_SUITE_P(Formats, AsyncFailureTest, testing::Values("pt", "sharded"),
                         [](const auto& info) { return info.param; });

TEST_P(AsyncFailureTest, OfOneRankEndsAllRanksAfterOneStepAndNothingHasChanged) {
  const Setting setting{"zero_1", 2, "adamw", 1, 0, true, 1};
  TrainerOptions options = Options(setting);
  // After that of step 18 none is due before step 22, where the ranks would meet in any case.
  options.checkpoint.every_steps = 6;
  options.checkpoint.manager.keep_last = 1;
  const std::string folder = options.checkpoint.manager.directory;
  std::atomic<int64_t> last[2] = {0, 0};
  constexpr int64_t kFails = 19;
  // The run goes on while the disk does nothing.
  Disk disk("epoch_1_step_18.", ENOSPC, [&] { return last[writer()] >= kFails; });
  Contents before;
  std::atomic<int> saving_thread = 0;
  disk.set_on_write([&] {
    before = ContentsOf(folder);
    saving_thread = static_cast<int>(::syscall(SYS_gettid));
  });
  const auto reports = TrainRanks(setting, options, [&](int rank, TrainerOptions& mine) {
    if (rank == writer()) mine.checkpoint.manager.files = &disk;
    mine.on_step = [&, rank](int64_t step, const at::Tensor&) {
      last[rank] = step;
      if (rank != writer()) return StepAction::kContinue;
      disk.Notify();
      if (step != kFails) return StepAction::kContinue;
      disk.WaitForFailure();
      WaitForEndOfThread(saving_thread);  // from here on this rank knows
      return StepAction::kContinue;
    };
  });
  for (const auto& report : reports) {
    EXPECT_EQ(report.status().code(), absl::StatusCode::kResourceExhausted) << report.status();
    EXPECT_TRUE(absl::StrContains(report.status().message(), "epoch_1_step_18")) << report.status();
    EXPECT_TRUE(absl::StrContains(report.status().message(), "disk full")) << report.status();
  }
  EXPECT_EQ(last[0], last[1]);
  EXPECT_GE(last[0], kFails);
  EXPECT_LE(last[0], kFails + 2);
  // The best is that of epoch 1, the newest that of step 12.
  EXPECT_EQ(before.bytes.size(), 2);
  EXPECT_TRUE(absl::StrContains(before.newest, "epoch_1_step_12")) << before.newest;
  EXPECT_TRUE(absl::StrContains(before.best, "epoch_1.")) << before.best;
  EXPECT_TRUE(ContentsOf(folder) == before);
}

// Without another save that is due, after which the ranks meet in any case.
TEST_P(AsyncFailureTest, EndsTheRunThoughNoOtherSaveIsDue) {
  const Setting setting{"sgd", 3};
  TrainerOptions options = Options(setting);
  options.checkpoint.every = 0;
  options.checkpoint.every_steps = 500;
  Disk disk("_step_500.", EIO);
  std::atomic<int> saving_thread = 0;
  disk.set_on_write([&] { saving_thread = static_cast<int>(::syscall(SYS_gettid)); });
  std::atomic<int64_t> last[3] = {0, 0, 0};
  const auto reports = TrainRanks(setting, options, [&](int rank, TrainerOptions& mine) {
    if (rank == writer()) mine.checkpoint.manager.files = &disk;
    mine.on_step = [&, rank](int64_t step, const at::Tensor&) {
      last[rank] = step;
      if (rank != writer() || step != 600) return StepAction::kContinue;
      disk.WaitForFailure();
      WaitForEndOfThread(saving_thread);  // from here on this rank knows
      return StepAction::kContinue;
    };
  });
  for (const auto& report : reports) {
    EXPECT_TRUE(absl::StrContains(report.status().message(), "_step_500")) << report.status();
  }
  for (const auto& step : last) EXPECT_EQ(step, last[0]);
  EXPECT_GE(last[0], 500);
  EXPECT_LE(last[0], 602);
  EXPECT_TRUE(Names(options.checkpoint.manager.directory).empty());
}

TEST_P(AsyncFailureTest, MayBePassedOver) {
  const Setting setting{"zero_2", 2, "adamw", 1, 0, true, 2};
  TrainerOptions options = Options(setting);
  options.epochs = 2;
  options.checkpoint.manager.on_save_error = "continue";
  options.checkpoint.manager.keep_last = 0;
  options.checkpoint.manager.keep_best = "";
  Disk disk("epoch_0_step_6.", ENOSPC);
  const Report report = Trained(setting, options, [&](int rank, TrainerOptions& mine) {
    if (rank != writer()) return;
    mine.checkpoint.manager.files = &disk;
    mine.on_step = [&](int64_t step, const at::Tensor&) {
      if (step == 8) disk.WaitForFailure();
      return StepAction::kContinue;
    };
  });
  EXPECT_EQ(report.epochs, 2);
  std::set<std::string> expected;
  for (const char* name : {"epoch_0_step_3", "epoch_0_step_9", "epoch_1", "epoch_1_step_12",
                           "epoch_1_step_15", "epoch_1_step_18", "epoch_1_step_21", "epoch_2"}) {
    expected.insert(absl::StrCat(name, ".", GetParam()));
  }
  EXPECT_EQ(Names(options.checkpoint.manager.directory), expected);
}

// That of step 3, of which one rank can start no thread. AsyncSaveTest has a copy that fails.
TEST_P(AsyncFailureTest, WhatCannotBeStagedMayBePassedOver) {
  const Setting setting{"zero_1", 2, "adamw", 1, 0, true, 1};
  for (const int without : {0, 1}) {
    for (const bool goes_on : {true, false}) {
      SCOPED_TRACE(absl::StrCat("rank ", without, goes_on ? " continue" : " stop"));
      TrainerOptions options = Options(setting);
      options.epochs = 1;
      options.checkpoint.manager.on_save_error = goes_on ? "continue" : "stop";
      options.checkpoint.manager.keep_last = 0;
      options.checkpoint.manager.keep_best = "";
      std::optional<NoThreads> none;
      const auto reports = TrainRanks(setting, options, [&](int rank, TrainerOptions& mine) {
        if (rank != without) return;
        mine.on_step = [&](int64_t step, const at::Tensor&) {
          none.reset();
          if (step == 3) none.emplace();
          return StepAction::kContinue;
        };
      });
      for (const auto& report : reports) {
        EXPECT_EQ(report.ok(), goes_on) << report.status();
        if (report.ok()) continue;
        EXPECT_TRUE(absl::StrContains(report.status().message(), "epoch_0_step_3."))
            << report.status();
        EXPECT_TRUE(absl::StrContains(report.status().message(), "start no more threads"))
            << report.status();
      }
      std::set<std::string> expected;
      if (goes_on) {
        for (const char* name : {"epoch_0_step_6", "epoch_0_step_9", "epoch_1"}) {
          expected.insert(absl::StrCat(name, ".", GetParam()));
        }
      }
      EXPECT_EQ(Names(options.checkpoint.manager.directory), expected);
    }
  }
}

TEST_P(AsyncFailureTest, OfTheLastSaveIsTheRunsResult) {
  const Setting setting{"sgd"};
  TrainerOptions options = Options(setting);
  options.epochs = 1;
  options.checkpoint.every_steps = 0;
  Disk disk("epoch_1.", ENOSPC);
  const auto reports = TrainRanks(setting, options, [&](int rank, TrainerOptions& mine) {
    if (rank == writer()) mine.checkpoint.manager.files = &disk;
  });
  for (const auto& report : reports) {
    EXPECT_EQ(report.status().code(), absl::StatusCode::kResourceExhausted) << report.status();
  }
  EXPECT_TRUE(Names(options.checkpoint.manager.directory).empty());
}

// Fails on rank 1 before the last save of a run of one epoch.
class NotTheLast final : public Callback {
 public:
  std::string name() const override { return "not_the_last"; }
  absl::Status OnSave(CallbackContext& context, const std::string& checkpoint) override {
    if (context.session().rank() == 0 || checkpoint != "epoch_1") return absl::OkStatus();
    return absl::InternalError("I do not like it");
  }
};

// The other rank has begun to save, on a thread that waits for one that does not come.
TEST_P(AsyncFailureTest, OfOneRankBeforeItsLastSaveIsTheResultOfAll) {
  const Setting setting{"sgd"};
  TrainerOptions options = Options(setting);
  options.epochs = 1;
  const auto reports = TrainRanks(setting, options, [](int, TrainerOptions& mine) {
    mine.callbacks.push_back(std::make_shared<NotTheLast>());
  });
  for (const auto& report : reports) {
    EXPECT_EQ(report.status().message(), "rank 1: callback not_the_last: I do not like it");
  }
  EXPECT_FALSE(
      Names(options.checkpoint.manager.directory).contains(absl::StrCat("epoch_1.", GetParam())));
}

TEST_P(AsyncFailureTest, OfTrainingLetsTheSaveEnd) {
  const Setting setting{"sgd"};
  TrainerOptions options = Options(setting);
  std::atomic<bool> has_failed = false;
  Disk disk("epoch_0_step_3.", 0, [&] { return has_failed.load(); });
  const auto reports = TrainRanks(setting, options, [&](int rank, TrainerOptions& mine) {
    if (rank != writer()) return;
    mine.checkpoint.manager.files = &disk;
    mine.on_step = [&](int64_t step, const at::Tensor&) {
      if (step == 5) {
        has_failed = true;
        disk.Notify();
        throw std::runtime_error("the model is on fire");
      }
      return StepAction::kContinue;
    };
  });
  for (const auto& report : reports) {
    EXPECT_TRUE(absl::StrContains(report.status().message(), "the model is on fire"))
        << report.status();
  }
  EXPECT_EQ(Names(options.checkpoint.manager.directory),
            std::set<std::string>{absl::StrCat("epoch_0_step_3.", GetParam())});
}

}  // namespace
}  // namespace ddp::trainer
