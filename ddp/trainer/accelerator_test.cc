// Loops of one's own: against Train, and against one process with all examples; stops and resumes.

#include "ddp/trainer/accelerator.h"

#include <atomic>
#include <chrono>
#include <filesystem>
#include <future>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ddp/collective_status.h"
#include "ddp/trainer/trainer_testing.h"
#include "gtest/gtest.h"

namespace ddp::trainer {
namespace {

using absl::StrContains;
using Weights = std::vector<at::Tensor>;

Weights Copies(const torch::nn::Module& module) {
  Weights copies;
  for (const at::Tensor& each : module.parameters()) copies.push_back(each.detach().clone());
  return copies;
}

void ExpectSameBits(const Weights& a, const Weights& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(at::equal(a[i], b[i])) << i << ": " << a[i] << " and " << b[i];
  }
}

// Whole numbers: sums of them are exact in any order.
class Integers : public data::Dataset {
 public:
  explicit Integers(int64_t n) : n_(n) {}
  int64_t size() const override { return n_; }
  data::Batch Get(absl::Span<const int64_t> indices) const override {
    const at::Tensor index =
        at::tensor(std::vector<int64_t>(indices.begin(), indices.end()), at::kFloat);
    return {at::stack({index.remainder(5) - 2, index.remainder(3)}, 1), index.remainder(4)};
  }

