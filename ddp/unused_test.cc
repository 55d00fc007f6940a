// Parameters and outputs that do not contribute to the loss, and the types of forward's arguments
// and results.

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "ddp/nets_testing.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/csrc/distributed/c10d/debug.h"

namespace ddp {
namespace {

using absl::StrContains;

TEST(UnusedParameterTest, TheErrorPrintsItsName) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet(), group);
    model->forward(Input(rank, 0), /*use_skipped=*/false).sum().backward();
    absl::Status status = CatchStatus("", [&] { model->forward(Input(rank, 1), false); });
    EXPECT_TRUE(StrContains(status.message(), "skipped.weight, skipped.bias")) << status;
    EXPECT_TRUE(StrContains(status.message(), "set find_unused_parameters")) << status;
  });
}

// Named as a Sequential's are.
struct Numbered : torch::nn::Module {
  Numbered() {
    for (int i = 0; i < 3; ++i) {
      layers.push_back(register_module(absl::StrCat(i), torch::nn::Linear(4, 4)));
    }
  }
  at::Tensor forward(const at::Tensor& x) { return layers[0]->forward(x); }
  std::vector<torch::nn::Linear> layers;
};

// With TORCH_DISTRIBUTED_DEBUG the Reducer's message has names, too, of which "2.weight" must not
// be taken for index 2.
TEST(UnusedParameterTest, TheErrorPrintsItsNameInDebugModesToo) {
  for (const auto level : {c10d::DebugLevel::Off, c10d::DebugLevel::Info}) {
    c10d::setDebugLevel(level);
    RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
      auto model = *Wrap(SeededNet<Numbered>(), group);
      model->forward(Input(rank, 0)).sum().backward();
      const absl::Status status = CatchStatus("", [&] { model->forward(Input(rank, 1)); });
      EXPECT_TRUE(StrContains(status.message(), "1.weight, 1.bias, 2.weight, 2.bias. ")) << status;
    });
  }
  c10d::setDebugLevel(c10d::DebugLevel::Off);
}

TEST(UnusedParameterTest, FindUnusedParametersTrainsOn) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet(), group, {.find_unused_parameters = true});
    for (int step = 0; step < 4; ++step) {
      model->zero_grad();
      // Rank 1 alone uses `skipped` in odd steps: rank 0 must receive its gradient then.
      model->forward(Input(rank, step), rank == 1 && step % 2 == 1).sum().backward();
      const at::Tensor& gradient = model->module()->skipped->weight.grad();
      EXPECT_EQ(gradient.defined() && gradient.abs().sum().item<float>() > 0, step % 2 == 1);
    }
  });
}

struct TwoOutputs {
  at::Tensor one, other;
};
constexpr auto FieldsOf(const TwoOutputs&) {
  return Fields(Field("one", &TwoOutputs::one), Field("other", &TwoOutputs::other));
}

// Several outputs, by one parameter set each and a common one.
template <typename Output>
struct Heads : torch::nn::Module {
  Output forward(const at::Tensor& x) { return Make(trunk->forward(x).relu()); }
  Output Make(const at::Tensor& h) {
    const at::Tensor a = one->forward(h), b = other->forward(h);
    if constexpr (std::is_same_v<Output, c10::IValue>) {
      c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
      dict.insert("one", a);
      dict.insert("other", c10::List<at::Tensor>({b}));
      return dict;
    } else if constexpr (std::is_same_v<Output, std::map<std::string, std::vector<at::Tensor>>>) {
      return {{"one", {a}}, {"other", {b}}};
    } else {
      return {a, b};
    }
  }
  torch::nn::Linear trunk{register_module("trunk", torch::nn::Linear(4, 8))};
  torch::nn::Linear one{register_module("one", torch::nn::Linear(8, 2))};
  torch::nn::Linear other{register_module("other", torch::nn::Linear(8, 2))};
};

