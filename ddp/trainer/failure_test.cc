// One rank fails in the middle of a run: all ranks end at once, with its message.
//
// The timeout of collectives is an hour, so a rank that does not learn of the failure hangs.

#include <barrier>
#include <filesystem>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/exit_code.h"
#include "base/writer_lock.h"
#include "ddp/trainer/trainer_testing.h"
#include "gtest/gtest.h"

namespace ddp::trainer {
namespace {

constexpr int kRanks = 3;
// Ten batches per rank and epoch.
constexpr int64_t kExamples = kRanks * 16 * 10;

// Throws at its n-th batch. An example that is read alone, before the training or after an error,
// is none.
class Broken : public Halves {
 public:
  Broken(int64_t size, int fails_at) : Halves(size), fails_at_(fails_at) {}
  data::Batch Get(absl::Span<const int64_t> indices) const override {
    if (indices.size() > 1 && ++batches_ == fails_at_)
      throw std::runtime_error("the disk is on fire");
    return Halves::Get(indices);
  }

 private:
  const int fails_at_;
  mutable int batches_ = 0;
};

// What one rank's run is made of; `is_broken`: it is the one that fails.
using TrainOne =
    std::function<absl::StatusOr<Report>(const session::Session& session, bool is_broken)>;

// Runs the ranks and returns the one message that all return and that is printed once.
std::string MessageOfAll(int broken, const TrainOne& train) {
  std::vector<std::string> messages(kRanks);
  testing::internal::CaptureStderr();
  RunRanks(
      kRanks,
      [&](const session::Session& session) {
        const int rank = session.rank();
        messages[rank] = std::string(train(session, rank == broken).status().message());
      },
      absl::Hours(1));
  const std::string printed = testing::internal::GetCapturedStderr();
  for (const std::string& message : messages) EXPECT_EQ(message, messages[0]);
  std::vector<std::string> errors;
  for (absl::string_view line : absl::StrSplit(printed, '\n')) {
    if (absl::StartsWith(line, "error: ")) errors.push_back(std::string(line.substr(7)));
  }
  EXPECT_EQ(errors, std::vector<std::string>{messages[0]}) << printed;
  return messages[0];
}

class FailureTest : public testing::TestWithParam<int> {};

// Rank 0 serves the store and prints errors.
INSTANTIATE_TEST_SUITE_P(Ranks, FailureTest, testing::Values(0, 1, 2));

TEST_P(FailureTest, InTheLoader) {
  for (int num_workers : {0, 1}) {
    TrainerOptions options = Quiet();
    options.num_workers = num_workers;
    const std::string message =
        MessageOfAll(GetParam(), [&](const session::Session& session, bool broken) {
          return Train(session, NetTask(), Broken(kExamples, broken ? 4 : 0), Halves(60), options);
        });
    EXPECT_TRUE(absl::StartsWith(
        message, absl::StrCat("rank ", GetParam(), ": loading batch 4 of 10 (16 examples")))
        << message;
    EXPECT_TRUE(absl::EndsWith(message, ": the disk is on fire")) << message;
  }
}

// The other ranks wait in the next all-reduce, in the evaluation, or in a save.
TEST_P(FailureTest, InTheLastBatchOfAnEpoch) {
  const std::string message =
      MessageOfAll(GetParam(), [&](const session::Session& session, bool broken) {
        return Train(session, LineTask(), Broken(kExamples, broken ? 10 : 0), Halves(60), Quiet());
      });
  EXPECT_TRUE(absl::StartsWith(message, absl::StrCat("rank ", GetParam(), ": loading batch 10")))
      << message;
}

TEST_P(FailureTest, InTheLoaderOfTheEvaluation) {
  const std::string message =
      MessageOfAll(GetParam(), [&](const session::Session& session, bool broken) {
        return Train(session, LineTask(), Halves(kExamples), Broken(60, broken ? 1 : 0), Quiet());
      });
  EXPECT_TRUE(absl::StartsWith(message, absl::StrCat("rank ", GetParam(), ": loading batch 1 of")))
      << message;
}

// The other ranks are in the collectives that compare the models.
TEST_P(FailureTest, WhileTheModelIsWrapped) {
  const std::string message =
      MessageOfAll(GetParam(), [&](const session::Session& session, bool broken) {
        TrainerOptions options = Quiet();
        options.data_parallel.ignored = {"no_such_parameter"};
        Task task = NetTask();
        if (!broken) task.module->register_parameter("no_such_parameter", at::ones({1}));
        return Train(session, task, Halves(kExamples), Halves(60), options);
      });
  EXPECT_TRUE(absl::StartsWith(message, absl::StrCat("rank ", GetParam(), ": "))) << message;
  EXPECT_TRUE(absl::StrContains(message, "no_such_parameter")) << message;
}

// A program whose ranks were given different options.
TEST_P(FailureTest, OptionsThatOneRankHasAlone) {
  const std::string message =
      MessageOfAll(GetParam(), [&](const session::Session& session, bool broken) {
        TrainerOptions options = Quiet();
        options.optimizer.lr = broken ? 0.2 : 0.1;
        options.num_workers = broken ? 1 : 0;
        return Train(session, NetTask(), Halves(kExamples), Halves(60), options);
      });
  EXPECT_TRUE(absl::StartsWith(
      message, absl::StrCat("rank 0: optimizer.lr=", GetParam() == 0 ? "0.2" : "0.1",
                            " is not the same on all ranks: rank")))
      << message;
  EXPECT_TRUE(absl::StrContains(message, absl::StrCat("rank ", GetParam(), " has 0.2"))) << message;
}

// Of as many steps, too: the ranks would train on other examples than they think.
TEST_P(FailureTest, DataOfAnotherSizeThatOneRankHasAlone) {
  for (const bool test : {false, true}) {
    for (const int64_t size : {kExamples - 1, kExamples / 2}) {
      const std::string message =
          MessageOfAll(GetParam(), [&](const session::Session& session, bool broken) {
            const Halves other(broken ? size : kExamples), data(kExamples);
            return Train(session, NetTask(), test ? data : other, test ? other : data, Quiet());
          });
      EXPECT_TRUE(
          absl::StartsWith(message, absl::StrCat("rank 0: ", test ? "test" : "training", " data=")))
          << message;
      EXPECT_TRUE(
          absl::StrContains(message, absl::StrCat("rank ", GetParam(), " has ", size, " examples")))
          << message;
    }
  }
}

TEST_P(FailureTest, InForward) {
  const std::string message =
      MessageOfAll(GetParam(), [&](const session::Session& session, bool broken) {
        Task task = NetTask();
        int forwards = 0;
        task.forward = [forward = task.forward, forwards, broken](const at::Tensor& x) mutable {
          if (broken && ++forwards == 5) throw std::runtime_error("out of memory");
          return forward(x);
        };
        return Train(session, task, Halves(kExamples), Halves(60), Quiet());
      });
  EXPECT_EQ(message, absl::StrCat("rank ", GetParam(), ": out of memory"));
}

// The rank fails during backward: the all-reduce of the last layer's gradients has started already.
TEST_P(FailureTest, InBackward) {
  const std::string message =
      MessageOfAll(GetParam(), [&](const session::Session& session, bool broken) {
        Task task = NetTask();
        int backwards = 0;
        if (broken) {
          task.module->parameters()[0].register_hook([&backwards](const at::Tensor& gradient) {
            if (++backwards == 5) throw std::runtime_error("a bad gradient");
            return gradient;
          });
        }
        TrainerOptions options = Quiet();
        options.data_parallel.bucket_cap_mb = 1e-4;  // a bucket for each layer
        return Train(session, task, Halves(kExamples), Halves(60), options);
      });
  EXPECT_EQ(message, absl::StrCat("rank ", GetParam(), ": a bad gradient"));
}

TEST_P(FailureTest, InOnStep) {
  const std::string message =
      MessageOfAll(GetParam(), [&](const session::Session& session, bool broken) {
        TrainerOptions options = Quiet();
        if (broken) {
          options.on_step = [](int64_t step, const at::Tensor&) {
            if (step == 7) throw std::runtime_error("no such metric");
            return StepAction::kContinue;
          };
        }
        return Train(session, LineTask(), Halves(kExamples), Halves(60), options);
      });
  EXPECT_EQ(message, absl::StrCat("rank ", GetParam(), ": no such metric"));
}

// The rank fails in the third step, which ranks 1 and 2 shadow: they have two batches.
TEST_P(FailureTest, InAStepThatRanksShadow) {
  const std::string message =
      MessageOfAll(GetParam(), [&](const session::Session& session, bool broken) {
        TrainerOptions options = Quiet();
        options.even_batches = false;
        if (broken) {
          options.on_step = [](int64_t step, const at::Tensor&) {
            if (step == 3) throw std::runtime_error("no such metric");
            return StepAction::kContinue;
          };
        }
        return Train(session, LineTask(), Halves(2 * kRanks * 16 + 1), Halves(60), options);
      });
  EXPECT_EQ(message, absl::StrCat("rank ", GetParam(), ": no such metric"));
}

// The disk of rank 0's log is full.
TEST(FailureOfALogTest, ReachesAllRanks) {
  const std::string folder = testing::TempDir() + "/full_log";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  std::filesystem::create_symlink("/dev/full", folder + "/metrics.jsonl");
  const std::string message = MessageOfAll(0, [&](const session::Session& session, bool) {
    TrainerOptions options = Quiet();
    options.log.dir = folder;
    return Train(session, LineTask(), Halves(kExamples), Halves(60), options);
  });
  EXPECT_TRUE(absl::StartsWith(message, "rank 0: disk full")) << message;
  EXPECT_TRUE(absl::StrContains(message, folder)) << message;
}

// Another run holds the folder of logs, or that of checkpoints.
TEST(FailureOfAFolderTest, OneRunWritesToIt) {
  const std::string folder = testing::TempDir() + "/held";
  for (const bool logs : {false, true}) {
    std::filesystem::remove_all(folder);
    std::filesystem::create_directories(folder);
    std::optional<WriterLock> held = WriterLock::Take(folder, {.job = "another"}).value();
    const auto train = [&](const session::Session& session, bool) {
      TrainerOptions options = Quiet();
      (logs ? options.log.dir : options.checkpoint.manager.directory) = folder;
      return Train(session, LineTask(), Halves(kExamples), Halves(60), options);
    };
    const std::string message = MessageOfAll(0, train);
    EXPECT_TRUE(absl::StrContains(message, logs ? "log.dir=" : "checkpoint.dir=")) << message;
    EXPECT_TRUE(absl::StrContains(message, "is written by another run, pid ")) << message;
    EXPECT_TRUE(absl::StrContains(message, ", job another; this one is pid ")) << message;
    held.reset();
    RunRanks(kRanks,
             [&](const session::Session& session) { EXPECT_TRUE(train(session, false).ok()); });
    // It ends with the run.
    EXPECT_TRUE(WriterLock::Take(folder, {.patience = absl::ZeroDuration()}).ok());
  }
}

// Evaluations do not exclude each other.
TEST(FailureOfAFolderTest, AnEvaluationDoesNotWriteIntoTheLogOfARun) {
  const std::string folder = testing::TempDir() + "/evaluated";
  std::filesystem::remove_all(folder);
  TrainerOptions options = Quiet();
  options.checkpoint.manager.directory = folder + "/checkpoints";
  options.checkpoint.resume = "auto";
  const auto train = [&] {
    testing::internal::CaptureStderr();
    RunRanks(2, [&](const session::Session& session) {
      const auto report = Train(session, LineTask(), Halves(kExamples), Halves(60), options);
      EXPECT_TRUE(report.ok()) << report.status();
    });
    return testing::internal::GetCapturedStderr();
  };
  train();
  options.eval_only = true;
  options.log.dir = folder + "/log";
  std::filesystem::create_directories(options.log.dir);
  std::optional<WriterLock> held = WriterLock::Take(options.log.dir, {.job = "another"}).value();
  const std::string printed = train();
  EXPECT_TRUE(absl::StrContains(printed, "this evaluation is not recorded: ")) << printed;
  EXPECT_TRUE(absl::StrContains(printed, "is written by another run, pid ")) << printed;
  EXPECT_FALSE(std::filesystem::exists(options.log.dir + "/metrics.jsonl"));
  held.reset();
  EXPECT_FALSE(absl::StrContains(train(), "not recorded"));
  EXPECT_TRUE(std::filesystem::exists(options.log.dir + "/metrics.jsonl"));
}

// As two steps of srun in one allocation of SLURM. A later life would wait.
TEST(FailureOfAFolderTest, AnotherRunOfASharedJobIsRefusedAtOnce) {
  const std::string folder = testing::TempDir() + "/shared";
  std::filesystem::create_directories(folder);
  const WriterLock held = WriterLock::Take(folder, {.job = "a"}).value();
  RunRanks(1, [&](const session::Session& first) {
    launchers::Rank place = first.place();
    place.job = "a";
    place.job_is_shared = true;
    const session::Session session(
        place, {.process_group = first.process_group(), .store = first.store()}, first.device());
    TrainerOptions options = Quiet();
    options.log.dir = folder;
    const absl::Time start = absl::Now();
    const absl::Status refused =
        Train(session, LineTask(), Halves(kExamples), Halves(60), options).status();
    EXPECT_LT(absl::Now() - start, absl::Seconds(30));
    EXPECT_TRUE(absl::StrContains(refused.message(), "is written by another run, pid ")) << refused;
  });
}

// It waits nearly as long as other ranks wait for one that works alone, here a second, and may be
// begun again.
TEST(FailureOfAFolderTest, ALaterLifeWaitsForTheFormerAndIsNoWrongOption) {
  const std::string folder = testing::TempDir() + "/former";
  std::filesystem::create_directories(folder);
  const WriterLock held = WriterLock::Take(folder, {.job = "a"}).value();
  RunRanks(1, [&](const session::Session& first) {
    launchers::Rank place = first.place();
    place.job = "a";
    place.restart_count = 1;
    const session::Session session(place,
                                   {.process_group = first.process_group(), .store = first.store()},
                                   first.device(), {.work_timeout = absl::Seconds(1)});
    TrainerOptions options = Quiet();
    options.log.dir = folder;
    const absl::Time start = absl::Now();
    const absl::Status refused =
        Train(session, LineTask(), Halves(kExamples), Halves(60), options).status();
    EXPECT_GE(absl::Now() - start, absl::Milliseconds(900));
    EXPECT_LT(absl::Now() - start, absl::Seconds(30));
    EXPECT_TRUE(absl::StrContains(
        refused.message(),
        "log.dir=" + folder + " is still written by a former life of this job, pid "))
        << refused;
    EXPECT_EQ(ExitCodeIn(refused), 1);
  });
}

// All ranks fail: the message is that of the lowest. None does before all have left the collective
// calls of the step before, in which the others' failure would end them.
TEST(FailureOfSeveralTest, TheLowestIsNamed) {
  std::barrier after_step(kRanks);
  TrainerOptions options = Quiet();
  options.on_step = [&](int64_t step, const at::Tensor&) {
    if (step == 2) after_step.arrive_and_wait();
    return StepAction::kContinue;
  };
  const std::string message = MessageOfAll(-1, [&](const session::Session& session, bool) {
    return Train(session, LineTask(), Broken(kExamples, 3), Halves(60), options);
  });
  EXPECT_TRUE(absl::StartsWith(message, "rank 0: loading batch 3 of 10")) << message;
}

TEST(FailureAloneTest, IsTheError) {
  RunRanks(1, [&](const session::Session& session) {
    auto report = Train(session, LineTask(), Broken(kExamples, 3), Halves(100), Quiet());
    EXPECT_TRUE(absl::EndsWith(report.status().message(), "the disk is on fire"))
        << report.status();
  });
}

}  // namespace
}  // namespace ddp::trainer
