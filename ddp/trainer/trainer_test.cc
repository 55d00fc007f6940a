#include "ddp/trainer/trainer.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <optional>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ddp/trainer/trainer_testing.h"
#include "gtest/gtest.h"

namespace ddp::trainer {
namespace {

TEST(EvaluateTest, EveryExampleCountsOnceInAnyWorld) {
  std::optional<Evaluation> alone;
  for (int world_size : {1, 2, 3, 5}) {
    RunRanks(world_size, [&](const session::Session& session) {
      // 7 examples on 5 ranks in batches of 30: some ranks have one, none has a full batch.
      for (int64_t n : {7, 1001}) {
        auto result = Evaluate(session, LineTask(), Halves(n), {.batch_size = 30});
        ASSERT_TRUE(result.ok()) << result.status();
        EXPECT_EQ(result->examples, n);
        if (n == 1001 && session.is_main()) {
          if (!alone) alone = *result;
          EXPECT_DOUBLE_EQ(result->accuracy, alone->accuracy);
          EXPECT_NEAR(result->loss, alone->loss, 1e-6);
        }
      }
    });
  }
}

TEST(TrainTest, LearnsAndReportsTheSameOnAllRanks) {
  std::vector<Report> reports(3);
  RunRanks(3, [&](const session::Session& session) {
    auto report = Train(session, LineTask(), Halves(900), Halves(100), Quiet());
    ASSERT_TRUE(report.ok()) << report.status();
    reports[session.rank()] = *report;
  });
  for (const Report& report : reports) {
    EXPECT_GT(report.test.accuracy, 0.9);
    EXPECT_EQ(report.test.loss, reports[0].test.loss);
    EXPECT_EQ(report.epochs, 2);
    EXPECT_EQ(report.steps, 2 * 19);  // ceil(300 / 16) per epoch
  }
}

TEST(TrainTest, MaxStepsEndsTheRunWithinAnEpoch) {
  TrainerOptions options = Quiet();
  options.max_steps = 5;
  RunRanks(1, [&](const session::Session& session) {
    auto report = Train(session, LineTask(), Halves(900), Halves(100), options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->steps, 5);
    EXPECT_EQ(report->epochs, 0);
  });
}

TEST(TrainTest, WritesLogsAndCheckpointsFromRankZeroAlone) {
  const std::string folder = testing::TempDir() + "/logs_and_checkpoints";
  TrainerOptions options = Quiet();
  options.log.dir = folder + "/logs";
  options.checkpoint.manager.directory = folder + "/checkpoints";
  options.hyper_parameters = {{"lr", "0.5"}};
  RunRanks(2, [&](const session::Session& session) {
    auto report = Train(session, LineTask(), Halves(320), Halves(100), options);
    ASSERT_TRUE(report.ok()) << report.status();
  });
  int event_files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(options.log.dir)) {
    event_files += absl::StrContains(entry.path().filename().string(), "tfevents");
  }
  EXPECT_EQ(event_files, 1);
  std::ifstream lines(options.log.dir + "/metrics.jsonl");
  int evaluations = 0;
  for (std::string line; std::getline(lines, line);) {
    evaluations += absl::StrContains(line, "test/accuracy");
  }
  EXPECT_EQ(evaluations, 2);
  EXPECT_TRUE(std::filesystem::exists(options.checkpoint.manager.directory + "/epoch_2.pt"));

  // A run from scratch must not overwrite them; a resumed run has nothing left to do.
  RunRanks(2, [&](const session::Session& session) {
    auto again = Train(session, LineTask(), Halves(320), Halves(100), options);
    EXPECT_EQ(again.status().code(), absl::StatusCode::kAlreadyExists) << again.status();
    TrainerOptions resumed = options;
    resumed.checkpoint.resume = "auto";
    auto report = Train(session, LineTask(), Halves(320), Halves(100), resumed);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->steps, 20);
    TrainerOptions evaluated = resumed;
    evaluated.eval_only = true;
    report = Train(session, LineTask(), Halves(320), Halves(100), evaluated);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->epochs, 2);
    EXPECT_EQ(report->steps, 20);
    // Going back to epoch 1 would overwrite epoch 2.
    TrainerOptions rewound = options;
    rewound.checkpoint.resume = options.checkpoint.manager.directory + "/epoch_1.pt";
    report = Train(session, LineTask(), Halves(320), Halves(100), rewound);
    EXPECT_EQ(report.status().code(), absl::StatusCode::kAlreadyExists) << report.status();
    Task other = LineTask();
    other.name = "other";
    report = Train(session, other, Halves(320), Halves(100), resumed);
    EXPECT_TRUE(absl::StrContains(report.status().message(), "is of model 'line'"))
        << report.status();
  });
}