 private:
  int64_t n_;
};

SumAndCount CrossEntropySum(const at::Tensor& output, const at::Tensor& target) {
  namespace F = torch::nn::functional;
  return {F::cross_entropy(output, target, F::CrossEntropyFuncOptions().reduction(torch::kSum)),
          target.size(0)};
}

// Counts the steps that it has seen.
class Counter final : public checkpoint::Stateful {
 public:
  absl::StatusOr<checkpoint::State> state_dict() override {
    checkpoint::State state;
    state.root.insert("steps", steps);
    return state;
  }
  absl::Status CheckStateDict(const checkpoint::State&) const override { return absl::OkStatus(); }
  absl::Status load_state_dict(const checkpoint::State& state, checkpoint::LoadNotes&) override {
    steps = state.root.at("steps").toInt();
    return absl::OkStatus();
  }
  int64_t steps = 0;
};

// What Train does with a classifier of this loss. `stop`: asks for a stop before this step ends.
absl::StatusOr<Weights> Loop(const session::Session& session, const TrainerOptions& options,
                             std::shared_ptr<Net> net, int64_t stop = 0) {
  const Halves train(330), test(61);
  DDP_ASSIGN_OR_RETURN(auto accelerator, Accelerator::Create(session, "net", options));
  DDP_ASSIGN_OR_RETURN(auto loader, accelerator->PrepareLoader<data::Batch>(train));
  DDP_ASSIGN_OR_RETURN(auto model, accelerator->Prepare(net));
  DDP_ASSIGN_OR_RETURN(AcceleratedOptimizer * optimizer, accelerator->PrepareOptimizer(model));
  Counter counter;
  DDP_RETURN_IF_ERROR(
      accelerator->RegisterForCheckpointing({.name = "counter", .stateful = &counter}));
  const bool saves = !options.checkpoint.manager.directory.empty();
  if (saves) DDP_RETURN_IF_ERROR(accelerator->LoadState());
  while (accelerator->position().epoch < options.epochs) {
    net->train();
    while (true) {
      DDP_ASSIGN_OR_RETURN(std::optional<data::Batch> batch, loader->Next());
      if (!batch) break;
      const auto scope = accelerator->Accumulate();
      SumAndCount loss;
      {
        const Autocast autocast = accelerator->autocast();
        loss = CrossEntropySum(model->forward(batch->input), batch->target);
      }
      optimizer->backward(loss);
      if (options.clip_norm > 0) optimizer->clip_grad_norm_(options.clip_norm);
      optimizer->step();
      optimizer->zero_grad();
      if (accelerator->sync_gradients() && ++counter.steps == stop && session.rank() == 1) {
        accelerator->RequestStop("for a reason");
      }
      DDP_ASSIGN_OR_RETURN(const bool more, accelerator->GoOn());
      if (more) continue;
      EXPECT_EQ(counter.steps, accelerator->position().step);
      DDP_RETURN_IF_ERROR(accelerator->SaveAndEnd());
      EXPECT_EQ(accelerator->end().why, "for a reason");
      return Copies(*net);
    }
    EXPECT_EQ(counter.steps, accelerator->position().step);
    if (saves) DDP_RETURN_IF_ERROR(accelerator->SaveState());
  }
  DDP_RETURN_IF_ERROR(accelerator->End());
  accelerator->WaitForParameters();
  return Copies(*net);
}

class AcceleratorTest : public testing::Test {
 protected:
  AcceleratorTest()
      : folder_(absl::StrCat(testing::TempDir(), "/",
                             testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::remove_all(folder_);
    options_ = Quiet();
    options_.optimizer = {.name = "adamw", .lr = 0.01};
  }

  // Rank 0's result; the others have the same, but where one fails.
  absl::StatusOr<Weights> OnRanks(
      int world_size, const std::function<absl::StatusOr<Weights>(const session::Session&)>& body) {
    std::vector<absl::StatusOr<Weights>> all(world_size, absl::UnknownError("none"));
    RunRanks(world_size, [&](const session::Session& session) {
      absl::StatusOr<Weights> mine =
          CatchCollective("", [&]() -> absl::StatusOr<Weights> { return body(session); });
      const absl::Status shared = session.ShareFailure(mine.status());
      if (!shared.ok()) mine = shared;
      all[session.rank()] = std::move(mine);
    });
    for (const auto& mine : all) {
      EXPECT_EQ(mine.status().message(), all[0].status().message());
      if (all[0].ok() && mine.ok()) ExpectSameBits(*mine, *all[0]);
    }
    return all[0];
  }

  const std::string folder_;
  TrainerOptions options_;
};

TEST_F(AcceleratorTest, ALoopHasTheBitsOfTrainWithTheSameOptions) {
  const auto both = [&](const std::string& what) {
    SCOPED_TRACE(what);
    const auto own = OnRanks(2, [&](const session::Session& session) {
      return Loop(session, options_, std::make_shared<Net>(0));
    });
    ASSERT_TRUE(own.ok()) << own.status();
    const auto trained =
        OnRanks(2, [&](const session::Session& session) -> absl::StatusOr<Weights> {
          auto net = std::make_shared<Net>(0);
          const auto step = [net](data::Batch& batch, const StepContext&) {
            return StepOutput{.loss = CrossEntropySum(net->forward(batch.input), batch.target)};
          };
          const auto report = Train(session, TaskOf<data::Batch>("net", net, step), Halves(330),
                                    Halves(61), options_);
          DDP_RETURN_IF_ERROR(report.status());
          return Copies(*net);
        });
    ASSERT_TRUE(trained.ok()) << trained.status();
    ExpectSameBits(*own, *trained);
  };
  options_.accumulate = 3;
  options_.clip_norm = 0.5;
  options_.schedule.name = "cosine";
  both("replicated");
  options_.comm_hook.name = "bf16_compress";
  options_.drop_last = true;
  both("hook");
  options_.precision = "bf16";
  for (const int64_t stage : {1, 2}) {
    options_.zero.stage = stage;
    options_.zero.overlap_gather = true;
    both(absl::StrCat("zero ", stage));
  }
  options_ = Quiet();
  options_.precision = "fp16";
  both("fp16");
}

// 3 ranks with two batches each, of which some are shorter and some are missing.
TEST_F(AcceleratorTest, UnevenBatchesCountAsInOneProcess) {
  for (const int64_t n : {7, 10, 11, 12}) {
    for (const int64_t stage : {0, 1, 2}) {
      SCOPED_TRACE(absl::StrCat(n, " examples, stage ", stage));
      double losses[2] = {};
      const auto train = [&](const session::Session& session,
                             const TrainerOptions& options) -> absl::StatusOr<Weights> {
        const Integers train(n);
        torch::nn::Linear net(2, 1);
        {
          const at::NoGradGuard no_grad;
          for (at::Tensor& parameter : net->parameters()) parameter.fill_(1);
        }
        DDP_ASSIGN_OR_RETURN(auto accelerator, Accelerator::Create(session, "line", options));
        DDP_ASSIGN_OR_RETURN(auto loader, accelerator->PrepareLoader<data::Batch>(train));
        DDP_ASSIGN_OR_RETURN(auto model, accelerator->Prepare(net));
        DDP_ASSIGN_OR_RETURN(AcceleratedOptimizer * optimizer,
                             accelerator->PrepareOptimizer(model));
        int64_t steps = 0;
        while (true) {
          DDP_ASSIGN_OR_RETURN(std::optional<data::Batch> batch, loader->Next());
          if (!batch) break;
          const auto scope = accelerator->Accumulate();
          const at::Tensor errors =
              (model->forward(batch->input).squeeze(1) - batch->target).square();
          optimizer->backward({errors.sum(), errors.numel()});
          optimizer->step();
          optimizer->zero_grad();
          steps += accelerator->sync_gradients();
        }
        EXPECT_EQ(steps, 1);
        if (session.is_main()) losses[session.size() == 1] = optimizer->mean_loss();
        return Copies(*net);
      };
      TrainerOptions options = Quiet();
      options.optimizer = {.name = "sgd", .lr = 1, .momentum = 0.0};
      options.batch_size = n;
      const auto expected =
          OnRanks(1, [&](const session::Session& session) { return train(session, options); });
      ASSERT_TRUE(expected.ok()) << expected.status();
      options.batch_size = 2;
      options.accumulate = 2;
      options.even_batches = false;
      options.zero.stage = stage;
      const auto uneven =
          OnRanks(3, [&](const session::Session& session) { return train(session, options); });
      ASSERT_TRUE(uneven.ok()) << uneven.status();
      ExpectSameBits(*uneven, *expected);
      EXPECT_EQ(losses[0], losses[1]);
    }
  }
}

TEST_F(AcceleratorTest, AStoppedLoopGoesOnWithTheBitsOfOneThatWasNot) {
  options_.accumulate = 2;
  for (const std::string format : {"pt", "sharded"}) {
    for (const int64_t stage : {0, 2}) {
      SCOPED_TRACE(absl::StrCat(format, " ", stage));
      options_.zero.stage = stage;
      options_.checkpoint.async = stage == 2;
      options_.checkpoint.manager.format = format;
      options_.data_parallel.broadcast_buffers = stage == 0;
      const auto loop = [&](const std::string& name, int ranks, int64_t stop) {
        options_.checkpoint.manager.directory = absl::StrCat(folder_, "/", format, stage, name);
        return OnRanks(ranks, [&](const session::Session& session) {
          return Loop(session, options_, std::make_shared<Net>(0), stop);
        });
      };
      const auto whole = loop("whole", 2, 0);
      ASSERT_TRUE(whole.ok()) << whole.status();
      // Amid epochs, and at the end of one.
      for (const int64_t stop : {2, 6, 8}) {
        const auto stopped = loop("stopped", 2, stop);
        ASSERT_TRUE(stopped.ok()) << stopped.status();
      }
      const auto end = loop("stopped", 2, 0);
      ASSERT_TRUE(end.ok()) << end.status();
      ExpectSameBits(*end, *whole);
      // In other worlds.
      for (const auto& [ranks, stop] : {std::pair(2, 3), std::pair(3, 6), std::pair(1, 0)}) {
        const auto other = loop("other", ranks, stop);
        ASSERT_TRUE(other.ok()) << other.status();
      }
    }
  }
}

TEST_F(AcceleratorTest, AScheduleGoesOnWithTheLoop) {
  options_.schedule.name = "cosine";
  const auto loop = [&](const std::string& name, int64_t stop) {
    options_.checkpoint.manager.directory = absl::StrCat(folder_, "/", name);
    return OnRanks(2, [&](const session::Session& session) {
      return Loop(session, options_, std::make_shared<Net>(0), stop);
    });
  };
  const auto whole = loop("whole", 0);
  ASSERT_TRUE(whole.ok()) << whole.status();
  const auto stopped = loop("stopped", 5);
  ASSERT_TRUE(stopped.ok()) << stopped.status();
  const auto end = loop("stopped", 0);
  ASSERT_TRUE(end.ok()) << end.status();
  ExpectSameBits(*end, *whole);
}

// The rates of the next steps of a loop, which goes on with the run in the folder: so many epochs
// of two steps, or, without, so many steps without a loader.
std::vector<double> Rates(const TrainerOptions& options, int64_t epochs, int64_t steps = 0) {
  std::vector<double> rates;
  const auto body = [&](const session::Session& session) -> absl::Status {
    const Halves train(32);
    DDP_ASSIGN_OR_RETURN(auto accelerator, Accelerator::Create(session, "line", options));
    std::unique_ptr<ShardedLoaderOf<data::Batch>> loader;
    if (epochs > 0) {
      DDP_ASSIGN_OR_RETURN(loader, accelerator->PrepareLoader<data::Batch>(train));
    }
    DDP_ASSIGN_OR_RETURN(auto model, accelerator->Prepare(std::make_shared<Line>()));
    DDP_ASSIGN_OR_RETURN(AcceleratedOptimizer * optimizer, accelerator->PrepareOptimizer(model));
    DDP_RETURN_IF_ERROR(accelerator->LoadState());
    const auto step = [&] {
      const auto scope = accelerator->Accumulate();
      optimizer->backward(Mean(model->forward(at::ones({1, 2})).sum(), 1));
      optimizer->step();
      optimizer->zero_grad();
      rates.push_back(optimizer->lr());
    };
    for (int64_t i = 0; i < steps; ++i) step();
    for (int64_t i = 0; i < epochs; ++i) {
      while (true) {
        DDP_ASSIGN_OR_RETURN(const std::optional<data::Batch> batch, loader->Next());
        if (!batch) break;
        step();
      }
    }
    return accelerator->SaveAndEnd();
  };
  RunRanks(1, [&](const session::Session& session) {
    const absl::Status done = body(session);
    EXPECT_TRUE(done.ok()) << done;
  });
  return rates;
}

TEST_F(AcceleratorTest, AScheduleGoesOnInALoopWithoutALength) {
  options_.checkpoint.manager.directory = folder_ + "/run";
  options_.optimizer = {.name = "sgd", .lr = 1};
  options_.schedule.warmup_steps = 4;
  options_.lr_lambda = [](double progress, int64_t step) {
    EXPECT_EQ(progress, 0);
    return 1 / (1 + static_cast<double>(step));
  };
  EXPECT_EQ(Rates(options_, 0, 3), (std::vector<double>{0.25, 0.5, 0.75}));
  EXPECT_EQ(Rates(options_, 0, 3), (std::vector<double>{1, 1, 1. / 2}));
  EXPECT_EQ(Rates(options_, 0, 3), (std::vector<double>{1. / 3, 1. / 4, 1. / 5}));
}

TEST_F(AcceleratorTest, DecaysGoOnInALoopOfMoreEpochsThanTheOptionsHave) {
  options_.checkpoint.manager.directory = folder_ + "/run";
  options_.optimizer = {.name = "sgd", .lr = 1};
  options_.epochs = 1;
  options_.schedule = {.name = "step", .gamma = 0.5};
  EXPECT_EQ(Rates(options_, 2), (std::vector<double>{1, 1, 1. / 2, 1. / 2}));
  EXPECT_EQ(Rates(options_, 2), (std::vector<double>{1. / 4, 1. / 4, 1. / 8, 1. / 8}));
}

// As a generator's.
TEST_F(AcceleratorTest, AScheduleOfAnOptimizerThatStepsSeldomGoesOn) {
  options_.optimizer = {.name = "sgd", .lr = 0.1};
  options_.schedule.name = "cosine";
  options_.max_steps = 20;
  const auto train = [&](const std::string& name, int64_t stop) {
    options_.checkpoint.manager.directory = absl::StrCat(folder_, "/", name);
    options_.stop_at_step = stop;
    std::vector<double> rates;
    const auto result = OnRanks(2, [&](const session::Session& session) -> absl::StatusOr<Weights> {
      DDP_ASSIGN_OR_RETURN(auto accelerator, Accelerator::Create(session, "pair", options_));
      auto a = std::make_shared<Line>(), b = std::make_shared<Line>();
      DDP_ASSIGN_OR_RETURN(auto model_a, accelerator->Prepare(a));
      DDP_ASSIGN_OR_RETURN(auto model_b, accelerator->Prepare(b, "b"));
      DDP_ASSIGN_OR_RETURN(auto* of_a, accelerator->PrepareOptimizer(model_a));
      DDP_ASSIGN_OR_RETURN(auto* of_b, accelerator->PrepareOptimizer(model_b));
      DDP_RETURN_IF_ERROR(accelerator->LoadState());
      const auto step = [](auto& model, AcceleratedOptimizer& optimizer) {
        optimizer.backward(Mean(model.forward(at::ones({1, 2})).square().sum(), 1));
        optimizer.step();
        optimizer.zero_grad();
      };
      for (bool more = true; more;) {
        const auto scope = accelerator->Accumulate();
        step(*model_a, *of_a);
        if (accelerator->position().step % 4 == 3) {
          step(*model_b, *of_b);
          if (session.is_main()) rates.push_back(of_b->lr());
        }
        DDP_ASSIGN_OR_RETURN(more, accelerator->GoOn());
      }
      DDP_RETURN_IF_ERROR(accelerator->SaveAndEnd());
      return Copies(*b);
    });
    EXPECT_TRUE(result.ok()) << result.status();
    return rates;
  };
  const std::vector<double> whole = train("whole", 0);
  ASSERT_EQ(whole.size(), 5);
  std::vector<double> parts = train("parts", 10);
  for (const double rate : train("parts", 0)) parts.push_back(rate);
  EXPECT_EQ(parts, whole);
}

TEST_F(AcceleratorTest, WithoutAnEndOfTheSamplerNothingCountsEpochs) {
  const auto message = [&](const ScheduleOptions& schedule, int64_t max_steps) {
    TrainerOptions options = options_;
    options.schedule = schedule;
    options.max_steps = max_steps;
    options.sampler = data::InfiniteSampler(data::RandomSampler(10, 1).value()).value();
    std::string said;
    RunRanks(1, [&](const session::Session& session) {
      const Halves train(10);
      const auto accelerator = Accelerator::Create(session, "line", options);
      ASSERT_TRUE(accelerator.ok()) << accelerator.status();
      ASSERT_TRUE((*accelerator)->PrepareLoader<data::Batch>(train).ok());
      const auto model = (*accelerator)->Prepare(std::make_shared<Line>());
      ASSERT_TRUE(model.ok()) << model.status();
      said = (*accelerator)->PrepareOptimizer(*model).status().message();
    });
    return said;
  };
  for (const auto& [said, expected] : std::vector<std::pair<std::string, std::string>>{
           {message({.warmup_epochs = 1}, 50), "schedule.warmup_epochs=1 counts epochs"},
           {message({.name = "step"}, 50), "schedule.name=step decays by epochs"},
           {message({.name = "cosine"}, 0),
            "schedule.name=cosine depends on the length of the run, whose sampler has no end: set "
            "max_steps"}}) {
    EXPECT_TRUE(StrContains(said, expected)) << said;
  }
  EXPECT_EQ(message({.name = "cosine"}, 50), "");
  EXPECT_EQ(message({.warmup_steps = 5}, 0), "");
  EXPECT_EQ(message({.name = "plateau"}, 0), "");
}

// Without a loader, too: steps alone count.
TEST_F(AcceleratorTest, SeveralModelsHaveKeysOfTheirOwn) {
  options_.checkpoint.manager.directory = folder_ + "/run";
  const auto train = [&](int64_t steps) {
    return OnRanks(2, [&](const session::Session& session) -> absl::StatusOr<Weights> {
      TrainerOptions options = options_;
      options.max_steps = steps;
      DDP_ASSIGN_OR_RETURN(auto accelerator, Accelerator::Create(session, "pair", options));
      auto a = std::make_shared<Line>(), b = std::make_shared<Line>();
      DDP_ASSIGN_OR_RETURN(auto model_a, accelerator->Prepare(a));
      EXPECT_EQ(accelerator->Prepare(b).status().code(), absl::StatusCode::kAlreadyExists);
      DDP_ASSIGN_OR_RETURN(auto model_b, accelerator->Prepare(b, "b"));
      DDP_ASSIGN_OR_RETURN(auto* of_a, accelerator->PrepareOptimizer(model_a));
      const OptimizerOptions sgd = {.name = "sgd", .lr = 0.1};
      DDP_ASSIGN_OR_RETURN(auto* of_b, accelerator->PrepareOptimizer(model_b, sgd));
      DDP_RETURN_IF_ERROR(accelerator->LoadState());
      for (bool more = true; more;) {
        const auto scope = accelerator->Accumulate();
        const at::Tensor x = at::ones({session.rank() + 1, 2}) * accelerator->position().step;
        const at::Tensor first = (model_a->forward(x) - 1).square();
        of_a->backward({first.sum(), first.size(0)});
        of_a->step();
        of_a->zero_grad();
        const at::Tensor second = model_b->forward(x) - a->forward(x).detach();
        of_b->backward(Mean(second.square().mean(), x.size(0)));
        of_b->step();
        of_b->zero_grad();
        DDP_ASSIGN_OR_RETURN(more, accelerator->GoOn());
      }
      EXPECT_EQ(accelerator->position().step, steps);
      EXPECT_EQ(accelerator->end().reason, EndReason::kMaxSteps);
      DDP_RETURN_IF_ERROR(accelerator->SaveAndEnd());
      Weights all = Copies(*a);
      for (const at::Tensor& each : Copies(*b)) all.push_back(each);
      return all;
    });
  };
  torch::manual_seed(0);
  const auto first = train(3);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto state =
      checkpoint::Manager::Load(options_.checkpoint.manager.directory + "/step_3.pt");
  ASSERT_TRUE(state.ok()) << state.status();
  for (const char* key : {"model", "model.b", "optimizer", "optimizer.b", "scheduler.b"}) {
    EXPECT_TRUE(state->root.contains(key)) << key;
  }
  const auto stopped = train(7);
  ASSERT_TRUE(stopped.ok()) << stopped.status();
  std::filesystem::rename(options_.checkpoint.manager.directory, folder_ + "/first");
  std::filesystem::create_directories(options_.checkpoint.manager.directory);
  std::filesystem::copy(folder_ + "/first/step_3.pt",
                        options_.checkpoint.manager.directory + "/step_3.pt");
  const auto again = train(7);
  ASSERT_TRUE(again.ok()) << again.status();
  ExpectSameBits(*again, *stopped);
}

// Each part without the others; values of a user's own type, each example once.
TEST_F(AcceleratorTest, PartsWorkAlone) {
  options_.eval_batch_size = 4;
  options_.log.dir = folder_ + "/log";
  RunRanks(3, [&](const session::Session& session) {
    auto accelerator = Accelerator::Create(session, "parts", options_);
    ASSERT_TRUE(accelerator.ok()) << accelerator.status();
    for (const int64_t n : {2, 25}) {
      const Integers test(n);
      auto loader = (*accelerator)->EvaluationLoader<data::Batch>(test);
      ASSERT_TRUE(loader.ok()) << loader.status();
      std::vector<std::pair<std::vector<int64_t>, std::vector<std::string>>> names;
      // An evaluation that is left early.
      ASSERT_TRUE((*loader)->Next().ok());
      (*loader)->Restart();
      while (true) {
        const auto batch = (*loader)->Next();
        ASSERT_TRUE(batch.ok()) << batch.status();
        if (!*batch) break;
        std::vector<std::string> mine;
        for (const int64_t index : (*loader)->indices()) mine.push_back(absl::StrCat("n", index));
        names.emplace_back((*loader)->indices(), mine);
      }
      const auto all = (*accelerator)->GatherForMetrics(names);
      ASSERT_TRUE(all.ok()) << all.status();
      ASSERT_EQ(static_cast<int64_t>(all->size()), n);
      for (int64_t i = 0; i < n; ++i) EXPECT_EQ((*all)[i], absl::StrCat("n", i));
    }
    const auto logged = (*accelerator)->Log({{"test/size", 25}});
    EXPECT_TRUE(logged.ok()) << logged;
    EXPECT_TRUE(*(*accelerator)->GoOn());
    if (session.rank() == 2) (*accelerator)->RequestStop("enough");
    for (bool more = true; more;) {
      const auto scope = (*accelerator)->Accumulate();
      absl::SleepFor(absl::Milliseconds(1));  // a step
      more = *(*accelerator)->GoOn();
    }
    EXPECT_EQ((*accelerator)->end().why, "enough");
    EXPECT_TRUE((*accelerator)->SaveAndEnd().ok());  // there is no folder
  });
  EXPECT_EQ(Logged(options_.log.dir, "test/size").at(0), 25);
}

// A checkpoint has rank 0's buffers, and so has an evaluation; training goes on with each rank's.
TEST_F(AcceleratorTest, EachRankKeepsItsBuffers) {
  options_.checkpoint.manager.directory = folder_ + "/run";
  options_.data_parallel.broadcast_buffers = false;
  const auto result = OnRanks(2, [&](const session::Session& session) -> absl::StatusOr<Weights> {
    DDP_ASSIGN_OR_RETURN(auto accelerator, Accelerator::Create(session, "net", options_));
    const auto net = std::make_shared<Net>(0);
    DDP_RETURN_IF_ERROR(accelerator->Prepare(net).status());
    const at::Tensor mean = net->norm->running_mean;
    mean.fill_(1 + session.rank());
    DDP_RETURN_IF_ERROR(accelerator->SaveState());
    EXPECT_EQ(mean[0].item<float>(), 1 + session.rank());
    const Halves test(10);
    DDP_RETURN_IF_ERROR(accelerator->EvaluationLoader<data::Batch>(test).status());
    EXPECT_EQ(mean[0].item<float>(), 1);
    return Weights();
  });
  EXPECT_TRUE(result.ok()) << result.status();
}

TEST_F(AcceleratorTest, TheSmallestLimitOfAllRanksStops) {
  RunRanks(2, [&](const session::Session& session) {
    TrainerOptions options = options_;
    options.stop_at_step = session.rank() == 0 ? 5 : 3;
    const auto accelerator = Accelerator::Create(session, "steps", options);
    ASSERT_TRUE(accelerator.ok()) << accelerator.status();
    for (bool more = true; more;) {
      const auto scope = (*accelerator)->Accumulate();
      more = *(*accelerator)->GoOn();
    }
    EXPECT_EQ((*accelerator)->position().step, 3);
    EXPECT_TRUE((*accelerator)->End().ok());
  });
}

TEST_F(AcceleratorTest, ClipsByTheNormThatIsAskedForAndKnowsTheMeanLoss) {
  const auto result = OnRanks(2, [&](const session::Session& session) -> absl::StatusOr<Weights> {
    DDP_ASSIGN_OR_RETURN(auto accelerator, Accelerator::Create(session, "line", options_));
    const auto line = std::make_shared<Line>();
    DDP_ASSIGN_OR_RETURN(auto model, accelerator->Prepare(line));
    DDP_ASSIGN_OR_RETURN(AcceleratedOptimizer * optimizer, accelerator->PrepareOptimizer(model));
    const auto scope = accelerator->Accumulate();
    // Gradients of 3 (weights of x) and 1 (bias), twice each.
    const at::Tensor x = at::tensor({3.F, 0.F}).unsqueeze(0);
    const at::Tensor loss = model->forward(x).sum();
    optimizer->backward(SumAndCount(loss * 0 + loss - loss.detach() + 4. + 2. * session.rank(), 1));
    EXPECT_EQ(optimizer->clip_grad_norm_(100, std::numeric_limits<double>::infinity()), 3);
    optimizer->step();
    EXPECT_EQ(optimizer->mean_loss(), 5);
    return Copies(*line);
  });
  EXPECT_TRUE(result.ok()) << result.status();
}

TEST_F(AcceleratorTest, TheBestIsChosenByTheMetricsOfASave) {
  options_.checkpoint.manager.directory = folder_ + "/run";
  options_.checkpoint.manager.keep_best = "test/loss:min";
  options_.checkpoint.manager.keep_last = 1;
  const auto run = [&](const std::string& from, bool saves) {
    return OnRanks(2, [&](const session::Session& session) -> absl::StatusOr<Weights> {
      DDP_ASSIGN_OR_RETURN(auto accelerator, Accelerator::Create(session, "line", options_));
      const auto line = std::make_shared<Line>();
      DDP_RETURN_IF_ERROR(accelerator->Prepare(line).status());
      if (!from.empty()) {
        DDP_RETURN_IF_ERROR(accelerator->LoadState(from));
        { const auto scope = accelerator->Accumulate(); }
        if (saves) DDP_RETURN_IF_ERROR(accelerator->SaveState({{"test/loss", 9}}));
        return Copies(*line);
      }
      for (const double loss : {3, 1, 2}) {
        const at::NoGradGuard no_grad;
        for (at::Tensor& each : line->parameters()) each.fill_(loss);
        { const auto scope = accelerator->Accumulate(); }
        DDP_RETURN_IF_ERROR(accelerator->SaveState({{"test/loss", loss}}));
      }
      return Copies(*line);
    });
  };
  ASSERT_TRUE(run("", true).ok());
  const auto best = run("best", false);
  ASSERT_TRUE(best.ok()) << best.status();
  EXPECT_TRUE((*best)[0].eq(1).all().item<bool>()) << (*best)[0];
  // What comes after it would take the place of what the other steps have led to.
  const absl::Status older = run("best", true).status();
  EXPECT_TRUE(StrContains(older.message(), "step_3.pt); go on with them by LoadState")) << older;
  const absl::Status newest = run(folder_ + "/run/step_3.pt", true).status();
  EXPECT_TRUE(newest.ok()) << newest;
  options_.checkpoint.load.callback = [](checkpoint::State& state) {
    for (const auto& each : state.root.at("model").toGenericDict()) {
      each.setValue(at::full_like(each.value().toTensor(), 7));
    }
  };
  for (const char* from : {"auto", "best"}) {
    const auto edited = run(from, false);
    ASSERT_TRUE(edited.ok()) << edited.status();
    EXPECT_TRUE((*edited)[0].eq(7).all().item<bool>()) << (*edited)[0];
  }
  options_.checkpoint.load.callback = [](checkpoint::State&) { throw std::runtime_error("no"); };
  EXPECT_TRUE(StrContains(run("auto", false).status().message(), "callback after reading"));
}

TEST_F(AcceleratorTest, AFolderIsThatOfOneRun) {
  options_.log.dir = folder_ + "/log";
  const auto run = [&](bool loads) {
    absl::Status logged;
    RunRanks(1, [&](const session::Session& session) {
      const auto accelerator = Accelerator::Create(session, "one", options_);
      ASSERT_TRUE(accelerator.ok()) << accelerator.status();
      // At the same time.
      EXPECT_TRUE(StrContains(Accelerator::Create(session, "two", options_).status().message(),
                              "is written by another run"));
      if (loads) {
        ASSERT_TRUE((*accelerator)->LoadState().ok());
      }
      { const auto scope = (*accelerator)->Accumulate(); }
      logged = (*accelerator)->Log({{"train/x", 1}});
      EXPECT_TRUE((*accelerator)->SaveAndEnd().ok());
    });
    return logged;
  };
  EXPECT_TRUE(run(false).ok());
  const absl::Status mixed = run(false);
  EXPECT_EQ(mixed.code(), absl::StatusCode::kAlreadyExists);
  for (const char* words : {"log.dir=", "metrics.jsonl); go on with that run by LoadState, or "}) {
    EXPECT_TRUE(StrContains(mixed.message(), words)) << mixed;
  }
  options_.checkpoint.manager.directory = folder_ + "/log";
  for (int again = 0; again < 2; ++again) EXPECT_TRUE(run(true).ok());
  // What was not saved begins anew, the rest goes on.
  const auto logged = Logged(options_.log.dir, "train/x");
  EXPECT_EQ(logged.size(), 2u);
  EXPECT_TRUE(logged.contains(1) && logged.contains(2));
}

// The file has the state as it was, though it is written when the weights have changed.
TEST_F(AcceleratorTest, AnAsynchronousSaveIsWrittenWhileTheLoopGoesOn) {
  options_.checkpoint.async = true;
  for (const bool fails : {false, true}) {
    const std::string folder = absl::StrCat(folder_, "/", fails);
    options_.checkpoint.manager.directory = folder;
    std::promise<void> change;
    std::atomic<bool> waited = false;
    options_.checkpoint.save.callback = [&, changed = change.get_future().share()](auto&) {
      waited = changed.wait_for(std::chrono::minutes(1)) == std::future_status::ready;
      if (fails) throw std::runtime_error("the disk is gone");
    };
    const auto result = OnRanks(2, [&](const session::Session& session) -> absl::StatusOr<Weights> {
      DDP_ASSIGN_OR_RETURN(auto accelerator, Accelerator::Create(session, "net", options_));
      const auto net = std::make_shared<Net>(0);
      DDP_RETURN_IF_ERROR(accelerator->Prepare(net).status());
      const Weights before = Copies(*net);
      DDP_RETURN_IF_ERROR(accelerator->SaveState());
      {
        const at::NoGradGuard no_grad;
        for (at::Tensor& each : net->parameters()) each.fill_(7);
      }
      if (session.is_main()) change.set_value();
      DDP_RETURN_IF_ERROR(accelerator->End());
      accelerator.reset();  // the folder is free
      DDP_ASSIGN_OR_RETURN(accelerator, Accelerator::Create(session, "net", options_));
      DDP_RETURN_IF_ERROR(accelerator->Prepare(net).status());
      DDP_RETURN_IF_ERROR(accelerator->LoadState());
      ExpectSameBits(Copies(*net), before);
      return before;
    });
    EXPECT_TRUE(waited);
    EXPECT_EQ(result.ok(), !fails) << result.status();
    EXPECT_EQ(StrContains(result.status().message(), "the disk is gone"), fails) << result.status();
    EXPECT_EQ(std::filesystem::exists(folder + "/step_0.pt"), !fails);
  }
}

TEST_F(AcceleratorTest, ANewLoopBeginsWithTheWeightsOfACheckpoint) {
  const auto loop = [&](const TrainerOptions& options, double value, const std::string& name = "") {
    return OnRanks(2, [&](const session::Session& session) -> absl::StatusOr<Weights> {
      DDP_ASSIGN_OR_RETURN(auto accelerator, Accelerator::Create(session, "line", options));
      auto net = std::make_shared<Line>();
      {
        const at::NoGradGuard no_grad;
        for (at::Tensor& each : net->parameters()) each.fill_(value);
      }
      DDP_ASSIGN_OR_RETURN(auto model, accelerator->Prepare(net, name));
      const Weights begin = Copies(*net);
      DDP_ASSIGN_OR_RETURN(AcceleratedOptimizer * optimizer, accelerator->PrepareOptimizer(model));
      if (!options.checkpoint.manager.directory.empty()) {
        DDP_RETURN_IF_ERROR(accelerator->LoadState());
      }
      {
        const auto scope = accelerator->Accumulate();
        optimizer->backward(Mean(model->forward(at::ones({1, 2})).sum(), 1));
        optimizer->step();
      }
      DDP_RETURN_IF_ERROR(accelerator->SaveAndEnd());
      return begin;
    });
  };
  const auto value_of = [](const absl::StatusOr<Weights>& weights) {
    EXPECT_TRUE(weights.ok()) << weights.status();
    return weights.ok() ? (*weights)[0].mean().item<double>() : 0;
  };
  options_.checkpoint.manager.directory = folder_ + "/first";
  EXPECT_EQ(value_of(loop(options_, 3)), 3);
  options_.checkpoint.init_from = folder_ + "/first/step_1.pt";
  options_.checkpoint.manager.directory = folder_ + "/second";
  const double begin = value_of(loop(options_, 5));
  EXPECT_NEAR(begin, 3, 0.1);
  EXPECT_NE(begin, 3);  // after a step
  // Not where the run goes on: the file may be gone then.
  std::filesystem::remove(options_.checkpoint.init_from);
  EXPECT_EQ(value_of(loop(options_, 5)), 5);
  options_.checkpoint.manager.directory.clear();
  EXPECT_TRUE(StrContains(loop(options_, 5).status().message(), "/first/step_1.pt cannot be taken"))
      << loop(options_, 5).status();
  EXPECT_TRUE(StrContains(loop(options_, 5, "b").status().message(), "is one of several"));
}

TEST_F(AcceleratorTest, OptionsThatOnlyTrainFollowsAreRefused) {
  const auto message = [](const TrainerOptions& options) {
    std::string said;
    RunRanks(1, [&](const session::Session& session) {
      said = Accelerator::Create(session, "x", options).status().message();
    });
    return said;
  };
  TrainerOptions options = Quiet();
  options.ema.decay = 0.5;
  EXPECT_TRUE(StrContains(message(options), "ema.decay=0.5 is what Train does"))
      << message(options);
  options = Quiet();
  options.checkpoint.manager.directory = folder_;
  options.checkpoint.continuous = true;
  EXPECT_TRUE(StrContains(message(options), "checkpoint.continuous=true is what Train does"));
  options.checkpoint.continuous = false;
  options.checkpoint.every_steps = 100;
  EXPECT_TRUE(StrContains(message(options), "checkpoint.every_steps=100 is what Train does"));
  options.checkpoint.every_steps = 0;
  options.checkpoint.every = 2;
  EXPECT_TRUE(StrContains(message(options), "checkpoint.every=2 is what Train does"));
  options = Quiet();
  options.on_step = [](int64_t, const at::Tensor&) { return StepAction::kStop; };
  EXPECT_TRUE(StrContains(message(options), "on_step"));
  options = Quiet();
  options.batch_size = 0;
  EXPECT_TRUE(StrContains(message(options), "batch_size=0"));
}

TEST_F(AcceleratorTest, MistakesAreErrorsOfAllRanks) {
  const auto message =
      [&](const std::function<absl::Status(Accelerator&, const session::Session&)>& body) {
        const auto result =
            OnRanks(2, [&](const session::Session& session) -> absl::StatusOr<Weights> {
              DDP_ASSIGN_OR_RETURN(auto accelerator,
                                   Accelerator::Create(session, "line", options_));
              DDP_RETURN_IF_ERROR(body(*accelerator, session));
              return Weights();
            });
        EXPECT_FALSE(result.ok());
        return std::string(result.status().message());
      };
  options_.checkpoint.manager.directory = folder_ + "/run";
  options_.accumulate = 2;
  const auto step = [](Accelerator& accelerator, AcceleratedOptimizer& optimizer,
                       DistributedDataParallel<Line>& model) {
    const auto scope = accelerator.Accumulate();
    optimizer.backward(Mean(model.forward(at::ones({1, 2})).sum(), 1));
    optimizer.step();
    optimizer.zero_grad();
  };
  EXPECT_TRUE(StrContains(message([&](Accelerator& all, const session::Session& session) {
                            const auto model = *all.Prepare(std::make_shared<Line>());
                            AcceleratedOptimizer* optimizer = *all.PrepareOptimizer(model);
                            step(all, *optimizer, *model);
                            step(all, *optimizer, *model);
                            if (session.rank() == 1) return absl::DataLossError("broken");
                            step(all, *optimizer, *model);
                            step(all, *optimizer, *model);
                            return absl::OkStatus();
                          }),
                          "rank 1: broken"));
  EXPECT_TRUE(StrContains(message([&](Accelerator& all, const session::Session&) {
                            const auto model = *all.Prepare(std::make_shared<Line>());
                            step(all, **all.PrepareOptimizer(model), *model);
                            return all.SaveState();
                          }),
                          "SaveState amid a step"));
  EXPECT_TRUE(StrContains(message([&](Accelerator& all, const session::Session&) {
                            const auto model = *all.Prepare(std::make_shared<Line>());
                            AcceleratedOptimizer* optimizer = *all.PrepareOptimizer(model);
                            const auto scope = all.Accumulate();
                            const auto loss = [&] {
                              return model->forward(at::ones({1, 2})).sum();
                            };
                            optimizer->backward(Mean(loss(), 1));
                            optimizer->backward(Mean(loss(), 1));
                            return absl::OkStatus();
                          }),
                          "called twice for one batch"));
  EXPECT_TRUE(StrContains(message([&](Accelerator& all, const session::Session&) {
                            const auto model = *all.Prepare(std::make_shared<Line>());
                            AcceleratedOptimizer* optimizer = *all.PrepareOptimizer(model);
                            optimizer->backward(Mean(model->forward(at::ones({1, 2})).sum(), 1));
                            return absl::OkStatus();
                          }),
                          "belongs into a scope"));
  EXPECT_TRUE(StrContains(message([&](Accelerator& all, const session::Session&) {
                            const auto model = *all.Prepare(std::make_shared<Line>());
                            AcceleratedOptimizer* optimizer = *all.PrepareOptimizer(model);
                            for (int i = 0; i < 3; ++i) {
                              const auto scope = all.Accumulate();
                              optimizer->backward(Mean(model->forward(at::ones({1, 2})).sum(), 1));
                              optimizer->step();
                            }
                            return absl::OkStatus();
                          }),
                          "call zero_grad() of the prepared optimizer after its step()"));
  EXPECT_TRUE(StrContains(message([&](Accelerator& all, const session::Session&) {
                            const Halves train(64);
                            DDP_RETURN_IF_ERROR(all.PrepareLoader<data::Batch>(train).status());
                            return all.PrepareLoader<data::Batch>(train).status();
                          }),
                          "a training loader is prepared already"));
  EXPECT_TRUE(StrContains(message([&](Accelerator& all, const session::Session&) {
                            DDP_RETURN_IF_ERROR(all.SaveState());
                            return absl::AbortedError("saved");
                          }),
                          "saved"));
  EXPECT_TRUE(StrContains(
      message([&](Accelerator& all, const session::Session&) { return all.SaveState(); }),
      "go on with them by LoadState"));
  Counter counter;
  for (const auto& [name, words] : std::vector<std::pair<std::string, std::string>>{
           {"", "component '' has no name"},
           {"model", "component 'model' has the name of one of the trainer's"},
           {"\xff", "component '\\xff' has a name that is not UTF-8"}}) {
    const std::string said = message([&, name = name](Accelerator& all, const session::Session&) {
      return all.RegisterForCheckpointing({.name = name, .stateful = &counter});
    });
    EXPECT_TRUE(StrContains(said, words)) << said;
  }
  EXPECT_TRUE(StrContains(message([&](Accelerator& all, const session::Session&) {
                            return all.Prepare(std::make_shared<Line>(), "\xff").status();
                          }),
                          "model '\\xff' has a name that is not UTF-8"));
}

TEST_F(AcceleratorTest, ItsNameIsUtf8) {
  RunRanks(1, [&](const session::Session& session) {
    const absl::Status refused = Accelerator::Create(session, "\xff", options_).status();
    EXPECT_TRUE(StrContains(refused.message(), "task '\\xff' has a name that is not UTF-8"))
        << refused;
  });
}

}  // namespace
}  // namespace ddp::trainer
