#include "optim/state_dict.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"

namespace ddp::optim {
namespace {

using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGD;
using torch::optim::SGDOptions;

struct Parameters {
  Parameters() {
    torch::manual_seed(1);
    for (auto& tensor : all) tensor = torch::randn({3, 2}).requires_grad_();
  }
  std::vector<OptimizerParamGroup> Groups() const {
    return {OptimizerParamGroup({all[0], all[1]}), OptimizerParamGroup({all[2]})};
  }
  // The gradient is a function of the parameters alone.
  void Step(Optimizer& optimizer) {
    optimizer.zero_grad();
    torch::Tensor loss = torch::zeros({});
    for (const auto& tensor : all) loss = loss + (tensor * tensor * tensor).sum();
    loss.backward();
    optimizer.step();
  }
  torch::Tensor all[3];
};

struct Case {
  std::string name;
  std::function<std::unique_ptr<Optimizer>(const Parameters&)> make;
};

std::vector<Case> Cases() {
  return {
      {"sgd", [](const auto& p) { return std::make_unique<SGD>(p.Groups(), SGDOptions(0.01)); }},
      {"momentum",
       [](const auto& p) {
         return std::make_unique<SGD>(
             p.Groups(), SGDOptions(0.01).momentum(0.9).weight_decay(0.1).nesterov(true));
       }},
      {"adam", [](const auto& p) { return std::make_unique<Adam>(p.Groups(), AdamOptions(0.01)); }},
      {"amsgrad",
       [](const auto& p) {
         return std::make_unique<Adam>(p.Groups(),
                                       AdamOptions(0.01).amsgrad(true).betas({0.8, 0.9}).eps(1e-6));
       }},
      {"adamw",
       [](const auto& p) { return std::make_unique<AdamW>(p.Groups(), AdamWOptions(0.01)); }},
      {"adagrad",
       [](const auto& p) {
         return std::make_unique<torch::optim::Adagrad>(
             p.Groups(), torch::optim::AdagradOptions(0.01).lr_decay(0.1));
       }},
      {"rmsprop",
       [](const auto& p) {
         return std::make_unique<torch::optim::RMSprop>(p.Groups(),
                                                        torch::optim::RMSpropOptions(0.01));
       }},
      {"rmsprop_centered",
       [](const auto& p) {
         return std::make_unique<torch::optim::RMSprop>(
             p.Groups(), torch::optim::RMSpropOptions(0.01).momentum(0.9).centered(true));
       }},
  };
}

class OptimizerStateTest : public testing::TestWithParam<Case> {};

TEST_P(OptimizerStateTest, ContinuesBitForBit) {
  Parameters one, two;
  auto first = GetParam().make(one);
  first->param_groups()[1].options().set_lr(0.5);
  for (int i = 0; i < 3; ++i) one.Step(*first);

  // Another optimizer, with other options, in other memory.
  auto second = GetParam().make(two);
  two.Step(*second);
  for (int i = 0; i < 3; ++i) two.all[i].data().copy_(one.all[i].data());
  const auto state = OptimizerState(*first);
  ASSERT_TRUE(state.ok()) << state.status();
  torch::optim::OptimizerOptions& options = second->param_groups()[1].options();
  const double rate = options.get_lr();
  EXPECT_TRUE(CheckOptimizerState(*second, *state).ok());
  EXPECT_EQ(options.get_lr(), rate);
  const absl::Status loaded = LoadOptimizerState(*second, *state);
  ASSERT_TRUE(loaded.ok()) << loaded;
  EXPECT_EQ(second->param_groups()[1].options().get_lr(), 0.5);
  EXPECT_EQ(&second->param_groups()[1].options(), &options);  // a schedule's reference stays valid
  for (int i = 0; i < 3; ++i) {
    one.Step(*first);
    two.Step(*second);
    for (int k = 0; k < 3; ++k) EXPECT_TRUE(torch::equal(one.all[k], two.all[k])) << i << " " << k;
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, OptimizerStateTest, testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });

std::string Keys(const c10::impl::GenericDict& dict) {
  std::string keys;
  for (const auto& entry : dict) keys += entry.key().toStringRef() + " ";
  return keys;
}

TEST(OptimizerStateLayoutTest, KeysAreThoseOfPython) {
  Parameters parameters;
  SGD sgd(parameters.Groups(), SGDOptions(0.1).momentum(0.9));
  AdamW adamw(parameters.Groups(), AdamWOptions(0.1));
  parameters.Step(sgd);
  parameters.Step(adamw);
  const auto sgd_state = OptimizerState(sgd).value();
  const auto groups = sgd_state.at("param_groups").toListRef().vec();
  EXPECT_EQ(Keys(groups[0].toGenericDict()),
            "lr momentum dampening weight_decay nesterov maximize foreach differentiable fused "
            "params ");
  EXPECT_EQ(groups[1].toGenericDict().at("params").toListRef()[0].toInt(), 2);
  EXPECT_EQ(sgd_state.at("state").toGenericDict().size(), 3u);
  const auto adamw_state = OptimizerState(adamw).value();
  EXPECT_EQ(Keys(adamw_state.at("param_groups").toListRef()[0].toGenericDict()),
            "lr betas eps weight_decay amsgrad maximize foreach capturable differentiable fused "
            "decoupled_weight_decay params ");
  const auto first = adamw_state.at("state").toGenericDict().at(int64_t{0}).toGenericDict();
  EXPECT_EQ(Keys(first), "step exp_avg exp_avg_sq ");
  EXPECT_EQ(first.at("step").toTensor().scalar_type(), torch::kFloat);
  EXPECT_EQ(first.at("step").toTensor().dim(), 0);
}

// The status of loading `state` into `optimizer`, which must not change by it.
absl::Status Refused(Optimizer& optimizer, const c10::IValue& state) {
  const double lr = optimizer.param_groups()[0].options().get_lr();
  const size_t states = optimizer.state().size();
  const absl::Status status = LoadOptimizerState(optimizer, state);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), lr);
  EXPECT_EQ(optimizer.state().size(), states);
  EXPECT_EQ(CheckOptimizerState(optimizer, state), status);
  return status;
}

