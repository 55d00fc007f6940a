// Gradients are the mean over ranks, in every mode of the Reducer.

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/Parallel.h"
#include "base/cores.h"
#include "ddp/bucket_limits.h"
#include "ddp/nets_testing.h"

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

// The sizes that the logger has by this name on rank 0, after three steps.
std::string BucketSizes(const DataParallelOptions& options, const std::string& name) {
  std::string sizes;
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet<Layers>(), group, options);
    // The logger takes note at the beginning of a forward.
    for (int step = 0; step < 3; ++step) model->forward(at::ones({1, 512})).sum().backward();
    if (rank == 0) sizes = model->parallel().GetDDPLoggingData().strs_map[name];
  });
  return sizes;
}

std::string RebuiltBuckets(const DataParallelOptions& options) {
  return BucketSizes(options, "rebuilt_bucket_sizes");
}

TEST(BucketTest, AnExplicitSizeHoldsForTheFirstBucketToo) {
  EXPECT_EQ(RebuiltBuckets({.bucket_cap_mb = 2}), "2097152, 2097152");
  EXPECT_EQ(RebuiltBuckets({.bucket_cap_mb = 25}), "4194304");
}

TEST(BucketTest, ByDefaultTheFirstBucketIsSmall) {
  // Except over shm if no core is idle: its collectives run on the ranks' cores.
  bool interrupts = false;
  if (BackendUnderTest() == "shm") {
    RunRanks(WorldSize(), [&](int rank, const GroupPtr&) {
      if (rank != 0) return;
      interrupts = NoCoresToSpare(AvailableCores(), WorldSize(), at::get_num_threads());
    });
  }
  EXPECT_EQ(RebuiltBuckets({}), interrupts ? "4194304" : "1048576, 3145728");
}

// In reverse order, as gradients arrive.
TEST(BucketTest, WithFindUnusedParametersTheFirstLayoutStays) {
  EXPECT_EQ(BucketSizes({.find_unused_parameters = true}, "bucket_sizes"), "3145728, 1048576");
  const DataParallelOptions options = {.bucket_cap_mb = 2, .find_unused_parameters = true};
  EXPECT_EQ(BucketSizes(options, "bucket_sizes"), "2097152, 2097152");
  EXPECT_EQ(RebuiltBuckets(options), "");
}

}  // namespace
}  // namespace ddp
