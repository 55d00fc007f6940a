#include "ddp/session/session.h"

#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ATen/ops/ones.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "backends/conformance/rank_threads.h"
#include "base/option_error.h"
#include "gtest/gtest.h"
#include "launchers/launcher.h"

namespace ddp::session {
namespace {

// A launcher like a cluster's scheduler: its ranks run on other machines.
struct Submitted {
  int times = 0;
  launchers::LaunchOptions options;
};
Submitted& LastJob() {
  static Submitted& job = *new Submitted;
  return job;
}

class SchedulerLauncher final : public launchers::Launcher {
 public:
  absl::string_view name() const override { return "scheduler"; }
  absl::StatusOr<std::optional<launchers::Rank>> Detect(const Environment&) const override {
    return std::nullopt;
  }
  bool StartsRanks() const override { return true; }
  absl::StatusOr<launchers::LaunchResult> Launch(const launchers::LaunchOptions& options) override {
    ++LastJob().times;
    LastJob().options = options;
    return launchers::LaunchResult{};
  }
  std::vector<std::string> Variables() const override { return {}; }
  std::string HowToStart() const override { return "PROGRAM"; }
};
const Registration<launchers::LauncherRegistry> kScheduler(
    "scheduler", launchers::LauncherEntry{.create = +[]() -> std::unique_ptr<launchers::Launcher> {
      return std::make_unique<SchedulerLauncher>();
    }});

// A launcher whose ranks run on this machine.
class HereLauncher final : public launchers::Launcher {
 public:
  absl::string_view name() const override { return "here"; }
  absl::StatusOr<std::optional<launchers::Rank>> Detect(const Environment&) const override {
    return std::nullopt;
  }
  bool StartsRanks() const override { return true; }
  bool StartsRanksHere() const override { return true; }
  bool RunsInProcess(const launchers::LaunchOptions& options) const override {
    return options.NprocPerNode() == 1;
  }
  absl::StatusOr<launchers::LaunchResult> Launch(const launchers::LaunchOptions&) override {
    ++LastJob().times;
    return launchers::LaunchResult{};
  }
  std::vector<std::string> Variables() const override { return {}; }
  std::string HowToStart() const override { return "PROGRAM"; }
};
const Registration<launchers::LauncherRegistry> kHere(
    "here", launchers::LauncherEntry{.create = +[]() -> std::unique_ptr<launchers::Launcher> {
      return std::make_unique<HereLauncher>();
    }});

// What Run returns, and whether `body` was called.
struct Outcome {
  int code = -1;
  bool ran = false;
};
Outcome RunProgram(const SessionOptions& options) {
  Outcome outcome;
  char program[] = "program", flag[] = "--flag";
  char* argv[] = {program, flag, nullptr};
  LastJob() = {};
  outcome.code = Run(options, 2, argv, [&](const Session&) {
    outcome.ran = true;
    return absl::OkStatus();
  });
  return outcome;
}

TEST(RoleTest, AProcessThatSubmitsNeedsNeitherDeviceNorBackend) {
  SessionOptions options = {.launcher = {.name = "scheduler", .nnodes = 2, .nproc_per_node = 8},
                            .device = "cuda",
                            .group = {.backend = "nccl"}};
  EXPECT_FALSE(ValidateAsRank(options)
                   .ok());  // this program links no nccl, and this machine may have no GPU
  const Outcome outcome = RunProgram(options);
  EXPECT_EQ(outcome.code, 0);
  EXPECT_FALSE(outcome.ran);
  ASSERT_EQ(LastJob().times, 1);
  EXPECT_EQ(LastJob().options.nnodes, 2);
  EXPECT_EQ(LastJob().options.NprocPerNode(), 8);
  ASSERT_EQ(LastJob().options.argv.size(), 2);
  EXPECT_TRUE(absl::StrContains(LastJob().options.argv[0], "session_test"));  // not argv[0]
  EXPECT_EQ(LastJob().options.argv[1], "--flag");
}

// A single rank on another machine must not run in this process.
TEST(RoleTest, ALauncherWithoutARankNeverBecomesAWorldOfOne) {
  const Outcome outcome = RunProgram({.launcher = {.name = "scheduler", .nproc_per_node = 1}});
  EXPECT_FALSE(outcome.ran);
  EXPECT_EQ(LastJob().times, 1);
}

TEST(RoleTest, WhatRanksHereLackIsToldBeforeTheyAreStarted) {
  const Outcome outcome = RunProgram(
      {.launcher = {.name = "here", .nproc_per_node = 2}, .group = {.backend = "infiniband"}});
  EXPECT_EQ(outcome.code, 2);  // an option's error
  EXPECT_EQ(LastJob().times, 0);
}

TEST(RoleTest, OneRankHereIsThisProcess) {
  const Outcome outcome = RunProgram({.launcher = {.name = "here", .nproc_per_node = 1}});
  EXPECT_EQ(outcome.code, 0);
  EXPECT_TRUE(outcome.ran);
  EXPECT_EQ(LastJob().times, 0);
}

TEST(RoleTest, OptionsOutOfRangeAreAUsageError) {
  EXPECT_EQ(RunProgram({.launcher = {.nproc_per_node = 0}}).code, 2);
  EXPECT_EQ(RunProgram({.launcher = {.name = "here"}, .device = "tpu"}).code, 2);
  EXPECT_EQ(RunProgram({.launcher = {.name = "here"}, .work_timeout = absl::ZeroDuration()}).code,
            2);
}

TEST(RoleTest, ErrorsAreShownAsTheProgramExplainsThem) {
  char program[] = "program";
  char* argv[] = {program, nullptr};
  testing::internal::CaptureStderr();
  session::Run(
      {.launcher = {.name = "here", .nproc_per_node = 0}}, 1, argv,
      [](const Session&) { return absl::OkStatus(); },
      [](const absl::Status& status) {
        return "--as_written=" + ProblemOf(status)->value + " " + ProblemOf(status)->problem;
      });
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "error: --as_written=0 must be at least 1\n");
}

// A save that takes longer than the timeout of collectives.
TEST(TimeoutTest, ARankThatWorksAloneIsWaitedForBeyondACollectivesTimeout) {
  constexpr absl::Duration kTimeout = absl::Seconds(4);  // also the time to connect
  testing::internal::CaptureStderr();
  backends::RunRankThreads(
      2, "gloo",
      [&](const launchers::Rank& rank, const backends::Group& group) {
        const Session session(rank, group, c10::Device(c10::kCPU),
                              {.group = {.timeout = kTimeout, .stall = kTimeout / 2}});
        if (rank.rank == 0) absl::SleepFor(3 * kTimeout);  // the work
        EXPECT_TRUE(session.Agree(absl::OkStatus()).ok());
        std::vector<at::Tensor> sum = {at::ones({1})};
        session.process_group()->allreduce(sum)->wait();
        EXPECT_EQ(sum[0].item<float>(), 2);
      },
      kTimeout);
  const std::string lines = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(absl::StrContains(lines, "waiting for rank 0 since ")) << lines;
}

// The two are in rounds of their own at one time, and one of them waits while the other goes on.
TEST(ThreadsTest, AnotherThreadsCoordinatorDoesNotWaitForTheSession) {
  for (const int world_size : {1, 3}) {
    backends::RunRankThreads(
        world_size, "gloo",
        [&](const launchers::Rank& rank, const backends::Group& group) {
          const Session session(rank, group, c10::Device(c10::kCPU));
          for (int repeat = 0; repeat < 2; ++repeat) {  // each has rounds of its own
            const auto other = session.ForThread();
            ASSERT_TRUE(other.ok()) << other.status();
            EXPECT_EQ((*other)->rank(), rank.rank);
            EXPECT_EQ((*other)->size(), world_size);
            std::promise<void> trained;
            std::thread thread([&] {
              const auto all = (*other)->AllGather(absl::StrCat(rank.rank));
              ASSERT_TRUE(all.ok()) << all.status();
              EXPECT_EQ(static_cast<int>(all->size()), world_size);
              if (rank.rank == 0) trained.get_future().wait();
              const absl::Status failed =
                  (*other)->Agree(rank.rank == 0 ? absl::DataLossError("x") : absl::OkStatus());
              EXPECT_TRUE(absl::IsDataLoss(failed)) << failed;
            });
            for (int round = 0; round < 20; ++round) {
              EXPECT_TRUE(session.Agree(absl::OkStatus()).ok());
            }
            trained.set_value();
            thread.join();
          }
        },
        absl::Seconds(60));
  }
}

}  // namespace
}  // namespace ddp::session