TEST(OptimizerStateMismatchTest, SaysWhatDiffers) {
  Parameters p;
  SGD sgd(p.Groups(), SGDOptions(0.1).momentum(0.9));
  Adam adam(p.Groups(), AdamOptions(0.2));
  AdamW adamw(p.Groups(), AdamWOptions(0.3));
  p.Step(sgd);
  p.Step(adam);
  p.Step(adamw);
  const auto adam_state = OptimizerState(adam).value();
  const auto says = [](const absl::Status& status, absl::string_view what) {
    EXPECT_TRUE(absl::StrContains(status.message(), what)) << status;
  };
  says(Refused(sgd, adam_state), "written by Adam, but the optimizer is SGD");
  says(Refused(adamw, adam_state), "written by Adam, but the optimizer is AdamW");
  says(Refused(adam, OptimizerState(sgd).value()), "written by SGD, but the optimizer is Adam");
  says(Refused(adam, c10::IValue(3)), "need a dict");

  Adam one_group(std::vector<torch::Tensor>{p.all[0]}, AdamOptions(0.4));
  says(Refused(one_group, adam_state), "it has 2 parameter groups, the optimizer 1");
  Adam fewer({OptimizerParamGroup({p.all[0]}), OptimizerParamGroup({p.all[2]})}, AdamOptions(0.4));
  says(Refused(fewer, adam_state), "parameter group 0: optimizer state: it has 2 parameters");
  const torch::Tensor other = torch::zeros({4}).requires_grad_();
  Adam reshaped({OptimizerParamGroup({p.all[0], p.all[1]}), OptimizerParamGroup({other})},
                AdamOptions(0.4));
  says(Refused(reshaped, adam_state), "'exp_avg' has shape [3, 2], the parameter [4]");
  says(Refused(reshaped, adam_state), "parameter 2");

  // The only parameter of group 1, by its number in the state.
  const auto numbered = [&](const c10::IValue& number) {
    const auto state = OptimizerState(adam).value();
    c10::impl::GenericList numbers(c10::AnyType::get());
    numbers.push_back(number);
    auto group = state.at("param_groups").toListRef()[1].toGenericDict();
    group.insert_or_assign("params", numbers);
    return state;
  };
  for (const c10::IValue& number : {c10::IValue(1), c10::IValue("2")}) {
    says(Refused(adam, numbered(number)), "parameter group 1");
    says(Refused(adam, numbered(number)), "'params' are not different integers");
  }
  const auto of_another = OptimizerState(adam).value();
  auto states = of_another.at("state").toGenericDict();
  states.insert(int64_t{7}, NewDict());
  says(Refused(adam, of_another), "state of parameter 7, which no group has");
}

