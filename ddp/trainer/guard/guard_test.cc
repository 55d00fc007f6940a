// The guard of a run: what it finds, and what follows, on all ranks alike.
#include "ddp/trainer/guard/guard.h"

#include <atomic>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ATen/TensorOperators.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "checkpoint/manager.h"
#include "checkpoint/staging.h"
#include "ddp/hooks/powersgd.h"
#include "ddp/trainer/guard/guard_testing.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::trainer {
namespace {

using absl::StrContains;
using checkpoint::State;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

double Healthy(int, int64_t) { return 1; }

struct Gan : torch::nn::Module {
  Gan() {
    const at::NoGradGuard no_grad;
    for (at::Tensor& each : parameters()) {
      each.copy_(at::arange(each.numel(), at::kFloat).sin().div(2).view_as(each));
    }
  }
  torch::nn::Linear generator{register_module("generator", torch::nn::Linear(2, 2))};
  torch::nn::Linear judge{register_module("judge", torch::nn::Linear(2, 1))};
};

// Begins with the same parameters in each run. Line's own are random, and those of a second run
// would depend on which rank seeded torch's generator last, as ranks as threads share it.
std::shared_ptr<Line> FixedLine() {
  auto line = std::make_shared<Line>();
  const at::NoGradGuard no_grad;
  for (at::Tensor& each : line->parameters()) {
    each.copy_(at::arange(each.numel(), at::kFloat).sin().div(2).view_as(each));
  }
  return line;
}

// `factor` is that of the generator's loss, which comes second.
Task SpoiltGan(const Factor& factor) {
  auto gan = std::make_shared<Gan>();
  Task task;
  task.name = "gan";
  task.module = gan;
  task.phases = {
      {.name = "judge",
       .parameters = "judge\\..*",
       .train_step = StepOf<data::Batch>([=](data::Batch& batch, const StepContext&) {
         const at::Tensor fake = gan->generator->forward(batch.input.flip(1));
         const at::Tensor loss = (gan->judge->forward(batch.input) - 1).pow(2).sum() +
                                 gan->judge->forward(fake).pow(2).sum();
         return StepOutput{.loss = SumAndCount(loss, batch.input.size(0))};
       })},
      {.name = "generator",
       .parameters = "generator\\..*",
       .train_step = StepOf<data::Batch>([=](data::Batch& batch, const StepContext& context) {
         const at::Tensor fake = gan->generator->forward(batch.input.flip(1));
         const at::Tensor loss = (gan->judge->forward(fake) - 1).pow(2).sum();
         const double by = factor(context.session.rank(), context.step);
         return StepOutput{.loss = SumAndCount(by == 1 ? loss : loss * by, batch.input.size(0))};
       })}};
  return task;
}

std::vector<at::Tensor> Copies(const torch::nn::Module& module) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& each : module.parameters()) copies.push_back(each.detach().clone());
  for (const at::Tensor& each : module.buffers()) copies.push_back(each.detach().clone());
  return copies;
}

void ExpectSameBits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
}

// Whether two checkpoints have the same, but for position, schedule and random numbers.
absl::Status SameBits(const State& before, const State& after) {
  State a, b;
  for (const auto& entry : before.root) {
    const std::string key = entry.key().toStringRef();
    const bool compared = absl::StartsWith(key, "model") || absl::StartsWith(key, "optimizer") ||
                          absl::StartsWith(key, "comm_hook") || key == "per_rank" || key == "ema" ||
                          key == "probe";
    if (!compared) continue;
    a.root.insert(key, entry.value());
    b.root.insert(key, after.root.at(key));
  }
  return checkpoint::CheckCopy(a, b);
}

struct Result {
  std::vector<absl::Status> statuses;  // by rank
  Report report;
  std::vector<at::Tensor> tensors;  // rank 0's
  std::string printed;

  const absl::Status& status() const { return statuses[0]; }
};

