#include "ddp/trainer/trainer.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "backends/rank_threads.h"
#include "gtest/gtest.h"
#include "torch/nn/modules/linear.h"

namespace ddp::trainer {
namespace {

// A line through noiseless points: target 1 where the input's sum is positive.
class Halves : public data::Dataset {
 public:
  explicit Halves(int64_t n) : n_(n) {}
  int64_t size() const override { return n_; }
  data::Batch Get(absl::Span<const int64_t> indices) const override {
    at::Tensor index =
        at::tensor(std::vector<int64_t>(indices.begin(), indices.end()), at::kDouble);
    at::Tensor input = at::stack({(index * 12.9898).sin(), (index * 78.233).sin()}, 1);
    return {input.to(at::kFloat), input.sum(1).gt(0).to(at::kLong)};
  }

 private:
  int64_t n_;
};

struct Line : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return linear->forward(x); }
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(2, 2))};
};

Task LineTask() {
  auto module = std::make_shared<Line>();
  at::NoGradGuard no_grad;
  module->linear->weight.fill_(0.1);
  module->linear->bias.zero_();
  return Classification("line", module);
}

void RunRanks(int world_size, const std::function<void(const Session&)>& body) {
  backends::RunRankThreads(world_size, "gloo",
                           [&](const launchers::Rank& rank, const backends::Group& group) {
                             body(Session(rank, group, c10::Device(c10::kCPU)));
                           });
}

TrainerOptions Quiet() {
  TrainerOptions options;
  options.progress = false;
  options.batch_size = 16;
  options.eval_batch_size = 30;
  options.epochs = 2;
  options.optimizer.lr = 0.5;
  return options;
}