TEST(OptimizerStateMismatchTest, RefusesWhatWouldTrainDifferently) {
  Parameters p;
  SGD sgd(p.Groups(), SGDOptions(0.1).momentum(0.9));
  auto state = OptimizerState(sgd).value();
  auto group = state.at("param_groups").toListRef()[1].toGenericDict();
  group.insert("initial_lr", 0.1);  // a scheduler's: no concern of ours
  EXPECT_TRUE(LoadOptimizerState(sgd, state).ok());
  group.insert_or_assign("maximize", true);
  EXPECT_TRUE(absl::StrContains(Refused(sgd, state).message(), "maximize"));
  (void)group.erase("lr");
  group.insert_or_assign("maximize", false);
  EXPECT_TRUE(absl::StrContains(Refused(sgd, state).message(), "no key 'lr'"));

  torch::optim::LBFGS lbfgs({p.all[0]}, torch::optim::LBFGSOptions(0.1));
  const absl::Status unknown = OptimizerState(lbfgs).status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(unknown.message(), "Adagrad, Adam, AdamW, RMSprop, SGD"));
}

TEST(ParameterNamesTest, NamesBecomeNumbersAgain) {
  Parameters p;
  Adam adam(p.Groups(), AdamOptions(0.01));
  p.Step(adam);
  const Dict saved = OptimizerState(adam).value();
  const Dict named = WithNames(saved, {"a", "b.weight", "c"});
  const auto params_of = [](const Dict& state, size_t group) {
    return state.at("param_groups").toListRef()[group].toGenericDict().at("params").toListRef();
  };
  EXPECT_EQ(params_of(named, 0)[1].toStringRef(), "b.weight");
  EXPECT_EQ(params_of(saved, 0)[1].toInt(), 1) << "the original is as it was";
  EXPECT_TRUE(named.at("state").toGenericDict().contains("b.weight"));

  const auto state_of = [](const Dict& state, int64_t number) {
    return state.at("state").toGenericDict().at(number).toGenericDict().at("exp_avg").toTensor();
  };
  // In the order of another model's parameters, and by their places where nobody knows names.
  const Dict other = WithNumbers(named, adam.param_groups(), {"b.weight", "a", "c"}).value();
  EXPECT_TRUE(state_of(other, 0).is_same(state_of(saved, 1)));
  EXPECT_TRUE(state_of(other, 1).is_same(state_of(saved, 0)));
  const Dict by_place = WithNumbers(named, adam.param_groups(), {}).value();
  EXPECT_TRUE(state_of(by_place, 1).is_same(state_of(saved, 1)));
  EXPECT_TRUE(LoadOptimizerState(adam, by_place).ok());
  const Dict numbers = WithNumbers(saved, adam.param_groups(), {"a", "b.weight", "c"}).value();
  EXPECT_TRUE(state_of(numbers, 2).is_same(state_of(saved, 2)));

  const absl::Status unknown = WithNumbers(named, adam.param_groups(), {"a", "x", "c"}).status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(unknown.message(), "group 0 of the checkpoint has no 'x'"))
      << unknown;
  named.at("state").toGenericDict().insert("d", NewDict());
  EXPECT_FALSE(WithNumbers(named, adam.param_groups(), {"a", "b.weight", "c"}).ok());
}

}  // namespace
}  // namespace ddp::optim
