// Gradients are the mean over ranks, in every mode of the Reducer.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Parallel.h"
#include "absl/strings/match.h"
#include "base/cores.h"
#include "base/status.h"
#include "ddp/bucket_limits.h"
#include "ddp/nets_testing.h"
#include "torch/nn/modules/embedding.h"
#include "torch/optim/sgd.h"

namespace ddp {
namespace {

class GradientTest : public testing::TestWithParam<DataParallelOptions> {};

TEST_P(GradientTest, BackwardAveragesOverRanksBeforeAndAfterBucketsAreRebuilt) {
  std::vector<std::vector<at::Tensor>> expected;
  for (int step = 0; step < 4; ++step) expected.push_back(ExpectedGradients(3, step));
  RunRanks(3, [&](int rank, const GroupPtr& group) {
    auto model = Wrap(SeededNet(), group, GetParam());
    ASSERT_TRUE(model.ok()) << model.status();
    for (int step = 0; step < 4; ++step) {
      (*model)->zero_grad();
      (*model)->forward(Input(rank, step), true).pow(2).sum().backward();
      ExpectClose(Gradients(*(*model)->module()), expected[step]);
    }
  });
}

// Four optimizer steps, so that the buckets are rebuilt in between, and the first one begins with a
// backward that is not synchronised.
TEST_P(GradientTest, NoSyncAccumulatesLocallyAndReducesTheSumOnce) {
  std::vector<std::vector<at::Tensor>> expected;
  for (int step = 0; step < 4; ++step) {
    expected.push_back(ExpectedGradients(WorldSize(), 10 * step, /*steps_accumulated=*/3));
  }
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet(), group, GetParam());
    for (int step = 0; step < 4; ++step) {
      model->zero_grad();
      {
        auto guard = model->no_sync();
        for (int i = 0; i < 2; ++i) {
          model->forward(Input(rank, 10 * step + i), true).pow(2).sum().backward();
        }
      }
      model->forward(Input(rank, 10 * step + 2), true).pow(2).sum().backward();
      ExpectClose(Gradients(*model->module()), expected[step]);
    }
  });
}

TEST_P(GradientTest, GradientsMayBeResetInPlace) {
  std::vector<std::vector<at::Tensor>> expected;
  for (int step = 0; step < 4; ++step) expected.push_back(ExpectedGradients(WorldSize(), step));
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet(), group, GetParam());
    for (int step = 0; step < 4; ++step) {
      model->zero_grad(/*set_to_none=*/false);
      model->forward(Input(rank, step), true).pow(2).sum().backward();
      ExpectClose(Gradients(*model->module()), expected[step]);
    }
  });
}

// As in PyTorch 2.11, by the same Reducer: the second gradient of a bucket that requires a gradient
// itself cannot be copied into it.
TEST_P(GradientTest, CreateGraphIsAnError) {
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet(), group, GetParam());
    const at::Tensor loss = model->forward(Input(rank, 0), true).pow(2).sum();
    try {
      loss.backward({}, /*keep_graph=*/std::nullopt, /*create_graph=*/true);
      ADD_FAILURE() << "PyTorch's Reducer has learned it: the row of docs/ddp.md is wrong now";
    } catch (const c10::Error& error) {
      EXPECT_TRUE(absl::StrContains(error.what(), "is being used in an in-place operation"))
          << error.what();
    }
    model->zero_grad();  // such a gradient and its parameter hold each other
  });
}

// Their gradients meet in one backward. Not with find_unused_parameters, which looks for unused
// parameters from the outputs of the last forward.
TEST(ForwardsTest, SeveralBeforeOneBackward) {
  const std::vector<at::Tensor> expected = ExpectedGradients(WorldSize(), 0, 2);
  for (const DataParallelOptions& options :
       {DataParallelOptions{},
        {.gradient_as_bucket_view = true},
        {.bucket_cap_mb = 1e-4, .static_graph = true},
        {.gradient_as_bucket_view = true, .static_graph = true}}) {
    RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
      auto model = *Wrap(SeededNet(), group, options);
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        const at::Tensor first = model->forward(Input(rank, 0), true);
        const at::Tensor second = model->forward(Input(rank, 1), true);
        (first.pow(2).sum() + second.pow(2).sum()).backward();
        ExpectClose(Gradients(*model->module()), expected);
      }
    });
  }
}