TEST(EvaluateTest, EveryExampleCountsOnceInAnyWorld) {
  std::optional<Evaluation> alone;
  for (int world_size : {1, 2, 3, 5}) {
    RunRanks(world_size, [&](const Session& session) {
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
  RunRanks(3, [&](const Session& session) {
    auto report = Train(session, LineTask(), Halves(900), Halves(100), Quiet());
    ASSERT_TRUE(report.ok()) << report.status();
    reports[session.rank.rank] = *report;
  });
  for (const Report& report : reports) {
    EXPECT_GT(report.test.accuracy, 0.9);
    EXPECT_EQ(report.test.loss, reports[0].test.loss);
    EXPECT_EQ(report.epochs, 2);
    EXPECT_EQ(report.steps, 2 * 19);  // ceil(300 / 16) per epoch
  }
}

TEST(TrainTest, AStaticGraphAccumulates) {
  std::vector<double> losses[2];
  for (const bool static_graph : {false, true}) {
    TrainerOptions options = Quiet();
    options.accumulate = 3;
    options.data_parallel.static_graph = static_graph;
    RunRanks(2, [&](const Session& session) {
      auto report = Train(session, LineTask(), Halves(300), Halves(100), options);
      ASSERT_TRUE(report.ok()) << report.status();
      if (session.is_main()) losses[static_graph].push_back(report->test.loss);
    });
  }
  ASSERT_EQ(losses[0].size(), 1);
  EXPECT_NEAR(losses[0][0], losses[1][0], 1e-6);
}

TEST(TrainTest, TakesAModuleThatIsWrappedAlready) {
  RunRanks(2, [&](const Session& session) {
    const Task plain = LineTask();
    auto report = Train(session, plain, Halves(300), Halves(100), Quiet());
    ASSERT_TRUE(report.ok()) << report.status();

    auto module = std::dynamic_pointer_cast<Line>(LineTask().module);
    auto wrapped = *ddp::Wrap(module, session.group.process_group);
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

TEST(TrainTest, MaxStepsEndsTheRunWithinAnEpoch) {
  TrainerOptions options = Quiet();
  options.max_steps = 5;
  RunRanks(1, [&](const Session& session) {
    auto report = Train(session, LineTask(), Halves(900), Halves(100), options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->steps, 5);
    EXPECT_EQ(report->epochs, 0);
  });
}

TEST(TrainTest, WritesLogsAndCheckpointsFromRankZeroAlone) {
  const std::string folder = testing::TempDir() + "/logs_and_checkpoints";
  TrainerOptions options = Quiet();
  options.log_dir = folder + "/logs";
  options.checkpoint_dir = folder + "/checkpoints";
  options.hyper_parameters = {{"lr", "0.5"}};
  RunRanks(2, [&](const Session& session) {
    auto report = Train(session, LineTask(), Halves(320), Halves(100), options);
    ASSERT_TRUE(report.ok()) << report.status();
  });
  int event_files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(options.log_dir)) {
    event_files += absl::StrContains(entry.path().filename().string(), "tfevents");
  }
  EXPECT_EQ(event_files, 1);
  std::ifstream lines(options.log_dir + "/metrics.jsonl");
  int evaluations = 0;
  for (std::string line; std::getline(lines, line);) {
    evaluations += absl::StrContains(line, "test/accuracy");
  }
  EXPECT_EQ(evaluations, 2);
  EXPECT_TRUE(std::filesystem::exists(options.checkpoint_dir + "/epoch_2.pt"));

  // A run that starts anew there must not replace them; one that resumes has nothing left to do.
  RunRanks(2, [&](const Session& session) {
    auto again = Train(session, LineTask(), Halves(320), Halves(100), options);
    EXPECT_EQ(again.status().code(), absl::StatusCode::kAlreadyExists) << again.status();
    TrainerOptions resumed = options;
    resumed.resume = "auto";
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
    rewound.resume = options.checkpoint_dir + "/epoch_1.pt";
    report = Train(session, LineTask(), Halves(320), Halves(100), rewound);
    EXPECT_EQ(report.status().code(), absl::StatusCode::kAlreadyExists) << report.status();
    Task other = LineTask();
    other.name = "other";
    report = Train(session, other, Halves(320), Halves(100), resumed);
    EXPECT_TRUE(absl::StrContains(report.status().message(), "is of model 'line'"))
        << report.status();
  });
}

// A data set that fails on one rank only, in the middle of the first epoch.
class Broken : public Halves {
 public:
  using Halves::Halves;
  data::Batch Get(absl::Span<const int64_t>) const override {
    throw std::runtime_error("the disk is on fire");
  }
};

TEST(TrainTest, WhatTheDataSetThrowsIsTheError) {
  RunRanks(1, [&](const Session& session) {
    auto report = Train(session, LineTask(), Broken(320), Halves(100), Quiet());
    EXPECT_TRUE(absl::StrContains(report.status().message(), "the disk is on fire"))
        << report.status();
  });
}

TEST(AgreeTest, OneRanksErrorReachesAll) {
  RunRanks(3, [&](const Session& session) {
    EXPECT_TRUE(session.Agree(absl::OkStatus()).ok());
    absl::Status mine = session.rank.rank == 2 ? absl::NotFoundError("no file") : absl::OkStatus();
    absl::Status agreed = session.Agree(mine);
    EXPECT_EQ(agreed.code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(agreed.message(), "rank 2: no file");
    EXPECT_EQ(*session.FromMain(absl::StrCat("from ", session.rank.rank)), "from 0");
  });
}

TEST(ValidateTest, NamesOptionAndValue) {
  TrainerOptions options;
  EXPECT_TRUE(Validate(options).ok());
  options.batch_size = 0;
  EXPECT_EQ(Validate(options).message(), "batch_size=0 must be at least 1");
  options = {};
  options.optimizer.lr = -1;
  EXPECT_EQ(Validate(options).message(), "lr=-1 must be a number and not negative");
  options = {};
  options.step_epochs = std::nan("");
  EXPECT_FALSE(Validate(options).ok());
  options = {};
  options.resume = "auto";
  EXPECT_FALSE(Validate(options).ok());
  options = {};
  options.checkpoint_format = "zip";
  EXPECT_EQ(Validate(options).code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace ddp::trainer
