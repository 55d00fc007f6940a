// Tasks of several phases, each with parameters, an optimizer and a loss of its own.

#include <atomic>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ddp/trainer/trainer_testing.h"
#include "gtest/gtest.h"
#include "torch/nn/modules/linear.h"
#include "torch/optim/sgd.h"

namespace ddp::trainer {
namespace {

// A toy of a GAN.
struct Gan : torch::nn::Module {
  Gan() {
    const at::NoGradGuard no_grad;
    for (at::Tensor& each : parameters()) {
      each.copy_(at::arange(each.numel(), at::kFloat).sin().div(2).view_as(each));
    }
  }
  at::Tensor Judge(const at::Tensor& x) { return judge->forward(features->forward(x).tanh()); }
  torch::nn::Linear generator{register_module("generator", torch::nn::Linear(2, 2))};
  torch::nn::Linear features{register_module("features", torch::nn::Linear(2, 6))};
  torch::nn::Linear judge{register_module("judge", torch::nn::Linear(6, 1))};
};

// It judges once: a parameter that is used twice under autocast is converted once or twice, since
// ranks as threads share torch's cache of conversions, which each of them empties; and the two
// differ by the rounding of gradients.
at::Tensor DiscriminatorLoss(Gan& gan, const at::Tensor& real) {
  const at::Tensor fake = gan.generator->forward(real.flip(1));
  const auto scores = gan.Judge(at::cat({real, fake})).chunk(2);
  return (scores[0] - 1).pow(2).sum() + scores[1].pow(2).sum();
}
at::Tensor GeneratorLoss(Gan& gan, const at::Tensor& real) {
  return (gan.Judge(gan.generator->forward(real.flip(1))) - 1).pow(2).sum();
}

Task GanTask() {
  auto gan = std::make_shared<Gan>();
  const auto checked = [gan](bool discriminates) {
    EXPECT_NE(gan->generator->weight.requires_grad(), discriminates);
    EXPECT_EQ(gan->judge->weight.requires_grad(), discriminates);
  };
  Task task;
  task.name = "gan";
  task.module = gan;
  task.phases = {
      {.name = "discriminator",
       .parameters = "(features|judge)\\..*",
       .train_step = StepOf<data::Batch>([=](data::Batch& batch, const StepContext& context) {
         if (context.training) checked(true);
         return StepOutput{
             .loss = SumAndCount(DiscriminatorLoss(*gan, batch.input), batch.input.size(0))};
       })},
      {.name = "generator",
       .parameters = "generator\\..*",
       .train_step = StepOf<data::Batch>([=](data::Batch& batch, const StepContext&) {
         checked(false);
         const at::Tensor loss = GeneratorLoss(*gan, batch.input);
         return StepOutput{.loss = SumAndCount(loss, batch.input.size(0))};
       }),
       .optimizer = OptimizerOptions{.name = "sgd", .lr = 0.25, .momentum = 0}}};
  return task;
}

TEST(PhasesTest, RanksAndMicroBatchesEqualALoopByHand) {
  TrainerOptions options = Quiet();
  options.epochs = 3;  // steps
  options.batch_size = 5;
  options.accumulate = 2;
  options.optimizer.lr = 0.5;
  options.optimizer.momentum = 0;
  const Halves data(24);  // batches of 5 and 3 on each rank
  Gan expected;
  std::vector<at::Tensor> of_generator = expected.generator->parameters(), of_judge;
  for (const auto& item : expected.named_parameters()) {
    if (!absl::StartsWith(item.key(), "generator")) of_judge.push_back(item.value());
  }
  std::vector<int64_t> indices(data.size());
  for (int64_t i = 0; i < data.size(); ++i) indices[i] = i;
  const at::Tensor real = data.Get(indices).input;
  for (int step = 0; step < 3; ++step) {
    for (const bool discriminates : {true, false}) {
      const at::Tensor loss =
          discriminates ? DiscriminatorLoss(expected, real) : GeneratorLoss(expected, real);
      expected.zero_grad();
      (loss / data.size()).backward();
      const at::NoGradGuard no_grad;
      for (at::Tensor& each : discriminates ? of_judge : of_generator) {
        each.sub_(each.grad(), discriminates ? 0.5 : 0.25);
      }
    }
  }
  for (const int64_t stage : {0, 1, 2}) {
    options.zero.stage = stage;
    RunRanks(3, [&](const session::Session& session) {
      const Task task = GanTask();
      const auto report = Train(session, task, data, data, options);
      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_EQ(report->steps, 3);
      for (const auto& item : task.module->named_parameters()) {
        EXPECT_TRUE(item.value().requires_grad());
        EXPECT_LT(RelativeDifference(item.value(), expected.named_parameters()[item.key()]), 1e-5)
            << item.key() << " stage " << stage;
      }
    });
  }
}

TEST(PhasesTest, AResumedRunHasTheBitsOfOneThatDidNotStop) {
  for (const int64_t stage : {0, 1, 2}) {
    for (const std::string precision : {"fp32", "fp16"}) {
      const Halves data(60);
      std::atomic<int64_t> steps;
      const auto train = [&](const std::string& name, int64_t stop, const std::string& resume) {
        TrainerOptions options = Quiet();
        CountSteps(options, steps);
        options.batch_size = 5;
        options.optimizer = {.name = "adam", .lr = 0.01};
        options.precision = precision;
        options.grad_scaler.init_scale = 1 << 18;  // the first steps are skipped
        options.clip_norm = 1;
        options.zero.stage = stage;
        options.checkpoint.manager.directory = testing::TempDir() + "/gan_" + name;
        options.checkpoint.resume = resume;
        options.stop_at_step = stop;
        options.log.dir = options.checkpoint.manager.directory + "/logs";
        options.log.every = 1;
        if (resume.empty()) std::filesystem::remove_all(options.checkpoint.manager.directory);
        std::vector<at::Tensor> parameters;
        RunRanks(3, [&](const session::Session& session) {
          Task task = GanTask();
          task.phases[1].optimizer = OptimizerOptions{.name = "adam", .lr = 0.02};
          task.phases[1].schedule = ScheduleOptions{.name = "cosine"};
          const auto report = Train(session, task, data, data, options);
          ASSERT_TRUE(report.ok()) << report.status();
          EXPECT_TRUE(report->unclaimed.empty());
          if (session.is_main()) parameters = task.module->parameters();
        });
        EXPECT_FALSE(Logged(options.log.dir, "train/loss.generator").empty());
        EXPECT_FALSE(Logged(options.log.dir, "train/lr.generator").empty());
        return parameters;
      };
      const auto whole = train("whole", 0, "");
      EXPECT_EQ(steps, 3 * 8);
      train("stopped", 3, "");
      const auto resumed = train("stopped", 0, "auto");
      EXPECT_EQ(steps, 3 * (8 - 3));
      ASSERT_EQ(resumed.size(), whole.size());
      for (size_t i = 0; i < whole.size(); ++i) {
        EXPECT_TRUE(at::equal(resumed[i], whole[i])) << i << " " << stage << precision;
      }
    }
  }
}

// A run that has failed in one phase leaves the parameters of the others as they were.
TEST(PhasesTest, AfterAFailureEachParameterRequiresAGradientAgain) {
  enum Failure { kException, kLossWithoutGradient };
  for (const size_t number : {0, 1}) {
    for (const Failure failure : {kException, kLossWithoutGradient}) {
      RunRanks(1, [&, failure = failure](const session::Session& session) {
        Task task = GanTask();
        const auto sound = task.phases[number].train_step;
        task.phases[number].train_step = [&](data::AnyBatch& batch, const StepContext& context) {
          TORCH_CHECK(failure != kException, "broken");
          StepOutput output = sound(batch, context);
          output.loss = SumAndCount(output.loss.value().detach(), output.loss.count());
          return output;
        };
        const absl::Status failed = Train(session, task, Halves(64), Halves(64), Quiet()).status();
        EXPECT_TRUE(absl::StrContains(failed.message(),
                                      failure == kException ? "broken" : "has no gradient"))
            << failed;
        for (const auto& item : task.module->named_parameters()) {
          EXPECT_TRUE(item.value().requires_grad()) << item.key() << " after phase " << number;
        }
        task.phases[number].train_step = sound;
        const absl::Status again = Train(session, task, Halves(64), Halves(64), Quiet()).status();
        EXPECT_TRUE(again.ok()) << again;
      });
    }
  }
}

// What no option says: of the program's own phases, optimizers and schedules.
TEST(PhasesTest, RanksWithOtherOptimizersAreAnErrorThatNamesThem) {
  using Sgd = torch::optim::SGDOptions;
  const auto sgd = [](const Sgd& options) -> OptimizerMaker {
    return
        [options](const OptimizerOptions&) { return optim::FactoryOf<torch::optim::SGD>(options); };
  };
  // By `rank`, and what rank 0 then says.
  struct Case {
    std::string message;
    std::function<void(Task& task, TrainerOptions& options, int rank)> spoil;
  };
  const std::vector<Case> cases = {
      {"generator.optimizer.lr=0.25 is not the same on all ranks: rank 0 has 0.25, rank 1 has 0.5",
       [](Task& task, TrainerOptions&, int rank) {
         task.phases[1].optimizer->lr = rank == 0 ? 0.25 : 0.5;
       }},
      {"generator.optimizer.kind=SGD is not the same on all ranks: rank 0 has SGD, rank 1 has Adam",
       [](Task& task, TrainerOptions&, int rank) {
         if (rank == 1) task.phases[1].optimizer = OptimizerOptions{.name = "adam", .lr = 0.25};
       }},
      {"generator.optimizer.group_1.weight_decay=0 is not the same on all ranks",
       [](Task& task, TrainerOptions&, int rank) {
         task.phases[1].optimizer->groups = rank == 0 ? "bias:lr=1" : "bias:lr=1:weight_decay=0.5";
       }},
      {"generator.schedule.name=constant is not the same on all ranks",
       [](Task& task, TrainerOptions&, int rank) {
         if (rank == 1) task.phases[1].schedule = ScheduleOptions{.name = "cosine"};
       }},
      {"discriminator.optimizer.lr=0.5 is not the same on all ranks",
       [&](Task& task, TrainerOptions&, int rank) {
         task.phases[0].make_optimizer = sgd(Sgd(rank == 0 ? 0.5 : 0.25));
       }},
      {"discriminator.optimizer.momentum=0 is not the same on all ranks",
       [&](Task&, TrainerOptions& options, int rank) {
         options.make_optimizer = sgd(Sgd(0.5).momentum(rank == 0 ? 0 : 0.5));
       }},
      {"discriminator.schedule.factors=1, 1, 1, 1, 1 is not the same on all ranks",
       [](Task&, TrainerOptions& options, int rank) {
         options.lr_lambda = [rank](double progress, int64_t) {
           return rank == 0 ? 1 : 1 - progress;
         };
       }}};
  for (const int64_t stage : {0, 1}) {
    for (const Case& each : cases) {
      RunRanks(2, [&](const session::Session& session) {
        Task task = GanTask();
        TrainerOptions options = Quiet();
        options.zero.stage = stage;
        each.spoil(task, options, session.rank());
        const absl::Status status = Train(session, task, Halves(64), Halves(64), options).status();
        EXPECT_TRUE(absl::StrContains(status.message(), each.message))
            << each.message << ", stage " << stage << ": " << status;
      });
    }
  }
}

TEST(PhasesTest, EachParameterIsInOnePhase) {
  const std::map<std::string, std::function<void(Task&, TrainerOptions&)>> bad = {
      {"'features.weight' is in no phase",
       [](Task& task, auto&) { task.phases[0].parameters = "judge.*"; }},
      {"'judge.weight' is in the phases discriminator and generator",
       [](Task& task, auto&) { task.phases[1].parameters = "generator.*|judge.*"; }},
      {"no regular expression", [](Task& task, auto&) { task.phases[0].parameters = "(judge"; }},
      {"two phases named 'discriminator'",
       [](Task& task, auto&) { task.phases[1].name = "discriminator"; }},
      {"the name of phase 'a/b'", [](Task& task, auto&) { task.phases[1].name = "a/b"; }},
      {"needs a module, and either a train_step",
       [](Task& task, auto&) { task.phases[1].train_step = nullptr; }},
      {"even_batches=false does not go with a task of several phases",
       [](Task&, TrainerOptions& options) { options.even_batches = false; }}};
  for (const auto& [message, spoil] : bad) {
    RunRanks(2, [&, message = message, spoil = spoil](const session::Session& session) {
      Task task = GanTask();
      TrainerOptions options = Quiet();
      spoil(task, options);
      const absl::Status status = Train(session, task, Halves(64), Halves(64), options).status();
      EXPECT_TRUE(absl::StrContains(status.message(), message)) << status;
    });
  }
}

}  // namespace
}  // namespace ddp::trainer
