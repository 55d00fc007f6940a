// static_graph: what the first iteration records, what it refuses, and what goes wrong without it.

#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/match.h"
#include "base/status.h"
#include "ddp/nets_testing.h"

namespace ddp {
namespace {

using absl::StrContains;

// Such as a forward to measure, before training.
TEST(StaticGraphTest, AForwardWithoutBackwardIsNotTheFirstIteration) {
  const std::vector<at::Tensor> expected = ExpectedGradients(WorldSize(), 1);
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet(), group, {.static_graph = true});
    model->forward(Input(rank, 7), true);
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      model->forward(Input(rank, 1), true).pow(2).sum().backward();
      ExpectClose(Gradients(*model->module()), expected);
    }
  });
}

TEST(StaticGraphTest, FindsUnusedParametersByItself) {
  for (const bool also_asked_to : {false, true}) {
    RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
      auto model = *Wrap(SeededNet(), group,
                         {.find_unused_parameters = also_asked_to, .static_graph = true});
      for (int step = 0; step < 4; ++step) {
        model->zero_grad();
        model->forward(Input(rank, step), /*use_skipped=*/false).pow(2).sum().backward();
        EXPECT_FALSE(model->module()->skipped->weight.grad().defined());
        const std::vector<at::Tensor> expected = MeanGradients<Net>(
            WorldSize(),
            [&](Net& net, int from) { return net.forward(Input(from, step), false).pow(2).sum(); });
        ExpectClose(Gradients(*model->module()), expected);
      }
    });
  }
}

TEST(StaticGraphTest, AGraphThatChangesIsAnErrorThatSaysSo) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet(), group, {.static_graph = true});
    for (int step = 0; step < 2; ++step) {
      model->forward(Input(rank, 0), /*use_skipped=*/step == 0).sum().backward();
    }
    const absl::Status status = CatchStatus("", [&] { model->forward(Input(rank, 1), true); });
    EXPECT_TRUE(StrContains(status.message(), "skipped.weight, skipped.bias")) << status;
    EXPECT_TRUE(StrContains(status.message(), "those of the first iteration")) << status;
  });
}

// The Reducer's own error, which does not name the parameter.
TEST(StaticGraphTest, AParameterUsedOnlyLaterIsAnErrorInBackward) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet(), group, {.static_graph = true});
    model->forward(Input(rank, 0), /*use_skipped=*/false).sum().backward();
    const at::Tensor loss = model->forward(Input(rank, 1), /*use_skipped=*/true).sum();
    const absl::Status status = CatchStatus("", [&] { loss.backward(); });
    EXPECT_TRUE(StrContains(status.message(), "training graph has changed")) << status;
  });
}

// Rank 0 alone uses the parameters; backward on the others ends without a gradient of any.
struct Optional : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x, bool use) { return use ? linear->forward(x) : x * 1; }
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(4, 2))};
};

TEST(StaticGraphTest, ARankMayUseNoParameter) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet<Optional>(), group, {.static_graph = true});
    for (int step = 0; step < 4; ++step) {
      model->zero_grad();
      const at::Tensor x = Input(rank, step).requires_grad_();
      model->forward(x, rank == 0).pow(2).sum().backward();
      const std::vector<at::Tensor> expected =
          MeanGradients<Optional>(WorldSize(), [&](Optional& net, int from) {
            const at::Tensor output = net.forward(Input(from, step).requires_grad_(), from == 0);
            return output.pow(2).sum();
          });
      ExpectClose(Gradients(*model->module()), expected);
    }
  });
}

// A forward before training, such as one to measure, may return anything.
struct Selective : torch::nn::Module {
  enum class Result { kOutput, kDetached, kParameter };
  at::Tensor forward(const at::Tensor& x, Result result) {
    const at::Tensor y = linear->forward(x);
    if (result == Result::kOutput) return y;
    return result == Result::kDetached ? y.detach() : linear->weight;
  }
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(4, 2))};
};

TEST(StaticGraphTest, AForwardWithoutGradientsIsNotTheFirstIteration) {
  using Result = Selective::Result;
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet<Selective>(), group, {.static_graph = true});
    EXPECT_FALSE(model->forward(Input(rank, 7), Result::kDetached).requires_grad());
    EXPECT_TRUE(model->forward(Input(rank, 7), Result::kParameter).is_leaf());
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      model->forward(Input(rank, step), Result::kOutput).pow(2).sum().backward();
      const std::vector<at::Tensor> expected =
          MeanGradients<Selective>(WorldSize(), [&](Selective& net, int from) {
            return net.forward(Input(from, step), Result::kOutput).pow(2).sum();
          });
      ExpectClose(Gradients(*model->module()), expected);
    }
  });
}