// Each is reduced, as in one process. c10d's Reducer reduces the first alone.
TEST(ForwardsTest, SeveralAndThenABackwardOfEach) {
  const std::vector<at::Tensor> of_two = ExpectedGradients(WorldSize(), 0, 2);
  const std::vector<at::Tensor> of_three = ExpectedGradients(WorldSize(), 0, 3);
  for (const DataParallelOptions& options : {DataParallelOptions{},
                                             {.bucket_cap_mb = 1e-4},
                                             {.find_unused_parameters = true},
                                             {.gradient_as_bucket_view = true},
                                             {.static_graph = true}}) {
    RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
      auto model = *Wrap(SeededNet(), group, options);
      const auto loss = [&](int step) {
        return model->forward(Input(rank, step), true).pow(2).sum();
      };
      for (const bool swaps : {false, true, false}) {
        model->zero_grad();
        const at::Tensor first = loss(0), second = loss(1);
        (swaps ? second : first).backward();
        (swaps ? first : second).backward();
        ExpectClose(Gradients(*model->module()), of_two);
        if (options.static_graph) continue;  // whose iterations are all alike
        model->zero_grad();
        const at::Tensor one = loss(0), other = loss(1);
        one.backward();
        const at::Tensor last = loss(2);
        other.backward();
        last.backward();
        ExpectClose(Gradients(*model->module()), of_three);
      }
    });
  }
}

// As in PyTorch: without a forward before it, the second adds this rank's own gradients.
TEST(ForwardsTest, OfTwoBackwardsFromOneTheFirstIsSynchronised) {
  const std::vector<at::Tensor> mean = ExpectedGradients(WorldSize(), 0);
  for (const DataParallelOptions& options :
       {DataParallelOptions{.find_unused_parameters = true}, {.static_graph = true}}) {
    RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
      const auto own = SeededNet();
      own->forward(Input(rank, 0), true).pow(2).sum().backward();
      auto model = *Wrap(SeededNet(), group, options);
      const at::Tensor loss = model->forward(Input(rank, 0), true).pow(2).sum();
      loss.backward({}, /*keep_graph=*/true);
      ExpectClose(Gradients(*model->module()), mean);
      loss.backward();
      std::vector<at::Tensor> sums;
      for (size_t i = 0; i < mean.size(); ++i) sums.push_back(mean[i] + Gradients(*own)[i]);
      ExpectClose(Gradients(*model->module()), sums);
    });
  }
}

// The gradients of the last layer come first, and are sent; that of the input comes last.
TEST(BackwardTest, AfterAnExceptionTheNextForwardSaysToWrapAgain) {
  for (const bool at_the_end : {false, true}) {
    RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
      const auto net = SeededNet();
      auto model = *Wrap(net, group, {.bucket_cap_mb = 1e-4});
      const at::Tensor input = Input(rank, 0).requires_grad_();
      bool fails = true;
      const at::Tensor where = at_the_end ? input : net->first->weight;
      where.register_hook([&fails](const at::Tensor&) {
        if (fails) throw std::runtime_error("a bad batch");
      });
      const at::Tensor loss = model->forward(input * 1, true).pow(2).sum();
      const absl::Status failed = CatchStatus("", [&] { loss.backward(); });
      EXPECT_TRUE(absl::StrContains(failed.message(), "a bad batch")) << failed;
      const absl::Status next = CatchStatus("", [&] { model->forward(Input(rank, 1), true); });
      EXPECT_TRUE(absl::StrContains(next.message(), "has ended with an exception")) << next;
      EXPECT_TRUE(absl::StrContains(next.message(), "wrap the module again")) << next;
      fails = false;
      model.reset();
      model = *Wrap(net, group);
      model->zero_grad();
      model->forward(Input(rank, 1), true).pow(2).sum().backward();
      ExpectClose(Gradients(*net), ExpectedGradients(WorldSize(), 1));
    });
  }
}

