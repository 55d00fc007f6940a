#include "ddp/trainer/optimizers.h"

#include <atomic>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/option_error.h"
#include "checkpoint/manager.h"
#include "ddp/trainer/trainer_testing.h"
#include "gtest/gtest.h"
#include "optim/fused.h"
#include "torch/optim/adagrad.h"
#include "torch/optim/lbfgs.h"
#include "torch/optim/rmsprop.h"

namespace ddp::trainer {
namespace {

// A program's own optimizer, with an option of its own: SGD that steps `times` as far.
struct FarOptions {
  double times = 1;
};
constexpr auto OptionsOf(const FarOptions&) {
  return Options(Option("times", &FarOptions::times, "factor of the step").AtLeast(0));
}

absl::StatusOr<optim::OptimizerFactory> MakeFar(const OptimizerOptions& options) {
  const auto own = options.implementations.Get<FarOptions>("far");
  return optim::FactoryOf<optim::FusedSGD>(torch::optim::SGDOptions(options.lr * own.times)
                                               .weight_decay(options.weight_decay)
                                               .momentum(0.9));
}

const Registration<OptimizerRegistry> kFar("far",
                                           OptimizerEntry{.make = &MakeFar,
                                                          .takes = {"weight_decay"},
                                                          .options = &AnyOptions::Of<FarOptions>});

const Registration<OptimizerRegistry> kPlain("plain",
                                             OptimizerEntry{.make = &MakePlain, .takes = {}});

// The options of the only group.
template <typename Options>
Options OptionsOfOptimizer(const OptimizerOptions& options) {
  auto all = GroupParameters(options, nullptr, {{"w", at::zeros({2}).requires_grad_()}});
  EXPECT_TRUE(all.ok()) << all.status();
  const auto optimizer = all->make(std::move(all->groups));
  EXPECT_EQ(optimizer->param_groups().size(), 1);
  return dynamic_cast<const Options&>(optimizer->param_groups()[0].options());
}

TEST(OptimizersTest, HaveTheOptionsThatTheyWereGiven) {
  OptimizerOptions options{.name = "sgd", .lr = 0.25, .momentum = 0.5, .weight_decay = 0.125};
  options.dampening = 0.75;
  const auto sgd = OptionsOfOptimizer<torch::optim::SGDOptions>(options);
  EXPECT_TRUE(sgd ==
              torch::optim::SGDOptions(0.25).momentum(0.5).weight_decay(0.125).dampening(0.75));
  options.dampening = 0;
  options.nesterov = true;
  EXPECT_TRUE(OptionsOfOptimizer<torch::optim::SGDOptions>(options).nesterov());

  options = {.name = "adam", .lr = 0.25, .weight_decay = 0.125};
  options.betas = {0.5, 0.75};
  options.eps = 1e-3;
  options.amsgrad = true;
  const auto adam = OptionsOfOptimizer<torch::optim::AdamOptions>(options);
  EXPECT_TRUE(adam == torch::optim::AdamOptions(0.25)
                          .weight_decay(0.125)
                          .betas(std::make_tuple(0.5, 0.75))
                          .eps(1e-3)
                          .amsgrad(true));
  options.name = "adamw";
  const auto adamw = OptionsOfOptimizer<torch::optim::AdamWOptions>(options);
  EXPECT_TRUE(adamw == torch::optim::AdamWOptions(0.25)
                           .weight_decay(0.125)
                           .betas(std::make_tuple(0.5, 0.75))
                           .eps(1e-3)
                           .amsgrad(true));

  options = {.name = "adagrad", .lr = 0.25, .weight_decay = 0.125};
  options.lr_decay = 0.5;
  options.initial_accumulator_value = 2;
  const auto adagrad = OptionsOfOptimizer<torch::optim::AdagradOptions>(options);
  EXPECT_TRUE(adagrad == torch::optim::AdagradOptions(0.25)
                             .weight_decay(0.125)
                             .lr_decay(0.5)
                             .initial_accumulator_value(2)
                             .eps(1e-10));

  options = {.name = "rmsprop", .lr = 0.25, .momentum = 0.5, .weight_decay = 0.125};
  options.alpha = 0.75;
  options.centered = true;
  const auto rmsprop = OptionsOfOptimizer<torch::optim::RMSpropOptions>(options);
  EXPECT_TRUE(
      rmsprop ==
      torch::optim::RMSpropOptions(0.25).weight_decay(0.125).momentum(0.5).alpha(0.75).centered(
          true));
}

TEST(OptimizersTest, WithoutOptionsTheyHaveTheirOwnDefaults) {
  EXPECT_EQ(OptionsOfOptimizer<torch::optim::SGDOptions>({.name = "sgd"}).momentum(), 0.9);
  EXPECT_EQ(OptionsOfOptimizer<torch::optim::RMSpropOptions>({.name = "rmsprop"}).momentum(), 0);
  EXPECT_TRUE(OptionsOfOptimizer<torch::optim::RMSpropOptions>({.name = "rmsprop", .lr = 0.01}) ==
              torch::optim::RMSpropOptions());
  EXPECT_TRUE(OptionsOfOptimizer<torch::optim::AdagradOptions>({.name = "adagrad", .lr = 0.01}) ==
              torch::optim::AdagradOptions());
  EXPECT_TRUE(OptionsOfOptimizer<torch::optim::AdamOptions>({.name = "adam", .lr = 0.001}) ==
              torch::optim::AdamOptions());
}

TEST(OptimizersTest, AProgramsOwnHasItsOwnOptions) {
  OptimizerOptions options{.name = "far", .lr = 0.25};
  options.implementations.Mutable<FarOptions>("far").times = 8;
  EXPECT_EQ(OptionsOfOptimizer<torch::optim::SGDOptions>(options).lr(), 2);
  options.momentum = 0.5;
  EXPECT_EQ(OptimizerOf(options).status().message(),
            "momentum=0.5 is no option of far, which has lr, weight_decay, far.times");
  options = {.name = "sgd"};
  options.implementations.Mutable<FarOptions>("far").times = 8;
  EXPECT_EQ(OptimizerOf(options).status().message(),
            "far.times=8 is no option of sgd, which has lr, momentum, weight_decay, dampening, "
            "nesterov");
}

TEST(OptimizersTest, OptionsOutOfRangeAreRefused) {
  for (const OptimizerOptions& options :
       {OptimizerOptions{.lr = -1}, OptimizerOptions{.momentum = -1},
        OptimizerOptions{.weight_decay = -1}}) {
    EXPECT_EQ(OptimizerOf(options).status().code(), absl::StatusCode::kInvalidArgument);
  }
  const absl::Status unknown = OptimizerOf({.name = "lion"}).status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(unknown.message(),
            "name=lion is none of adagrad, adam, adamw, far, plain, rmsprop, sgd");
  EXPECT_TRUE(absl::StrContains(OptimizerOf({.name = "lbfgs"}).status().message(), "by a closure"));
}

struct Refused {
  std::function<void(OptimizerOptions&)> set;
  std::string message;
};

TEST(OptimizersTest, WhatAnOptimizerDoesNotHaveIsRefusedByName) {
  for (const Refused& one : std::vector<Refused>{
           {[](auto& o) { o = {.name = "adam", .momentum = 0.5}; },
            "momentum=0.5 is no option of adam, which has lr, weight_decay, betas, eps, amsgrad"},
           {[](auto& o) { o = {.name = "adamw"}, o.nesterov = true; },
            "nesterov=true is no option"},
           {[](auto& o) {
              o.betas = {0.5, 0.5};
            },
            "betas=[0.5, 0.5] is no option of sgd"},
           {[](auto& o) { o.eps = 1e-8; }, "eps=1e-08 is no option of sgd"},
           {[](auto& o) { o = {.name = "adam"}, o.betas = {0.9}; }, "betas=[0.9] must be two"},
           {[](auto& o) {
              o = {.name = "adam"}, o.betas = {0.9, 1};
            },
            "betas=[0.9, 1] must be"},
           {[](auto& o) { o.nesterov = true, o.dampening = 0.1; }, "nesterov=true needs"},
           {[](auto& o) { o.nesterov = true, o.momentum = 0; }, "nesterov=true needs"},
           {[](auto& o) { o.alpha = 0.5; }, "alpha=0.5 is no option of sgd"}}) {
    OptimizerOptions options;
    one.set(options);
    const absl::Status refused = OptimizerOf(options).status();
    EXPECT_TRUE(absl::StartsWith(refused.message(), one.message)) << refused;
    EXPECT_TRUE(ProblemOf(refused).has_value());
  }
  // Configurations of runs that did not ask for it have this value.
  EXPECT_TRUE(OptimizerOf({.name = "adam", .momentum = 0.9}).ok());
}

// Groups by patterns.

NamedTensors Model() {
  NamedTensors parameters;
  for (const char* name : {"body.conv.weight", "body.conv.bias", "body.norm.weight",
                           "body.norm.bias", "head.weight", "head.bias"}) {
    const bool flat = !absl::EndsWith(name, "weight") || absl::StrContains(name, "norm");
    parameters.emplace_back(
        name, at::zeros(flat ? at::IntArrayRef{2} : at::IntArrayRef{2, 2}).requires_grad_());
  }
  return parameters;
}

// "lr/weight_decay: names" by group.
std::vector<std::string> GroupsOf(const OptimizerOptions& options) {
  auto all = GroupParameters(options, nullptr, Model());
  if (!all.ok()) return {std::string(all.status().message())};
  std::vector<std::string> found;
  size_t number = 0;
  const auto optimizer = all->make(std::move(all->groups));
  for (const auto& group : optimizer->param_groups()) {
    const auto& own = dynamic_cast<const torch::optim::SGDOptions&>(group.options());
    std::vector<std::string> names;
    for (size_t i = 0; i < group.params().size(); ++i) names.push_back(all->names[number++]);
    found.push_back(
        absl::StrCat(own.lr(), "/", own.weight_decay(), ": ", absl::StrJoin(names, " ")));
    EXPECT_EQ(own.momentum(), 0.5);
  }
  EXPECT_EQ(number, all->names.size());
  return found;
}

TEST(GroupsTest, TheFirstPatternThatMatchesCounts) {
  OptimizerOptions options{.lr = 0.5, .momentum = 0.5, .weight_decay = 0.25};
  const std::string everything =
      "body.conv.weight body.conv.bias body.norm.weight body.norm.bias head.weight head.bias";
  EXPECT_EQ(GroupsOf(options), (std::vector<std::string>{"0.5/0.25: " + everything}));
  options.groups = R"(bias|norm:weight_decay=0,^head\.:lr=0.125)";
  EXPECT_EQ(
      GroupsOf(options),
      (std::vector<std::string>{"0.5/0.25: body.conv.weight",
                                "0.5/0: body.conv.bias body.norm.weight body.norm.bias head.bias",
                                "0.125/0.25: head.weight"}));
  // Commas and colons of an expression, several keys, and no parameter left for the others.
  options.groups = R"((?:^head).{1,9}:lr_mult=0.5:weight_decay=1,.:lr=2)";
  EXPECT_EQ(GroupsOf(options),
            (std::vector<std::string>{
                "0.25/1: head.weight head.bias",
                "2/0.25: body.conv.weight body.conv.bias body.norm.weight body.norm.bias"}));
}

TEST(GroupsTest, NoDecayIsForWhatHasLessThanTwoDimensions) {
  OptimizerOptions options{.lr = 0.5, .momentum = 0.5, .weight_decay = 0.25};
  options.no_decay = true;
  EXPECT_EQ(GroupsOf(options),
            (std::vector<std::string>{
                "0.5/0.25: body.conv.weight head.weight",
                "0.5/0: body.conv.bias body.norm.weight body.norm.bias head.bias"}));
  options.groups = "^head:lr=1,conv:weight_decay=2";
  EXPECT_EQ(GroupsOf(options), (std::vector<std::string>{
                                   "0.5/0: body.norm.weight body.norm.bias", "1/0.25: head.weight",
                                   "1/0: head.bias", "0.5/2: body.conv.weight body.conv.bias"}));
}

TEST(GroupsTest, WhatCannotBeMeantIsRefusedByName) {
  for (const auto& [groups, message] : std::vector<std::pair<std::string, std::string>>{
           {"tail:lr=1",
            "has the pattern 'tail', which matches no trainable parameter; there are "
            "body.conv.weight, body.conv.bias"},
           {"head.weigth:lr=1", "matches no trainable parameter; did you mean head.weight"},
           {"head:lr=1,head.bias:lr=2", "'head.bias', but a pattern before it has taken all"},
           {"head", "is not of the form PATTERN:KEY=VALUE"},
           {"head:lr=1,", "has '', which is not of the form"},
           {":lr=1", "is not of the form"},
           {"head:momentun=1", "has the unknown key 'momentun' in 'head:momentun=1'; the keys are"},
           {"head:lr=fast", "whose lr is not"},
           {"head:lr=-1", "whose lr must be at least 0"},
           {"head:lr=1:lr=2", "gives lr twice"},
           {"head:lr=1:lr_mult=2", "gives lr and lr_mult"},
           {"he(ad:lr=1", "has no valid regular expression 'he(ad'"}}) {
    OptimizerOptions options;
    options.groups = groups;
    const absl::Status refused = GroupParameters(options, nullptr, Model()).status();
    EXPECT_TRUE(absl::StartsWith(refused.message(), absl::StrCat("groups=", groups, " ")))
        << refused;
    EXPECT_TRUE(absl::StrContains(refused.message(), message)) << refused;
  }
}

// Whole runs.

std::vector<at::Tensor> Trained(const TrainerOptions& options, int ranks = 2) {
  std::vector<at::Tensor> parameters;
  RunRanks(ranks, [&](const session::Session& session) {
    Task task = NetTask();
    auto report = Train(session, task, Halves(200), Halves(50), options);
    ASSERT_TRUE(report.ok()) << report.status();
    if (session.is_main()) parameters = task.module->parameters();
  });
  return parameters;
}

void ExpectEqual(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b,
                 const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << what << ", " << i;
}

TrainerOptions Grouped(const std::string& name) {
  TrainerOptions options = Quiet();
  options.optimizer = {.name = name, .lr = 0.05, .weight_decay = 0.1};
  options.optimizer.groups = R"(^out\.:lr=0.01,norm:lr_mult=2:weight_decay=0)";
  options.optimizer.no_decay = true;
  options.schedule.name = "cosine";
  return options;
}

TEST(RunsTest, WithGroupsEachStageGivesTheSameBits) {
  for (const std::string name : {"sgd", "adam", "adamw", "adagrad", "rmsprop", "far"}) {
    TrainerOptions options = Grouped(name);
    options.clip_norm = 0.5;
    const std::vector<at::Tensor> expected = Trained(options);
    for (const int64_t stage : {1, 2}) {
      options.zero.stage = stage;
      ExpectEqual(Trained(options), expected, absl::StrCat(name, ", stage ", stage));
    }
    options.zero.stage = 0;
    options.optimizer.groups = "";
    EXPECT_FALSE(at::equal(Trained(options)[0], expected[0])) << name;
  }
}

TEST(RunsTest, EachWayOfClippingIsTheSameInEachStage) {
  const std::vector<at::Tensor> unclipped = Trained(Grouped("sgd"));
  std::vector<std::vector<at::Tensor>> all = {unclipped};
  for (const std::string way : {"1", "2", "3.5", "inf", "value"}) {
    TrainerOptions options = Grouped("sgd");
    if (way == "value") {
      options.clip_value = 0.01;
    } else {
      options.clip_norm = 0.02;
      options.clip_norm_type = way;
    }
    const std::vector<at::Tensor> expected = Trained(options);
    for (const auto& before : all) EXPECT_FALSE(at::equal(before[0], expected[0])) << way;
    all.push_back(expected);
    for (const int64_t stage : {1, 2}) {
      options.zero.stage = stage;
      ExpectEqual(Trained(options), expected, absl::StrCat(way, ", stage ", stage));
    }
  }
}

// With a first step of SGD without momentum, what it changes is the clipped gradient.
TEST(RunsTest, ClippingLimitsWhatItSays) {
  for (const std::string way : {"1", "2", "inf", "value"}) {
    TrainerOptions options = Quiet();
    options.optimizer = {.name = "sgd", .lr = 1, .momentum = 0};
    options.max_steps = 1;
    (way == "value" ? options.clip_value : options.clip_norm) = 0.01;
    if (way != "value") options.clip_norm_type = way;
    std::vector<at::Tensor> moved;
    const std::vector<at::Tensor> before = NetTask().module->parameters();
    const std::vector<at::Tensor> after = Trained(options);
    for (size_t i = 0; i < before.size(); ++i) {
      moved.push_back((after[i] - before[i]).detach().flatten().to(at::kDouble));
    }
    const double p = way == "1" ? 1 : way == "2" ? 2 : std::numeric_limits<double>::infinity();
    EXPECT_NEAR(at::cat(moved).norm(p).item<double>(), 0.01, 1e-4) << way;
  }
}

TEST(RunsTest, AFactoryMakesAnyOptimizer) {
  TrainerOptions named = Grouped("adagrad");
  named.optimizer.initial_accumulator_value = 0.5;
  const std::vector<at::Tensor> expected = Trained(named);
  TrainerOptions own = Grouped("no such name");
  own.make_optimizer = [](const OptimizerOptions& options) {
    return optim::FactoryOf<torch::optim::Adagrad>(torch::optim::AdagradOptions(options.lr)
                                                       .weight_decay(options.weight_decay)
                                                       .initial_accumulator_value(0.5));
  };
  ExpectEqual(Trained(own), expected, "factory");
  own.zero.stage = 2;
  ExpectEqual(Trained(own), expected, "factory, stage 2");
  own.make_optimizer = [](const OptimizerOptions& options) {
    return optim::FactoryOf<torch::optim::LBFGS>(torch::optim::LBFGSOptions(options.lr));
  };
  EXPECT_TRUE(absl::StrContains(Validate(own).message(), "by a closure")) << Validate(own);
}

// Runs that keep no state of it train; the others end before their first step.
TEST(RunsTest, AStateThatIsNotKnownIsRefusedWhereItIsNeeded) {
  constexpr char kSaved[] =
      " does not go with checkpoints that have its state (checkpoint.save_optimizer): the state of "
      "this optimizer is not known: it is none of Adagrad, Adam, AdamW, RMSprop, SGD; register an "
      "OptimizerKind for it (optim/kind.h)";
  for (const int64_t stage : {0, 1, 2}) {
    SCOPED_TRACE(stage);
    std::atomic<int> steps = 0;
    TrainerOptions options = Quiet();
    options.optimizer = {.name = "plain", .lr = 0.05};
    options.zero.stage = stage;
    if (stage > 0) options.zero.partition = "tensor";
    options.on_step = [&](int64_t, const at::Tensor&) {
      ++steps;
      return StepAction::kContinue;
    };
    // Rank 0's message.
    const auto train = [&] {
      absl::Status status;
      RunRanks(2, [&](const session::Session& session) {
        const absl::Status own =
            Train(session, NetTask(), Halves(64), Halves(16), options).status();
        if (session.is_main()) status = own;
      });
      EXPECT_EQ(steps.exchange(0) > 0, status.ok()) << status;
      return std::string(status.message());
    };
    EXPECT_EQ(train(), "");
    const std::string folder = absl::StrCat(testing::TempDir(), "/unknown_state_", stage);
    std::filesystem::remove_all(folder);
    options.checkpoint.manager.directory = folder;
    const std::string by_name = train();
    EXPECT_TRUE(absl::StrContains(by_name, absl::StrCat("optimizer.name=plain", kSaved)))
        << by_name;
    EXPECT_FALSE(std::filesystem::exists(folder));
    options.optimizer.name = "sgd";
    options.make_optimizer = &MakePlain;
    const std::string made = train();
    EXPECT_TRUE(absl::StrContains(made, absl::StrCat("the optimizer of make_optimizer", kSaved)))
        << made;
    options.checkpoint.every = 0;  // nothing is saved
    EXPECT_EQ(train(), "");
    options.checkpoint.every = 1;
    options.checkpoint.save.save_optimizer = false;
    options.guard.on_anomaly = "rollback";
    const std::string rolled_back = train();
    EXPECT_TRUE(absl::StrContains(rolled_back, "does not go with guard.on_anomaly=rollback: "))
        << rolled_back;
    // The first part of a run, and the rest of it.
    options.guard.on_anomaly = "none";
    options.stop_at_step = 1;
    EXPECT_EQ(train(), "");
    options.stop_at_step = 0;
    options.checkpoint.resume = "auto";
    EXPECT_EQ(train(), "");
    const auto saved = checkpoint::Manager::Load(folder + "/epoch_2.pt");
    ASSERT_TRUE(saved.ok()) << saved.status();
    EXPECT_FALSE(saved->root.contains("optimizer"));
    EXPECT_TRUE(saved->root.contains("scheduler"));
  }
}

TEST(OptimizersTest, ThoseThatSquareComplexGradientsAreRefusedByName) {
  const std::vector<std::pair<std::string, at::Tensor>> parameters = {
      {"weight", at::ones({2}).requires_grad_()},
      {"phase", at::ones({2}, at::kComplexFloat).requires_grad_()}};
  const auto refused = [&](const std::string& name, const OptimizerMaker& maker) {
    return std::string(GroupParameters({.name = name}, maker, parameters).status().message());
  };
  for (const char* name : {"sgd", "adam", "adamw"}) EXPECT_EQ(refused(name, nullptr), "");
  for (const char* name : {"adagrad", "rmsprop"}) {
    const std::string message = refused(name, nullptr);
    EXPECT_TRUE(absl::StartsWith(message, absl::StrCat("name=", name, " squares"))) << message;
    EXPECT_TRUE(absl::StrContains(message, "'phase'")) << message;
    EXPECT_TRUE(absl::StrContains(message, "choose sgd, adam or adamw")) << message;
  }
  EXPECT_TRUE(absl::StartsWith(refused("sgd",
                                       [](const OptimizerOptions&) {
                                         return optim::FactoryOf<torch::optim::AdamW>(
                                             torch::optim::AdamWOptions(1));
                                       }),
                               "the optimizer squares"));
}

TEST(RunsTest, AComplexParameterHasNoLimitOfValues) {
  TrainerOptions options = Quiet();
  options.clip_value = 0.5;
  for (const int64_t world_size : {1, 2}) {
    RunRanks(world_size, [&](const session::Session& session) {
      Task task = LineTask();
      task.module->register_parameter("phase", at::ones({2}, at::kComplexFloat));
      const absl::Status refused = Train(session, task, Halves(20), Halves(20), options).status();
      EXPECT_TRUE(absl::StrContains(
          refused.message(),
          "clip_value=0.5 limits real numbers, and parameter 'phase' is complex; use clip_norm"))
          << refused;
    });
  }
}

// Of the same sizes and shapes: numbers would mean other parameters.
TEST(RunsTest, OtherGroupsThanThoseOfTheCheckpointAreRefusedByName) {
  for (const auto& [format, stage] : std::vector<std::pair<std::string, int64_t>>{
           {"pt", 0}, {"pt", 1}, {"sharded", 0}, {"sharded", 2}}) {
    SCOPED_TRACE(absl::StrCat(format, ", stage ", stage));
    TrainerOptions options = Grouped("adamw");
    options.zero.stage = stage;
    options.optimizer.no_decay = false;
    options.optimizer.groups = "^in.bias:lr=0.01";
    options.checkpoint.manager.directory =
        absl::StrCat(testing::TempDir(), "/other_groups_", format, stage);
    options.checkpoint.manager.format = format;
    options.checkpoint.resume = "auto";
    std::filesystem::remove_all(options.checkpoint.manager.directory);
    options.stop_at_step = 3;
    Trained(options);
    const auto refused = [&](const std::string& groups) {
      absl::Status status;
      options.optimizer.groups = groups;
      options.stop_at_step = 6;
      RunRanks(2, [&](const session::Session& session) {
        const absl::Status own =
            Train(session, NetTask(), Halves(200), Halves(50), options).status();
        if (session.is_main()) status = own;
      });
      return std::string(status.message());
    };
    const std::string swapped = refused("^norm.bias:lr=0.01");
    EXPECT_TRUE(absl::StrContains(swapped, "parameter group 0 of the checkpoint has ")) << swapped;
    EXPECT_TRUE(absl::StrContains(swapped, "norm.bias") || absl::StrContains(swapped, "in.bias"))
        << swapped;
    for (const std::string other : {"", "^in.bias:lr=0.01,norm:lr=0.02"}) {
      const std::string message = refused(other);
      EXPECT_TRUE(absl::StrContains(message, "groups")) << message;
      EXPECT_TRUE(absl::StrContains(message, "cannot resume from")) << message;
    }
    // The options of the same groups are the run's.
    EXPECT_EQ(refused("^in.bias:lr=0.02:weight_decay=0.5"), "");
  }
}

TEST(RunsTest, WhatContradictsItselfIsRefusedBeforeTheRun) {
  const auto refused = [](const std::function<void(TrainerOptions&)>& set) {
    TrainerOptions options = Quiet();
    set(options);
    return std::string(Validate(options).message());
  };
  EXPECT_EQ(refused([](auto& o) { o.clip_norm = 1, o.clip_value = 2; }),
            "clip_value=2 is given beside clip_norm=1: gradients are clipped by value or by norm, "
            "not by both");
  EXPECT_EQ(refused([](auto& o) { o.clip_norm_type = "inf"; }),
            "clip_norm_type=inf has no effect without clip_norm");
  for (const std::string type : {"0", "-1", "nan", "two", ""}) {
    EXPECT_EQ(refused([&](auto& o) { o.clip_norm = 1, o.clip_norm_type = type; }),
              absl::StrCat("clip_norm_type=", type,
                           " is neither a number above 0, the p of the p-norm, nor inf"));
  }
  EXPECT_EQ(refused([](auto& o) { o.optimizer = {.name = "adam", .momentum = 0.5}; }),
            "optimizer.momentum=0.5 is no option of adam, which has lr, weight_decay, betas, eps, "
            "amsgrad");
  EXPECT_TRUE(absl::StartsWith(refused([](auto& o) { o.optimizer.groups = "bias"; }),
                               "optimizer.groups=bias has 'bias', which is not of the form"));
  TrainerOptions options = Quiet();
  options.optimizer.groups = "tail:lr=1";
  RunRanks(2, [&](const session::Session& session) {
    const absl::Status failed =
        Train(session, LineTask(), Halves(20), Halves(20), options).status();
    EXPECT_TRUE(absl::StrContains(failed.message(), "optimizer.groups=tail:lr=1 has the pattern"))
        << failed;
    EXPECT_TRUE(absl::StrContains(failed.message(), "linear.weight, linear.bias")) << failed;
  });
}

}  // namespace
}  // namespace ddp::trainer