template <typename Output>
at::Tensor Loss(Output output, bool one, bool other) {
  std::vector<at::Tensor> outputs;
  CollectTensors(output, outputs);
  at::Tensor loss = at::zeros({});
  if (one) loss = loss + outputs[0].pow(2).sum();
  if (other) loss = loss + outputs[1].pow(2).sum();
  return loss;
}

template <typename Output>
class UnusedOutputTest : public testing::Test {};
using Outputs =
    testing::Types<std::tuple<at::Tensor, at::Tensor>,
                   std::map<std::string, std::vector<at::Tensor>>, c10::IValue, TwoOutputs,
                   std::array<at::Tensor, 2>,
                   std::pair<std::optional<at::Tensor>, std::optional<at::Tensor>>,
                   std::pair<std::variant<int64_t, at::Tensor>, std::variant<int64_t, at::Tensor>>>;
TYPED_TEST_SUITE(UnusedOutputTest, Outputs);

TYPED_TEST(UnusedOutputTest, GradientsAreTheMeanWhateverTheRanksLeaveOut) {
  using Module = Heads<TypeParam>;
  // Whether the loss of a rank has the first output, and the second.
  const auto uses = [](int rank, int step) -> std::pair<bool, bool> {
    const std::pair<bool, bool> of_rank[][2] = {{{true, false}, {true, false}},
                                                {{true, false}, {false, true}},
                                                {{true, true}, {false, true}},
                                                {{true, true}, {true, true}}};
    return of_rank[step % 4][rank % 2];
  };
  for (const bool views : {false, true}) {
    RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
      auto model = *Wrap(SeededNet<Module>(), group,
                         {.bucket_cap_mb = 1e-4,
                          .find_unused_parameters = true,
                          .gradient_as_bucket_view = views});
      for (int step = 0; step < 8; ++step) {
        model->zero_grad();
        const auto [one, other] = uses(rank, step);
        Loss(model->forward(Input(rank, step)), one, other).backward();
        const std::vector<at::Tensor> expected =
            MeanGradients<Module>(WorldSize(), [&](Module& module, int from) {
              const auto [with_one, with_other] = uses(from, step);
              return Loss(module.forward(Input(from, step)), with_one, with_other);
            });
        ExpectClose(Gradients(*model->module()), expected);
        // Where no rank uses it, the gradient is left as it is: no weight decay by an optimizer.
        EXPECT_EQ(model->module()->other->weight.grad().defined(), step % 4 != 0);
      }
    });
  }
}

// The first output alone under no_sync, the second alone in the backward that reduces the sum; with
// static_graph the same in both.
TEST(UnusedOutputsTest, AreAccumulated) {
  using Module = Heads<std::tuple<at::Tensor, at::Tensor>>;
  for (const DataParallelOptions& options :
       {DataParallelOptions{.find_unused_parameters = true},
        {.find_unused_parameters = true, .gradient_as_bucket_view = true},
        {.static_graph = true},
        {.gradient_as_bucket_view = true, .static_graph = true}}) {
    RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
      auto model = *Wrap(SeededNet<Module>(), group, options);
      const bool second = !options.static_graph;
      for (int step = 0; step < 4; ++step) {
        model->zero_grad();
        {
          const auto no_sync = model->no_sync();
          Loss(model->forward(Input(rank, step)), true, false).backward();
        }
        Loss(model->forward(Input(rank, step + 1)), !second, second).backward();
        const std::vector<at::Tensor> expected =
            MeanGradients<Module>(WorldSize(), [&](Module& module, int from) {
              return Loss(module.forward(Input(from, step)), true, false) +
                     Loss(module.forward(Input(from, step + 1)), !second, second);
            });
        ExpectClose(Gradients(*model->module()), expected);
      }
    });
  }
}