INSTANTIATE_TEST_SUITE_P(
    Options, GradientTest,
    testing::Values(DataParallelOptions{}, DataParallelOptions{.bucket_cap_mb = 1e-4},
                    DataParallelOptions{.find_unused_parameters = true},
                    DataParallelOptions{.gradient_as_bucket_view = true},
                    DataParallelOptions{.bucket_cap_mb = 1e-4, .static_graph = true},
                    DataParallelOptions{.gradient_as_bucket_view = true, .static_graph = true},
                    DataParallelOptions{.find_unused_parameters = true, .static_graph = true}));

TEST(WorldOfOneTest, NeedsNoGroup) {
  auto model = *Wrap(SeededNet(), nullptr);
  for (int step = 0; step < 2; ++step) {
    model->zero_grad();
    model->forward(Input(0, step), true).pow(2).sum().backward();
    ExpectClose(Gradients(*model->module()), ExpectedGradients(1, step));
  }
  EXPECT_EQ(model->parallel().world_size(), 1);
}

TEST(WorldOfOneTest, ParametersMayBeUnused) {
  for (const DataParallelOptions& options :
       {DataParallelOptions{}, {.find_unused_parameters = true}, {.static_graph = true}}) {
    auto model = *Wrap(SeededNet(), nullptr, options);
    for (const bool use_skipped : {false, false, true, false}) {
      model->zero_grad();
      model->forward(Input(0, 0), use_skipped).sum().backward();
      EXPECT_EQ(model->module()->skipped->weight.grad().defined(), use_skipped);
    }
  }
}

// Four parameters of 1 MiB each.
struct Layers : torch::nn::Module {
  Layers() {
    for (int i = 0; i < 4; ++i) {
      layers.push_back(register_module(
          std::to_string(i), torch::nn::Linear(torch::nn::LinearOptions(512, 512).bias(false))));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = layer->forward(x);
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};

// That the logger has these sizes by this name on rank 0, after three steps.
void ExpectSizes(const DataParallelOptions& options, const std::string& name,
                 const std::string& sizes) {
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet<Layers>(), group, options);
    // The logger takes note at the beginning of a forward.
    for (int step = 0; step < 3; ++step) model->forward(at::ones({1, 512})).sum().backward();
    if (rank != 0) return;
    EXPECT_EQ(model->parallel().GetDDPLoggingData().strs_map[name], sizes);
  });
}

void ExpectRebuiltSizes(const DataParallelOptions& options, const std::string& sizes) {
  ExpectSizes(options, "rebuilt_bucket_sizes", sizes);
}

TEST(BucketTest, AnExplicitSizeHoldsForTheFirstBucketToo) {
  ExpectRebuiltSizes({.bucket_cap_mb = 2}, "2097152, 2097152");
  ExpectRebuiltSizes({.bucket_cap_mb = 25}, "4194304");
}

TEST(BucketTest, ByDefaultTheFirstBucketIsSmall) {
  // Except over shm if no core is idle: its collectives run on the ranks' cores.
  bool interrupts = false;
  if (BackendUnderTest() == "shm") {
    RunRanks(WorldSize(), [&](int rank, const GroupPtr&) {
      if (rank != 0) return;
      interrupts = BackwardUsesAllCores(AvailableCores(), WorldSize(), at::get_num_threads());
    });
  }
  ExpectRebuiltSizes({}, interrupts ? "4194304" : "1048576, 3145728");
}

// In reverse order, as gradients arrive.
TEST(BucketTest, WithFindUnusedParametersTheFirstLayoutStays) {
  ExpectSizes({.find_unused_parameters = true}, "bucket_sizes", "3145728, 1048576");
  const DataParallelOptions options = {.bucket_cap_mb = 2, .find_unused_parameters = true};
  ExpectSizes(options, "bucket_sizes", "2097152, 2097152");
  ExpectRebuiltSizes(options, "");
}

// Gradients arrive in the order 1, 3, 0, 2.
struct ShuffledLayers : Layers {
  at::Tensor forward(at::Tensor x) {
    for (int i : {2, 0, 3, 1}) x = layers[i]->forward(x);
    return x;
  }
};