TEST(TrainTest, AStaticGraphAccumulates) {
  std::vector<double> losses[2];
  for (const bool static_graph : {false, true}) {
    TrainerOptions options = Quiet();
    options.accumulate = 3;
    options.data_parallel.static_graph = static_graph;
    RunRanks(2, [&](const session::Session& session) {
      auto report = Train(session, LineTask(), Halves(300), Halves(100), options);
      ASSERT_TRUE(report.ok()) << report.status();
      if (session.is_main()) losses[static_graph].push_back(report->test.loss);
    });
  }
  ASSERT_EQ(losses[0].size(), 1);
  EXPECT_NEAR(losses[0][0], losses[1][0], 1e-6);
}

TEST(TrainTest, WithSyncBatchNormTheRanksTrainAsOneProcess) {
  const auto loss_of = [](int world_size, const std::string& sync_bn) {
    TrainerOptions options = Quiet();
    options.batch_size = 48 / world_size;
    options.sync_bn = sync_bn;
    options.data_parallel.broadcast_buffers = false;
    double loss = 0;
    RunRanks(world_size, [&](const session::Session& session) {
      auto report = Train(session, NetTask(), Halves(480), Halves(100), options);
      ASSERT_TRUE(report.ok()) << report.status();
      if (session.is_main()) loss = report->test.loss;
    });
    return loss;
  };
  const double whole = loss_of(1, "torch");
  EXPECT_NEAR(loss_of(3, "torch"), whole, 1e-5);
  EXPECT_GT(std::abs(loss_of(3, "none") - whole), 1e-4);
}

TEST(TrainTest, TakesAModuleThatIsWrappedAlready) {
  RunRanks(2, [&](const session::Session& session) {
    const Task plain = LineTask();
    auto report = Train(session, plain, Halves(300), Halves(100), Quiet());
    ASSERT_TRUE(report.ok()) << report.status();

    auto module = std::dynamic_pointer_cast<Line>(LineTask().module);
    auto wrapped = *ddp::Wrap(module, session.process_group());
    const Task task = Classification("line", wrapped);
    auto of_wrapped = Train(session, task, Halves(300), Halves(100), Quiet());
    ASSERT_TRUE(of_wrapped.ok()) << of_wrapped.status();
    EXPECT_EQ(of_wrapped->test.loss, report->test.loss);

    auto alone = *ddp::Wrap(std::dynamic_pointer_cast<Line>(LineTask().module), nullptr);
    auto refused = Train(session, Classification("line", alone), Halves(300), Halves(100), Quiet());
    EXPECT_TRUE(absl::StrContains(refused.status().message(), "wrapped for 1 ranks"))
        << refused.status();
  });
}

TEST(AgreeTest, OneRanksErrorReachesAll) {
  RunRanks(3, [&](const session::Session& session) {
    EXPECT_TRUE(session.Agree(absl::OkStatus()).ok());
    absl::Status mine = session.rank() == 2 ? absl::NotFoundError("no file") : absl::OkStatus();
    absl::Status agreed = session.Agree(mine);
    EXPECT_EQ(agreed.code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(agreed.message(), "rank 2: no file");
    EXPECT_EQ(*session.Broadcast(absl::StrCat("from ", session.rank())), "from 0");
  });
}

TEST(ValidateTest, NamesOptionAndValue) {
  TrainerOptions options;
  EXPECT_TRUE(Validate(options).ok());
  options.batch_size = 0;
  EXPECT_EQ(Validate(options).message(), "batch_size=0 must be at least 1");
  options = {};
  options.optimizer.lr = -1;
  EXPECT_EQ(Validate(options).message(), "optimizer.lr=-1 must be at least 0");
  options = {};
  options.schedule.step_epochs = std::nan("");
  EXPECT_FALSE(Validate(options).ok());
  options = {};
  options.checkpoint.resume = "auto";
  EXPECT_FALSE(Validate(options).ok());
  options = {};
  options.checkpoint.manager.format = "zip";
  EXPECT_EQ(Validate(options).code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace ddp::trainer