// A parameter that neither uses, on no rank, gets no gradient from either.
TEST(UnusedOutputsTest, ABackwardOfEachOfTwoForwards) {
  const auto loss = [](auto& model, int rank, int step) {
    return model.forward(Input(rank, step), /*use_skipped=*/false).pow(2).sum();
  };
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet(), group, {.find_unused_parameters = true});
    const std::vector<at::Tensor> expected = MeanGradients<Net>(
        WorldSize(), [&](Net& net, int from) { return loss(net, from, 0) + loss(net, from, 1); });
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      const at::Tensor first = loss(*model, rank, 0), second = loss(*model, rank, 1);
      first.backward();
      second.backward();
      ExpectClose(Gradients(*model->module()), expected);
      EXPECT_FALSE(model->module()->skipped->weight.grad().defined());
    }
  });
}

// A gradient penalty: grad() of the outputs runs first and does not count as backward.
TEST(UnusedOutputsTest, AGradOfTheInputIsNotTheEndOfBackward) {
  using Module = Heads<std::tuple<at::Tensor, at::Tensor>>;
  const auto loss = [](const auto& forward, int rank) {
    const at::Tensor x = Input(rank, 0).requires_grad_();
    const auto [one, other] = forward(x);
    const at::Tensor slope =
        torch::autograd::grad({one.pow(2).sum()}, {x}, {}, /*retain_graph=*/true,
                              /*create_graph=*/true)[0];
    return one.sum() + slope.pow(2).sum();
  };
  for (const DataParallelOptions& options :
       {DataParallelOptions{.find_unused_parameters = true}, {.static_graph = true}}) {
    RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
      auto model = *Wrap(SeededNet<Module>(), group, options);
      const std::vector<at::Tensor> expected =
          MeanGradients<Module>(WorldSize(), [&](Module& module, int r) {
            return loss([&](const at::Tensor& x) { return module.forward(x); }, r);
          });
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        loss([&](const at::Tensor& x) { return model->forward(x); }, rank).backward();
        ExpectClose(Gradients(*model->module()), expected);
      }
    });
  }
}

TEST(UnusedOutputsTest, StaticGraphLeavesOutTheSameInEveryIteration) {
  using Module = Heads<std::tuple<at::Tensor, at::Tensor>>;
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet<Module>(), group, {.static_graph = true});
    for (int step = 0; step < 4; ++step) {
      model->zero_grad();
      Loss(model->forward(Input(rank, step)), true, false).backward();
      const std::vector<at::Tensor> expected =
          MeanGradients<Module>(WorldSize(), [&](Module& module, int from) {
            return Loss(module.forward(Input(from, step)), true, false);
          });
      ExpectClose(Gradients(*model->module()), expected);
    }
  });
}

// A loss of tensors that forward did not return.
struct Aside : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    hidden = linear->forward(x);
    return other->forward(hidden);
  }
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(4, 2))};
  torch::nn::Linear other{register_module("other", torch::nn::Linear(2, 2))};
  at::Tensor hidden;
};

TEST(UnusedOutputsTest, TheAdviceIsNotTheOptionAlreadySet) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet<Aside>(), group, {.find_unused_parameters = true});
    model->forward(Input(rank, 0));
    model->module()->hidden.sum().backward();
    const absl::Status status = CatchStatus("", [&] { model->forward(Input(rank, 1)); });
    EXPECT_TRUE(StrContains(status.message(), "return every tensor that the loss is made of"))
        << status;
  });
}

// Backwards of some parameters each complete the gradients together; one alone does not.
TEST(UnusedOutputsTest, BackwardsOfChosenInputsMustHaveAllParameters) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet(), group, {.find_unused_parameters = true});
    std::vector<at::Tensor> others = model->module()->parameters();
    const std::vector<at::Tensor> one = {others[0]};
    others.erase(others.begin());
    const auto backward = [](const at::Tensor& loss, const std::vector<at::Tensor>& inputs) {
      loss.backward({}, /*keep_graph=*/true, /*create_graph=*/false, at::TensorList(inputs));
    };
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      const at::Tensor loss = model->forward(Input(rank, step), true).pow(2).sum();
      backward(loss, others);
      backward(loss, one);
      ExpectClose(Gradients(*model->module()), ExpectedGradients(WorldSize(), step));
    }
    backward(model->forward(Input(rank, 3), true).sum(), others);
    const absl::Status status = CatchStatus("", [&] { model->forward(Input(rank, 4), true); });
    EXPECT_TRUE(StrContains(status.message(), "first.weight. ")) << status;
    EXPECT_TRUE(StrContains(status.message(), "must have all parameters among them")) << status;
  });
}