TEST(BucketTest, AResumedRunMayHaveTheBucketsOfTheRunBefore) {
  const std::vector<int64_t> arrival = {1, 3, 0, 2};
  const DataParallelOptions options = {.bucket_cap_mb = 2};
  const at::Tensor input = at::ones({1, 512});
  RunRanks(WorldSize(), [&](int, const GroupPtr& group) {
    auto model = *Wrap(SeededNet<ShuffledLayers>(), group, options);
    EXPECT_EQ(model->parallel().bucket_order(), std::vector<int64_t>());
    for (int step = 0; step < 3; ++step) {
      model->forward(input).sum().backward();
      EXPECT_EQ(model->parallel().bucket_order(), arrival) << step;
    }
    EXPECT_FALSE(model->parallel().RestoreBucketOrder(arrival));  // too late
    auto resumed = *Wrap(SeededNet<ShuffledLayers>(), group, options);
    for (const std::vector<int64_t>& wrong : std::vector<std::vector<int64_t>>{
             {}, {1, 3, 0}, {1, 3, 0, 3}, {1, 3, 0, 4}, {1, 3, 0, -2}}) {
      EXPECT_FALSE(resumed->parallel().RestoreBucketOrder(wrong));
    }
    EXPECT_EQ(resumed->parallel().bucket_order(), std::vector<int64_t>());
    // Not the order of arrival, so that the record of the first iteration would differ.
    const std::vector<int64_t> order = {3, 2, 1, 0};
    EXPECT_TRUE(resumed->parallel().RestoreBucketOrder(order));
    for (int step = 0; step < 3; ++step) {
      EXPECT_EQ(resumed->parallel().bucket_order(), order) << step;
      resumed->parallel().zero_grad();
      resumed->forward(input).sum().backward();
    }
    const auto expected = model->parallel().parameters(), now = resumed->parallel().parameters();
    for (size_t i = 0; i < now.size(); ++i) {
      // `model` has added up three equal gradients.
      EXPECT_TRUE(at::allclose(now[i].second.grad() * 3, expected[i].second.grad(), 1e-4)) << i;
    }
  });
}

// Sparse gradients have a bucket each, and each dtype has one that is not full, which come last.
struct MixedNet : torch::nn::Module {
  at::Tensor forward(const at::Tensor& index) {
    const at::Tensor row = embedding->forward(index);
    return narrow->forward(row).sum().to(at::kDouble) + wide->forward(row.to(at::kDouble)).sum() +
           last->forward(row).sum();
  }
  torch::nn::Linear narrow{register_module("narrow", torch::nn::Linear(4, 8))};
  torch::nn::Embedding embedding{register_module(
      "embedding", torch::nn::Embedding(torch::nn::EmbeddingOptions(8, 4).sparse(true)))};
  torch::nn::Linear wide{[this] {
    auto layer = register_module("wide", torch::nn::Linear(4, 8));
    layer->to(at::kDouble);
    return layer;
  }()};
  torch::nn::Linear last{register_module("last", torch::nn::Linear(4, 8))};
};

TEST(BucketTest, TheBucketsOfSeveralDtypesAreRestoredToo) {
  const DataParallelOptions options = {.bucket_cap_mb = 150.0 / (1 << 20)};
  const at::Tensor index = at::arange(3);
  RunRanks(WorldSize(), [&](int, const GroupPtr& group) {
    auto model = *Wrap(SeededNet<MixedNet>(), group, options);
    for (int step = 0; step < 3; ++step) model->forward(index).backward();
    const std::vector<int64_t> order = model->parallel().bucket_order();
    const std::string sizes =
        model->parallel().GetDDPLoggingData().strs_map["rebuilt_bucket_sizes"];
    ASSERT_GE(std::count(sizes.begin(), sizes.end(), ','), 3) << sizes;
    auto resumed = *Wrap(SeededNet<MixedNet>(), group, options);
    ASSERT_TRUE(resumed->parallel().RestoreBucketOrder(order));
    for (int step = 0; step < 2; ++step) resumed->forward(index).backward();
    EXPECT_EQ(resumed->parallel().bucket_order(), order);
    EXPECT_EQ(resumed->parallel().GetDDPLoggingData().strs_map["rebuilt_bucket_sizes"], sizes);
  });
}

TEST(BucketTest, WithFindUnusedParametersNoOrderIsRestored) {
  RunRanks(WorldSize(), [&](int, const GroupPtr& group) {
    auto model = *Wrap(SeededNet<Layers>(), group, {.find_unused_parameters = true});
    EXPECT_FALSE(model->parallel().RestoreBucketOrder({3, 2, 1, 0}));
    EXPECT_EQ(model->parallel().bucket_order(), std::vector<int64_t>());
  });
}