// Outputs that are views, of which a loss may leave one out.
struct Views : torch::nn::Module {
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    const at::Tensor h = trunk->forward(x).relu();
    return {one->forward(h).squeeze(-1), other->forward(h).squeeze(-1)};
  }
  torch::nn::Linear trunk{register_module("trunk", torch::nn::Linear(4, 3))};
  torch::nn::Linear one{register_module("one", torch::nn::Linear(3, 1))};
  torch::nn::Linear other{register_module("other", torch::nn::Linear(3, 1))};
};

class ViewsTest : public testing::TestWithParam<DataParallelOptions> {};

// The graph of a view that is changed in place goes through its base, and no longer through the
// node that it had.
TEST_P(ViewsTest, MayBeChangedInPlace) {
  const auto loss = [](const auto& forward, int rank, int step) {
    return std::get<0>(forward(Input(rank, step))).sigmoid_().sum();
  };
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet<Views>(), group, GetParam());
    for (int step = 0; step < 4; ++step) {
      model->zero_grad();
      loss([&](const at::Tensor& x) { return model->forward(x); }, rank, step).backward();
      const std::vector<at::Tensor> expected =
          MeanGradients<Views>(WorldSize(), [&](Views& net, int from) {
            return loss([&](const at::Tensor& x) { return net.forward(x); }, from, step);
          });
      ExpectClose(Gradients(*model->module()), expected);
    }
  });
}

TEST_P(ViewsTest, BackwardMayBeOfChosenInputs) {
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet<Views>(), group, GetParam());
    const std::vector<at::Tensor> parameters = model->module()->parameters();
    for (int step = 0; step < 4; ++step) {
      model->zero_grad();
      std::get<0>(model->forward(Input(rank, step)))
          .pow(2)
          .sum()
          .backward({}, /*keep_graph=*/false, /*create_graph=*/false, at::TensorList(parameters));
      const std::vector<at::Tensor> expected =
          MeanGradients<Views>(WorldSize(), [&](Views& net, int from) {
            return std::get<0>(net.forward(Input(from, step))).pow(2).sum();
          });
      ExpectClose(Gradients(*model->module()), expected);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Options, ViewsTest,
                         testing::Values(DataParallelOptions{.static_graph = true},
                                         DataParallelOptions{.find_unused_parameters = true}));

TEST(StaticGraphTest, BackwardMayBeOfTheSameFewInputsEachTime) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet(), group, {.static_graph = true});
    const std::vector<at::Tensor> chosen = {model->module()->second->weight};
    for (int step = 0; step < 4; ++step) {
      model->zero_grad();
      const at::Tensor loss = model->forward(Input(rank, step), true).pow(2).sum();
      loss.backward({}, /*keep_graph=*/false, /*create_graph=*/false, at::TensorList(chosen));
      ExpectClose({chosen[0].grad()}, {ExpectedGradients(WorldSize(), step)[2]});
      EXPECT_FALSE(model->module()->first->weight.grad().defined());
    }
  });
}

// A loss of a tensor that forward did not return.
struct Hidden : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    hidden = linear->forward(x);
    return hidden.detach();
  }
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(4, 2))};
  at::Tensor hidden;
};

TEST(StaticGraphTest, AFirstBackwardFromElsewhereIsAnErrorInTheNextForward) {
  for (const bool next_is_synchronised : {true, false}) {
    RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
      auto model = *Wrap(SeededNet<Hidden>(), group, {.static_graph = true});
      model->forward(Input(rank, 0));
      model->module()->hidden.sum().backward();
      model->parallel().set_require_backward_grad_sync(next_is_synchronised);
      const absl::Status status = CatchStatus("", [&] { model->forward(Input(rank, 1)); });
      EXPECT_TRUE(StrContains(status.message(),
                              "static_graph: the gradients of the first backward "
                              "are not averaged over the ranks"))
          << status;
    });
  }
}

// Backwards that are this rank's own by choice are not lost.
TEST(StaticGraphTest, NoSyncAfterAForwardWithoutBackwardIsNoError) {
  const std::vector<at::Tensor> expected = ExpectedGradients(WorldSize(), 0, 3);
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet(), group, {.static_graph = true});
    model->forward(Input(rank, 7), true);
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      {
        const auto no_sync = model->no_sync();
        for (int i = 0; i < 2; ++i) model->forward(Input(rank, i), true).pow(2).sum().backward();
      }
      model->forward(Input(rank, 2), true).pow(2).sum().backward();
      ExpectClose(Gradients(*model->module()), expected);
    }
  });
}

}  // namespace
}  // namespace ddp