// A forward of several arguments and a nested result.
struct Nested : torch::nn::Module {
  Nested() {
    linear = register_module("linear", torch::nn::Linear(4, 2));
    unused = register_module("unused", torch::nn::Linear(4, 2));
  }
  std::map<std::string, std::vector<at::Tensor>> forward(const at::Tensor& a, const at::Tensor& b,
                                                         double scale) {
    return {{"y", {linear->forward(a), linear->forward(b) * scale}}};
  }
  torch::nn::Linear linear{nullptr}, unused{nullptr};
};

TEST(ForwardTest, AnySignatureAndNestedOutputs) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet<Nested>(), group, {.find_unused_parameters = true});
    const std::vector<at::Tensor> expected =
        MeanGradients<Nested>(WorldSize(), [](Nested& net, int from) {
          auto output = net.forward(Input(from, 0), Input(from, 1), 2.0);
          return output["y"][0].sum() + output["y"][1].sum();
        });
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      auto output = (*model)(Input(rank, 0), Input(rank, 1), 2.0);
      (output["y"][0].sum() + output["y"][1].sum()).backward();
      ExpectClose(Gradients(*model->module()), expected);
    }
  });
}

// A result in which no tensors can be found.
struct Opaque : torch::nn::Module {
  struct Output {
    at::Tensor y;
  };
  Output forward(const at::Tensor& x) { return {linear->forward(x)}; }
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(4, 2))};
};

TEST(ForwardTest, AnyResultTypeUnlessItsTensorsAreWanted) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto model = *Wrap(std::make_shared<Opaque>(), group);
    for (int step = 0; step < 2; ++step) model->forward(Input(rank, step)).y.sum().backward();
    auto searched = *Wrap(std::make_shared<Opaque>(), group, {.find_unused_parameters = true});
    absl::Status status = CatchStatus("", [&] { searched->forward(Input(rank, 0)); });
    EXPECT_TRUE(StrContains(status.message(), "FieldsOf")) << status;
  });
}

TEST(ForwardTest, TensorsInAnIValueAreFound) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  dict.insert("list", c10::List<at::Tensor>({at::ones({1}), at::ones({2})}));
  dict.insert("tuple", c10::ivalue::Tuple::create({at::ones({3}), int64_t{4}}));
  std::vector<at::Tensor> tensors;
  CollectTensors(c10::IValue(dict), tensors);
  EXPECT_EQ(tensors.size(), 3);
}

// To another device: "meta" is one that every machine has.
TEST(InputsTest, TensorsInArgumentsAreMovedAndTheCallersAreNot) {
  using Tree = std::tuple<at::Tensor, std::map<std::string, std::vector<at::Tensor>>,
                          std::optional<at::Tensor>, std::array<std::pair<int, at::Tensor>, 1>>;
  const Tree tree = {
      at::ones({1}), {{"a", {at::ones({2}), at::Tensor()}}}, at::ones({3}), {{{7, at::ones({4})}}}};
  OnDevice<const Tree&> moved(tree, at::kMeta);
  std::vector<at::Tensor> tensors, callers;
  CollectTensors(moved.get(), tensors);
  CollectTensors(tree, callers);
  ASSERT_EQ(tensors.size(), 4);
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_TRUE(tensors[i].is_meta());
    EXPECT_TRUE(callers[i].is_cpu());
    EXPECT_EQ(tensors[i].numel(), callers[i].numel());
  }
  EXPECT_EQ(std::get<3>(moved.get())[0].first, 7);

  auto unmovable = std::make_unique<int>(3);
  EXPECT_EQ(&OnDevice<std::unique_ptr<int>&>(unmovable, at::kMeta).get(), &unmovable);
}

}  // namespace
}  // namespace ddp