class GuardTest : public testing::Test {
 protected:
  GuardTest()
      : folder_(absl::StrCat(testing::TempDir(), "/",
                             testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::remove_all(folder_);
    options_ = Quiet();
    options_.optimizer = {.name = "adamw", .lr = 0.02};
    options_.checkpoint.every_steps = 5;
    options_.checkpoint.manager.directory = folder_ + "/checkpoints";
  }

  void NewFolder() { std::filesystem::remove_all(folder_); }
  std::string Checkpoint(int64_t epoch, int64_t step) const {
    return absl::StrCat(folder_, "/checkpoints/epoch_", epoch, "_step_", step, ".pt");
  }
  State Load(int64_t step) const { return checkpoint::Manager::Load(Checkpoint(0, step)).value(); }

  // 20 steps per epoch with 2 ranks.
  Result TrainRanks(const std::function<Task()>& task, int world_size = 2) {
    Result result;
    result.statuses.resize(world_size);
    testing::internal::CaptureStderr();
    RunRanks(world_size, [&](const session::Session& session) {
      TrainerOptions options = options_;
      if (on_step_) {
        options.on_step = [&, rank = session.rank()](int64_t step, const at::Tensor& loss) {
          return on_step_(rank, step, loss);
        };
      }
      const Task mine = task();
      modules_[session.rank()] = mine.module;
      const auto report = Train(session, mine, Halves(examples_), Halves(60), options);
      result.statuses[session.rank()] = report.status();
      if (world_size > 1 && ExitCodeIn(report.status()) == kAnomalyExitCode &&
          !StrContains(report.status().message(), "cannot roll back to")) {
        EXPECT_TRUE(session.store()->check({"trainer/run/1/stop/0/decided"}))
            << "a thread waits for requests while rank 0's store goes";
      }
      if (session.rank() != 0) return;
      if (report.ok()) result.report = *report;
      result.tensors = Copies(*mine.module);
    });
    result.printed = testing::internal::GetCapturedStderr();
    return result;
  }

  void ExpectStopped(const Result& result, const std::string& message) {
    for (const absl::Status& status : result.statuses) {
      EXPECT_TRUE(StrContains(status.message(), message)) << status;
      EXPECT_EQ(status.message(), result.status().message());
      EXPECT_EQ(ExitCodeIn(status), kAnomalyExitCode);
    }
  }

  const std::string folder_;
  TrainerOptions options_;
  int64_t examples_ = 640;
  std::function<StepAction(int rank, int64_t step, const at::Tensor& loss)> on_step_;
  std::shared_ptr<torch::nn::Module> modules_[3];
};

TEST_F(GuardTest, AStopHasOneMessageAndAnExitCodeOfItsOwn) {
  options_.guard.on_anomaly = "stop";
  options_.log.dir = folder_ + "/logs";
  const Result result = TrainRanks([] { return SpoiltNet(NaNIn({7})); });
  ExpectStopped(result, "rank 1: step 7: the loss is nan; examples ");
  const std::string log = *ReadFile(folder_ + "/logs/metrics.jsonl");
  for (const char* part :
       {"\"event\":\"anomaly\"", "\"kind\":\"loss\"", "\"in_step\":\"7\"", "\"rank\":\"1\"",
        "\"examples\":\"rank 0: ", "; rank 1: ", "\"reason\":\"anomaly\""}) {
    EXPECT_TRUE(StrContains(log, part)) << part << log;
  }
  EXPECT_TRUE(std::filesystem::exists(Checkpoint(0, 5)));
  EXPECT_FALSE(std::filesystem::exists(Checkpoint(0, 6)));
}

TEST_F(GuardTest, ASkippedStepLeavesAllBits) {
  for (const int64_t stage : {0, 1, 2}) {
    SCOPED_TRACE(stage);
    NewFolder();
    options_.zero.stage = stage;
    options_.guard.on_anomaly = "skip";
    options_.checkpoint.every_steps = 1;
    options_.checkpoint.every = 0;
    options_.ema.decay = 0.9;
    options_.accumulate = 2;
    options_.data_parallel.broadcast_buffers = false;  // each rank's are saved
    options_.max_steps = 9;
    if (stage < 2) {
      options_.comm_hook.name = "powersgd";
      options_.comm_hook.implementations.Mutable<hooks::PowerSgdOptions>("powersgd") = {
          .start_iter = 2, .min_compression_rate = 0.5};
    } else {
      options_.comm_hook = {};
    }
    std::vector<int64_t> told;
    on_step_ = [&](int rank, int64_t step, const at::Tensor&) {
      if (rank == 0) told.push_back(step);
      return StepAction::kContinue;
    };
    const Result result = TrainRanks([] {
      return Spoilt(std::make_shared<Counting>(), NaNIn({6, 7}));
    });
    ASSERT_TRUE(result.status().ok()) << result.status();
    EXPECT_TRUE(StrContains(result.printed, "rank 1: step 6: the loss is nan")) << result.printed;
    EXPECT_EQ(result.report.steps, 9);
    EXPECT_EQ(told, (std::vector<int64_t>{1, 2, 3, 4, 5, 8, 9}));
    const State before = Load(5);
    EXPECT_EQ(before.root.contains("comm_hook"), stage < 2);
    for (const int64_t step : {6, 7}) {
      const absl::Status same = SameBits(before, Load(step));
      EXPECT_TRUE(same.ok()) << same;
    }
    EXPECT_FALSE(SameBits(before, Load(8)).ok());
    for (const at::Tensor& tensor : result.tensors)
      EXPECT_TRUE(tensor.isfinite().all().item<bool>());
  }
}

// As after weights that are so large that every loss is NaN.
TEST_F(GuardTest, ARunThatSkipsAllStepsEnds) {
  options_.guard = {.on_anomaly = "skip", .anomaly_deviations = 0, .anomaly_window = 4};
  options_.checkpoint.resume = "auto";
  const auto train = [&](int64_t step) {
    options_.stop_at_step = step;
    return TrainRanks([] { return SpoiltNet(NaNIn({3, 4, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17})); });
  };
  const std::string step = "rank 1: step 16: the loss is nan; examples ";
  const Result whole = train(0);
  ExpectStopped(whole, step);
  ExpectStopped(whole, "; the 4 steps before it were skipped as well");
  NewFolder();
  const Result stopped = train(14);
  ASSERT_TRUE(stopped.status().ok()) << stopped.status();
  ExpectStopped(train(0), step);
  // From an older checkpoint, which does not count them.
  NewFolder();
  options_.checkpoint.save.callback = [](State& state) {
    const checkpoint::Dict guard = state.root.at("guard").toGenericDict();
    for (const char* key : {"skips", "last_skip"}) EXPECT_EQ(guard.erase(key), 1);
  };
  ASSERT_TRUE(train(14).status().ok());
  const Result resumed = train(0);
  EXPECT_TRUE(resumed.status().ok()) << resumed.status();
}

TEST_F(GuardTest, ARolledBackRunHasTheBitsOfOneThatSkipped) {
  for (const int64_t stage : {0, 2}) {
    NewFolder();
    options_.zero.stage = stage;
    options_.checkpoint.async = stage == 2;
    options_.checkpoint.manager.format = stage == 2 ? "sharded" : "pt";
    options_.log.dir = folder_ + "/logs";
    options_.guard.on_anomaly = "skip";
    options_.ema.decay = 0.9;
    options_.ema.eval = true;
    const auto task = [] { return SpoiltNet(NaNIn({13, 14, 22})); };
    const Result skipped = TrainRanks(task);
    ASSERT_TRUE(skipped.status().ok()) << skipped.status();
    const Result healthy = [&] {
      NewFolder();
      return TrainRanks([] { return SpoiltNet(Healthy); });
    }();
    EXPECT_FALSE(at::equal(healthy.tensors[0], skipped.tensors[0]));
    NewFolder();
    options_.guard.on_anomaly = "rollback";
    const Result result = TrainRanks(task);
    ASSERT_TRUE(result.status().ok()) << result.status();
    for (const char* line : {"step 13: the loss is nan", "step 14: the loss is nan",
                             "rolled back to ", "/epoch_0_step_10.", "/epoch_1."}) {
      EXPECT_TRUE(StrContains(result.printed, line)) << line << result.printed;
    }
    EXPECT_EQ(result.report.steps, 40);
    EXPECT_EQ(result.report.test.loss, skipped.report.test.loss);
    ExpectSameBits(result.tensors, skipped.tensors);
    const std::string log = *ReadFile(folder_ + "/logs/metrics.jsonl");
    EXPECT_TRUE(StrContains(log, "\"action\":\"rollback\"")) << log;
  }
}

TEST_F(GuardTest, AStoppedRunGoesOnWithTheSameBits) {
  // A spike, which is one by what was before the stop.
  const Factor factor = [](int rank, int64_t step) {
    return rank == 1 && step + 1 == 13 ? 100.0 : rank == 0 && step + 1 == 17 ? kNaN : 1.0;
  };
  const auto task = [&] { return SpoiltNet(factor); };
  options_.checkpoint.resume = "auto";
  options_.guard.anomaly_window = 16;
  for (const std::string policy : {"skip", "rollback"}) {
    options_.guard.on_anomaly = policy;
    NewFolder();
    const Result whole = TrainRanks(task);
    ASSERT_TRUE(whole.status().ok()) << whole.status();
    EXPECT_TRUE(StrContains(whole.printed, "step 13: the loss is ")) << whole.printed;
    EXPECT_TRUE(StrContains(whole.printed, "standard deviations above the mean"));
    for (const int64_t step : {12, 14, 18}) {
      NewFolder();
      options_.stop_at_step = step;
      ASSERT_TRUE(TrainRanks(task).status().ok());
      options_.stop_at_step = 0;
      const Result resumed = TrainRanks(task);
      ASSERT_TRUE(resumed.status().ok()) << resumed.status();
      ExpectSameBits(resumed.tensors, whole.tensors);
    }
  }
}

TEST_F(GuardTest, ARunRollsBackThreeTimes) {
  options_.guard.on_anomaly = "rollback";
  const Result result = TrainRanks([] { return SpoiltNet(NaNIn({7, 8, 9, 12})); });
  ExpectStopped(result, "step 12: the loss is nan");
  EXPECT_TRUE(StrContains(result.status().message(), "has rolled back 3 times"));
}

// Also of those before a resume.
TEST_F(GuardTest, ARunThatIsResumedKnowsItsRollbacks) {
  options_.guard.on_anomaly = "rollback";
  options_.checkpoint.resume = "auto";
  options_.stop_at_step = 10;
  const auto task = [] { return SpoiltNet(NaNIn({7, 8, 12, 13})); };
  ASSERT_TRUE(TrainRanks(task).status().ok());
  options_.stop_at_step = 0;
  ExpectStopped(TrainRanks(task), "step 13: the loss is nan");
}

// A spike is one of the values by which the next ones are judged.
TEST_F(GuardTest, ALossThatStaysHighIsNoAnomalyAgain) {
  options_.guard = {.on_anomaly = "skip", .anomaly_window = 16};
  const Result result = TrainRanks(
      [] { return SpoiltNet([](int, int64_t step) { return step + 1 >= 13 ? 100.0 : 1.0; }); });
  ASSERT_TRUE(result.status().ok()) << result.status();
  const size_t first = result.printed.find("the loss is ");
  EXPECT_NE(first, std::string::npos) << result.printed;
  EXPECT_EQ(result.printed.find("the loss is ", first + 1), std::string::npos) << result.printed;
}

// And not of the rank with the largest sum, which may just count more.
TEST_F(GuardTest, ASpikeIsOfTheRankWithTheLargestMean) {
  options_.guard = {.on_anomaly = "stop", .anomaly_window = 16};
  const Result result = TrainRanks([] {
    const auto line = FixedLine();
    const auto step = [line](data::Batch& batch, const StepContext& context) {
      const bool is_first = context.session.rank() == 0;
      const double usual = 1 + 0.01 * static_cast<double>(context.step % 2);
      const double mean = !is_first && context.step + 1 == 12 ? 60 : usual;
      const double count = is_first ? 100 : 1;
      return StepOutput{
          .loss = SumAndCount(line->forward(batch.input).sum() * 0 + mean * count, count)};
    };
    return TaskOf<data::Batch>("line", line, step);
  });
  ExpectStopped(result, "rank 1: step 12: the loss is ");
}

TEST_F(GuardTest, WhatRisesFromEqualValuesIsASpike) {
  options_.guard = {.on_anomaly = "stop", .anomaly_window = 16};
  const auto train = [&](double usual, double in_step_12) {
    NewFolder();
    return TrainRanks([=] {
      const auto line = FixedLine();
      const auto step = [=](data::Batch& batch, const StepContext& context) {
        const double mean = context.step + 1 == 12 ? in_step_12 : usual;
        return StepOutput{.loss = Mean(line->forward(batch.input).sum() * 0 + mean, 1)};
      };
      return TaskOf<data::Batch>("line", line, step);
    });
  };
  ExpectStopped(train(0, 0.001), "step 12: the loss is ");
  ExpectStopped(train(3, 3.001), "step 12: the loss is ");
  // The former is the rounding of a float32.
  for (const double other : {std::nextafter(3.F, 4.F), 2.F}) {
    const Result result = train(3, other);
    EXPECT_TRUE(result.status().ok()) << result.status();
  }
}

TEST(RecentValuesTest, HaveTheDeviationOfASample) {
  RecentValues recent(8);
  for (const double value : {1, 3, 5}) recent.Add(value);
  EXPECT_FALSE(recent.spread());
  recent.Add(7);
  EXPECT_EQ(recent.spread()->mean, 4);
  EXPECT_DOUBLE_EQ(recent.spread()->deviation, std::sqrt(20. / 3));
  for (int i = 0; i < 8; ++i) recent.Add(2);
  EXPECT_EQ(recent.spread()->mean, 2);
  EXPECT_EQ(recent.spread()->deviation, 0);
}

TEST_F(GuardTest, ARollBackNeedsACheckpoint) {
  options_.guard.on_anomaly = "rollback";
  const Result result = TrainRanks([] { return SpoiltNet(NaNIn({3})); });
  ExpectStopped(result, "there is no checkpoint before it");
  options_.checkpoint = {};
  const absl::Status status = Validate(options_);
  EXPECT_TRUE(StrContains(status.message(), "checkpoint.dir")) << status;
}

// Weights of before, and moments or an average of the steps that are abandoned, are no state of the
// run.
TEST_F(GuardTest, ARollBackNeedsAllComponentsInTheCheckpoint) {
  const auto train = [&] { return TrainRanks([] { return SpoiltNet(NaNIn({7})); }); };
  options_.guard.on_anomaly = "rollback";
  for (const std::string lacks : {"optimizer", "scheduler"}) {
    NewFolder();
    options_.checkpoint.save = {.save_optimizer = lacks != "optimizer",
                                .save_param_scheduler = lacks != "scheduler"};
    ExpectStopped(train(),
                  absl::StrCat("epoch_0_step_5.pt: the checkpoint has no key '", lacks, "'"));
  }
  // It may be of an earlier run, which had no average, or no guard.
  options_.checkpoint.save = {};
  options_.checkpoint.resume = "auto";
  for (const bool had_guard : {true, false}) {
    NewFolder();
    options_.guard.on_anomaly = had_guard ? "rollback" : "none";
    options_.ema.decay = 0;
    options_.stop_at_step = 5;
    ASSERT_TRUE(train().status().ok());
    options_.guard.on_anomaly = "rollback";
    options_.ema.decay = had_guard ? 0.9 : 0;
    options_.stop_at_step = 0;
    const Result result = train();
    if (had_guard) {
      ExpectStopped(result, "the checkpoint has no key 'ema'");
      continue;
    }
    ASSERT_TRUE(result.status().ok()) << result.status();
    EXPECT_TRUE(StrContains(result.printed, "rolled back without guard")) << result.printed;
  }
}

TEST_F(GuardTest, ACallbackEditsWhatARollBackLoads) {
  const auto train = [&] { return TrainRanks([] { return SpoiltNet(NaNIn({7})); }); };
  options_.guard.on_anomaly = "rollback";
  options_.max_steps = 8;
  options_.checkpoint.load.callback = [](State& state) {
    for (const auto& each : state.root.at("model").toGenericDict()) {
      each.setValue(at::full_like(each.value().toTensor(), 3));
    }
  };
  at::Tensor weight;  // one step after the checkpoint; the second time, one step from 3
  on_step_ = [&](int rank, int64_t step, const at::Tensor&) {
    if (rank == 0 && step == 6) weight = modules_[0]->parameters()[0].detach().clone();
    return StepAction::kContinue;
  };
  const Result edited = train();
  ASSERT_TRUE(edited.status().ok()) << edited.status();
  EXPECT_TRUE(weight.sub(3).abs().lt(0.1).all().item<bool>()) << weight;

  NewFolder();
  options_.checkpoint.load.callback = [](State& state) { (void)state.root.erase("optimizer"); };
  ExpectStopped(train(), "epoch_0_step_5.pt: the checkpoint has no key 'optimizer'");

  NewFolder();
  std::atomic<int> calls{0};
  options_.checkpoint.load.callback = [&](State&) {
    if (++calls == 2) throw std::runtime_error("it fails on one rank");
  };
  const Result failed = train();
  for (const absl::Status& status : failed.statuses) {
    EXPECT_TRUE(StrContains(status.message(), "callback after reading ")) << status;
    EXPECT_TRUE(StrContains(status.message(), "it fails on one rank")) << status;
  }
}

// What is left out is a place in the epoch's order, which another world cuts otherwise.
TEST_F(GuardTest, LeftOutExamplesHoldInAnotherWorld) {
  options_.guard.on_anomaly = "rollback";
  options_.checkpoint.resume = "auto";
  int times[2] = {};
  on_step_ = [&](int rank, int64_t step, const at::Tensor&) {
    const bool again = step == 11 && ++times[rank] == 2;
    return again ? StepAction::kStop : StepAction::kContinue;
  };
  // Step 12 has positions 352 to 383; the run stops when it comes to it for the second time.
  ASSERT_TRUE(TrainRanks([] { return SpoiltNet(NaNIn({12})); }).status().ok());
  std::vector<int64_t> told;
  on_step_ = [&](int, int64_t step, const at::Tensor&) {
    told.push_back(step);
    return step == 17 ? StepAction::kStop : StepAction::kContinue;
  };
  // Two steps of 16 examples are left out.
  const Result result = TrainRanks([] { return SpoiltNet(Healthy); }, 1);
  ASSERT_TRUE(result.status().ok()) << result.status();
  EXPECT_EQ(told, (std::vector<int64_t>{14, 15, 16, 17}));
}

TEST_F(GuardTest, AGanIsAsItWasBeforeTheStep) {
  options_.guard.on_anomaly = "skip";
  options_.checkpoint.every_steps = 1;
  options_.max_steps = 9;
  for (const int64_t stage : {0, 1, 2}) {
    for (const int64_t bad : {1, 6}) {
      SCOPED_TRACE(absl::StrCat("stage ", stage, " step ", bad));
      NewFolder();
      options_.zero.stage = stage;
      const Result result = TrainRanks([=] { return SpoiltGan(NaNIn({bad, 7})); });
      ASSERT_TRUE(result.status().ok()) << result.status();
      EXPECT_TRUE(StrContains(result.printed, absl::StrCat("step ", bad, ", phase 'generator'")))
          << result.printed;
      for (const int64_t step : {bad, int64_t{7}}) {
        if (step == 1) continue;
        const absl::Status same = SameBits(Load(step - 1), Load(step));
        EXPECT_TRUE(same.ok()) << same;
      }
      if (bad != 1) continue;
      // As if it had begun with step 2.
      const Gan fresh;
      const auto model = Load(1).root.at("model").toGenericDict();
      for (const auto& item : fresh.named_parameters()) {
        EXPECT_TRUE(at::equal(model.at(item.key()).toTensor(), item.value())) << item.key();
      }
      EXPECT_EQ(Load(1).root.at("optimizer").toGenericDict().at("state").toGenericDict().size(), 0);
    }
  }
}

// A step is undone after the optimizers of all phases but the last have stepped.
TEST_F(GuardTest, APhaseThatMayBeUndoneHasAKnownState) {
  options_.guard.on_anomaly = "skip";
  options_.checkpoint = {};
  const auto train = [&](size_t phase) {
    const Result result = TrainRanks([=] {
      Task task = SpoiltGan(NaNIn({3}));
      task.phases[phase].make_optimizer = &MakePlain;
      return task;
    });
    return result.status();
  };
  const absl::Status first = train(0), last = train(1);
  EXPECT_TRUE(StrContains(first.message(),
                          "phase 'judge': the optimizer of make_optimizer does not go with "
                          "guard.on_anomaly=skip in a phase before the last: the state of"))
      << first;
  EXPECT_TRUE(last.ok()) << last;
}

TEST_F(GuardTest, AGanThatRollsBackHasTheBitsOfOneThatSkips) {
  std::vector<std::vector<at::Tensor>> results;
  for (const std::string policy : {"skip", "rollback"}) {
    NewFolder();
    options_.guard.on_anomaly = policy;
    const Result result = TrainRanks([=] { return SpoiltGan(NaNIn({8, 24})); });
    ASSERT_TRUE(result.status().ok()) << result.status();
    EXPECT_EQ(StrContains(result.printed, "rolled back to "), policy == "rollback");
    results.push_back(result.tensors);
  }
  ExpectSameBits(results[0], results[1]);
}

TEST_F(GuardTest, RanksThatHaveRunOutTakePart) {
  options_.even_batches = false;
  examples_ = 641;  // in the last step of an epoch, the 21st, rank 0 alone has one
  options_.checkpoint.every_steps = 3;
  for (const int64_t stage : {0, 1, 2}) {
    options_.zero.stage = stage;
    std::vector<std::vector<at::Tensor>> results;
    for (const std::string policy : {"skip", "rollback"}) {
      NewFolder();
      options_.guard.on_anomaly = policy;
      const Result result = TrainRanks([] { return Spoilt(FixedLine(), NaNIn({4, 21, 22}, 0)); });
      ASSERT_TRUE(result.status().ok()) << result.status();
      EXPECT_TRUE(StrContains(result.printed, "rank 0: step 21")) << result.printed;
      results.push_back(result.tensors);
      ExpectSameBits(Copies(*modules_[0]), Copies(*modules_[1]));
    }
    ExpectSameBits(results[0], results[1]);
  }
}

TEST_F(GuardTest, AnOverflowThatTheScalerHandlesIsNoAnomaly) {
  options_.precision = "fp16";
  options_.grad_scaler.init_scale = 1e30;
  options_.guard.on_anomaly = "stop";
  options_.max_steps = 120;
  options_.epochs = 6;
  const Result result = TrainRanks([] { return SpoiltNet(Healthy); });
  ASSERT_TRUE(result.status().ok()) << result.status();
  // A loss that is not finite is none of the scale's.
  NewFolder();
  ExpectStopped(TrainRanks([] { return SpoiltNet(NaNIn({110})); }), "step 110: the loss is nan");
}

TEST_F(GuardTest, AGradientIsNamedWithItsRankAndParameter) {
  auto net_of = [](bool spike) {
    auto net = std::make_shared<Net>(0);
    return TaskOf<data::Batch>("net", net, [=](data::Batch& batch, const StepContext& context) {
      at::Tensor loss =
          torch::nn::functional::cross_entropy(net->forward(batch.input), batch.target);
      if (context.training && context.session.rank() == 1 && context.step + 1 == 12) {
        // 0 in any case, with a gradient that is NaN, or large.
        const at::Tensor& bias = net->out->bias;
        loss = loss + (spike ? (bias - bias.detach()).sum() * 1e4
                             : (bias - bias.detach()).abs().sqrt().sum());
      }
      return StepOutput{.loss = Mean(loss, batch.input.size(0))};
    });
  };
  options_.guard = {.on_anomaly = "stop", .anomaly_window = 16};
  Result result = TrainRanks([&] { return net_of(false); });
  ExpectStopped(result, "rank 1: step 12: a gradient is not finite: that of 'out.bias'; examples ");
  // In the first of two batches.
  NewFolder();
  options_.accumulate = 2;
  result = TrainRanks([&] {
    Task task = net_of(false);
    task.train_step = [step = task.train_step, last = std::make_shared<int64_t>(-1)](
                          data::AnyBatch& batch, const StepContext& context) {
      StepContext other = context;
      if (std::exchange(*last, context.step) == context.step) other.step = 0;
      return step(batch, other);
    };
    return task;
  });
  options_.accumulate = 1;
  ExpectStopped(result, "rank 1: step 12: a gradient is not finite: that of 'out.bias'; examples ");
  NewFolder();
  result = TrainRanks([&] { return net_of(true); });
  ExpectStopped(result, "rank 1: step 12: the norm of the gradients is ");
  ExpectStopped(result, " steps; its largest is that of 'out.bias'; examples ");
  NewFolder();
  options_.guard.anomaly_deviations = 0;
  result = TrainRanks([&] { return net_of(true); });
  EXPECT_TRUE(result.status().ok()) << result.status();
}

TEST_F(GuardTest, AReplicaWithAFlippedBitIsNamedAndRolledBack) {
  options_.check_agreement_every = 5;
  options_.checkpoint.every_steps = 3;
  options_.max_steps = 15;
  const Result healthy = TrainRanks([] { return SpoiltNet(Healthy); });
  ASSERT_TRUE(healthy.status().ok()) << healthy.status();
  std::atomic<bool> flipped;
  on_step_ = [&](int rank, int64_t step, const at::Tensor&) {
    if (rank != 1 || step != 7 || flipped.exchange(true)) return StepAction::kContinue;
    const at::Tensor weight = modules_[1]->named_parameters()["out.weight"].detach();
    weight.view(at::kInt).view(-1)[3].bitwise_xor_(1);
    return StepAction::kContinue;
  };
  for (const std::string policy : {"none", "stop", "skip", "rollback"}) {
    SCOPED_TRACE(policy);
    NewFolder();
    flipped = false;
    options_.guard.on_anomaly = policy;
    const Result result = TrainRanks([] { return SpoiltNet(Healthy); });
    const std::string message = "parameters after step 10: tensor 'out.weight'";
    if (policy != "rollback") {
      for (const absl::Status& status : result.statuses) {
        EXPECT_TRUE(StrContains(status.message(), message)) << status;
        EXPECT_TRUE(StrContains(status.message(), "rank 1 does not have rank 0's bits")) << status;
      }
      if (policy != "none") ExpectStopped(result, message);
      continue;
    }
    // The ranks were last known to agree after step 5.
    ASSERT_TRUE(result.status().ok()) << result.status();
    EXPECT_TRUE(StrContains(result.printed, message)) << result.printed;
    EXPECT_TRUE(StrContains(result.printed, "rolled back to ")) << result.printed;
    for (const int64_t step : {6, 9}) {
      EXPECT_TRUE(std::filesystem::exists(Checkpoint(0, step) + ".abandoned")) << step;
      EXPECT_TRUE(std::filesystem::exists(Checkpoint(0, step))) << step;  // saved again
    }
    ExpectSameBits(result.tensors, healthy.tensors);
  }
}

// They were last known to agree at the run's start, of which there is no checkpoint.
TEST_F(GuardTest, WithNothingToGoBackToNothingIsAbandoned) {
  options_.check_agreement_every = 10;
  options_.checkpoint.every_steps = 3;
  options_.guard.on_anomaly = "rollback";
  on_step_ = [&](int rank, int64_t step, const at::Tensor&) {
    if (rank != 1 || step != 7) return StepAction::kContinue;
    const at::Tensor weight = modules_[1]->named_parameters()["out.weight"].detach();
    weight.view(at::kInt).view(-1)[3].bitwise_xor_(1);
    return StepAction::kContinue;
  };
  const Result result = TrainRanks([] { return SpoiltNet(Healthy); });
  ExpectStopped(result, "there is no checkpoint before it to roll back to");
  for (const int64_t step : {3, 6, 9}) {
    EXPECT_TRUE(std::filesystem::exists(Checkpoint(0, step))) << step;
    EXPECT_FALSE(std::filesystem::exists(Checkpoint(0, step) + ".abandoned")) << step;
  }
}

// They were last known to agree after an epoch's last step, as the checkpoint of its end has them.
TEST_F(GuardTest, ReplicasThatAgreedAtAnEpochsEndGoOnFromThere) {
  options_.check_agreement_every = 10;
  options_.checkpoint.every_steps = 3;
  options_.guard.on_anomaly = "rollback";
  std::atomic<bool> flipped = false;
  on_step_ = [&](int rank, int64_t step, const at::Tensor&) {
    if (rank != 1 || step != 23 || flipped.exchange(true)) return StepAction::kContinue;
    const at::Tensor weight = modules_[1]->named_parameters()["out.weight"].detach();
    weight.view(at::kInt).view(-1)[3].bitwise_xor_(1);
    return StepAction::kContinue;
  };
  const Result result = TrainRanks([] { return SpoiltNet(Healthy); });
  ASSERT_TRUE(result.status().ok()) << result.status();
  EXPECT_TRUE(StrContains(result.printed, "parameters after step 30: tensor '")) << result.printed;
  const std::string path = options_.checkpoint.manager.directory + "/epoch_1.pt";
  EXPECT_TRUE(StrContains(result.printed, "rolled back to " + path)) << result.printed;
}

}  // namespace
}  // namespace ddp::trainer