// Embedding(sparse=true): gradients with only the used rows. Losses are scaled down, so that
// rounding stays below the tolerance where terms cancel.

// With `sparse` false the gradients are dense, and must be the same.
struct Words : torch::nn::Module {
  explicit Words(bool sparse) {
    words = register_module(
        "words", torch::nn::Embedding(torch::nn::EmbeddingOptions(20, 3).sparse(sparse)));
    linear = register_module("linear", torch::nn::Linear(3, 2));
    bag = register_module(
        "bag", torch::nn::EmbeddingBag(
                   torch::nn::EmbeddingBagOptions(10, 2).mode(torch::kSum).sparse(sparse)));
  }
  static void Fill(at::Tensor& parameter) {
    parameter.copy_(at::arange(parameter.numel(), at::kFloat).mul(0.37).sin().view_as(parameter));
  }
  at::Tensor forward(const at::Tensor& ids, bool with_bag = true) {
    at::Tensor y = linear->forward(words->forward(ids).tanh());
    if (with_bag) y = y + bag->forward(ids.remainder(10).unsqueeze(0)).sum();
    return y;
  }
  torch::nn::Embedding words{nullptr};
  torch::nn::Linear linear{nullptr};
  torch::nn::EmbeddingBag bag{nullptr};
};

std::shared_ptr<Words> MakeWords(bool sparse) {
  auto words = std::make_shared<Words>(sparse);
  at::NoGradGuard no_grad;
  for (at::Tensor& parameter : words->parameters()) Words::Fill(parameter);
  return words;
}

// Some of them twice, some on several ranks, of another number on each.
at::Tensor Ids(int rank, int step) {
  return at::arange(4 + rank, at::kLong).mul(3).add(step + rank).remainder(20).repeat({2});
}

std::vector<at::Tensor> DenseGradients(int world_size, int step, int accumulated = 1,
                                       bool with_bag = true) {
  auto net = MakeWords(/*sparse=*/false);
  for (int rank = 0; rank < world_size; ++rank) {
    for (int i = 0; i < accumulated; ++i) {
      (net->forward(Ids(rank, step + i), with_bag).pow(2).mul(0.01).sum() / world_size).backward();
    }
  }
  return Gradients(*net);
}

class SparseGradientTest : public testing::TestWithParam<DataParallelOptions> {};

TEST_P(SparseGradientTest, AreTheMeanOverRanks) {
  RunRanks(3, [&](int rank, const GroupPtr& group) {
    auto net = MakeWords(/*sparse=*/true);
    auto wrapped = Wrap(net, group, GetParam());
    ASSERT_TRUE(wrapped.ok()) << wrapped.status();
    auto& model = **wrapped;
    for (int step = 0; step < 4; ++step) {
      model.zero_grad();
      model.forward(Ids(rank, step)).pow(2).mul(0.01).sum().backward();
      EXPECT_TRUE(net->words->weight.grad().is_sparse());
      ExpectClose(Gradients(*net), DenseGradients(3, step));
    }
  });
}

TEST_P(SparseGradientTest, AreAccumulated) {
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    auto net = MakeWords(/*sparse=*/true);
    auto model = *Wrap(net, group, GetParam());
    for (int step = 0; step < 3; ++step) {
      // To zero in place as well as to none.
      model->zero_grad(/*set_to_none=*/step == 1);
      {
        auto guard = model->no_sync();
        model->forward(Ids(rank, step)).pow(2).mul(0.01).sum().backward();
      }
      model->forward(Ids(rank, step + 1)).pow(2).mul(0.01).sum().backward();
      ExpectClose(Gradients(*net), DenseGradients(WorldSize(), step, /*accumulated=*/2));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Options, SparseGradientTest,
                         testing::Values(DataParallelOptions{},
                                         DataParallelOptions{.find_unused_parameters = true},
                                         DataParallelOptions{.gradient_as_bucket_view = true},
                                         DataParallelOptions{.static_graph = true}));

// PyTorch's Reducer fails on undefined sparse gradients.
TEST(SparseTrainingTest, OfAParameterThatARankDoesNotUse) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto net = MakeWords(/*sparse=*/true);
    auto model = *Wrap(net, group, {.find_unused_parameters = true});
    for (int step = 0; step < 4; ++step) {
      model->zero_grad();
      const auto uses_bag = [&](int from) { return from == 0 && step % 2 == 1; };
      model->forward(Ids(rank, step), uses_bag(rank)).pow(2).mul(0.01).sum().backward();
      auto dense = MakeWords(/*sparse=*/false);
      for (int from = 0; from < WorldSize(); ++from) {
        (dense->forward(Ids(from, step), uses_bag(from)).pow(2).mul(0.01).sum() / WorldSize())
            .backward();
      }
      ExpectClose(Gradients(*net), Gradients(*dense));
    }
  });
}

// Gradients are reset between forward and backward, as in ddp.h's example.
TEST(SparseTrainingTest, OfAParameterThatARankDoesNotUseInAStaticGraph) {
  for (const bool one_uses_it : {true, false}) {
    RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
      auto net = MakeWords(/*sparse=*/true);
      auto model = *Wrap(net, group, {.bucket_cap_mb = 1e-4, .static_graph = true});
      const auto uses_bag = [&](int from) { return one_uses_it && from == 0; };
      for (int step = 0; step < 4; ++step) {
        const at::Tensor loss =
            model->forward(Ids(rank, step), uses_bag(rank)).pow(2).mul(0.01).sum();
        model->zero_grad();
        loss.backward();
        auto dense = MakeWords(/*sparse=*/false);
        for (int from = 0; from < WorldSize(); ++from) {
          (dense->forward(Ids(from, step), uses_bag(from)).pow(2).mul(0.01).sum() / WorldSize())
              .backward();
        }
        ExpectClose(Gradients(*net), Gradients(*dense));
        // Empty where no rank uses it.
        EXPECT_TRUE(net->bag->weight.grad().is_sparse());
      }
    });
  }
}

TEST(SparseTrainingTest, TrainsAsDenseOnesDo) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    std::vector<at::Tensor> weights(2);
    for (const bool sparse : {true, false}) {
      auto net = MakeWords(sparse);
      auto model = *Wrap(net, group);
      torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1));
      for (int step = 0; step < 5; ++step) {
        model->zero_grad();
        model->forward(Ids(rank, step)).pow(2).mul(0.01).sum().backward();
        sgd.step();
      }
      weights[sparse] = net->words->weight.detach().clone();
    }
    EXPECT_TRUE(at::allclose(weights[true], weights[false]));
  });
}

// With real ones in between, so that buckets of both are rebuilt.
struct ComplexNet : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = at::matmul(real->forward(x).to(at::kComplexFloat), weight) + bias;
    return at::view_as_real(y.t());
  }
  torch::nn::Linear real{register_module("real", torch::nn::Linear(4, 3))};
  at::Tensor weight{register_parameter("weight", at::randn({3, 6}, at::kComplexFloat))};
  at::Tensor bias{register_parameter("bias", at::randn({6}, at::kComplexFloat))};
};

TEST(ComplexTest, GradientsAreAveraged) {
  const auto loss = [](const at::Tensor& y) { return (y.sin() * at::arange(1, 3)).sum(); };
  for (const DataParallelOptions& options :
       {DataParallelOptions{},
        {.bucket_cap_mb = 1e-4},
        {.find_unused_parameters = true},
        {.bucket_cap_mb = 1e-4, .gradient_as_bucket_view = true},
        {.gradient_as_bucket_view = true, .static_graph = true}}) {
    RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
      auto model = Wrap(SeededNet<ComplexNet>(), group, options);
      ASSERT_TRUE(model.ok()) << model.status();
      for (int step = 0; step < 3; ++step) {
        (*model)->zero_grad();
        loss((*model)->forward(Input(rank, step))).backward();
        ExpectClose(Gradients(*(*model)->module()),
                    MeanGradients<ComplexNet>(WorldSize(), [&](ComplexNet& net, int from) {
                      return loss(net.forward(Input(from, step)));
                    }));
      }
    });
  }
}

}  // namespace
}  // namespace ddp
