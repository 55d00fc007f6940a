#include "ddp/ddp.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "backends/rank_threads.h"
#include "base/status.h"
#include "c10/util/env.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"
#include "torch/utils.h"

namespace ddp {
namespace {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// What this run of the test is about.
std::string BackendUnderTest() {
  const char* name = std::getenv("DDP_TEST_BACKEND");
  return name == nullptr ? "gloo" : name;
}

void RunRanks(int world_size, const std::function<void(int rank, const GroupPtr& group)>& body) {
  backends::RunRankThreads(world_size, BackendUnderTest(),
                           [&](const launchers::Rank& rank, const backends::Group& group) {
                             body(rank.rank, group.process_group);
                           });
}

struct Net : torch::nn::Module {
  explicit Net(int64_t hidden = 8) {
    first = register_module("first", torch::nn::Linear(4, hidden));
    second = register_module("second", torch::nn::Linear(hidden, 2));
    skipped = register_module("skipped", torch::nn::Linear(3, 3));
  }
  // `use_skipped` decides whether all parameters take part.
  at::Tensor forward(const at::Tensor& x, bool use_skipped) {
    at::Tensor y = second->forward(first->forward(x).relu());
    if (use_skipped) y = y + skipped->forward(at::ones({1, 3})).sum();
    return y;
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, skipped{nullptr};
};

at::Tensor Input(int rank, int step) { return at::full({5, 4}, 0.1f * (rank + 1) + 0.01f * step); }

std::vector<at::Tensor> Gradients(const torch::nn::Module& module) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : module.parameters()) gradients.push_back(parameter.grad());
  return gradients;
}

// What one process would compute: the mean over ranks of each rank's gradients.
std::vector<at::Tensor> ExpectedGradients(int world_size, int step, int steps_accumulated = 1) {
  torch::manual_seed(1);
  Net net;
  for (int rank = 0; rank < world_size; ++rank) {
    for (int i = 0; i < steps_accumulated; ++i) {
      (net.forward(Input(rank, step + i), true).pow(2).sum() / world_size).backward();
    }
  }
  return Gradients(net);
}

std::shared_ptr<Net> SeededNet(uint64_t seed = 1) {
  // Threads share the default generator.
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  torch::manual_seed(seed);
  return std::make_shared<Net>();
}

void ExpectClose(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(at::allclose(a[i], b[i], 1e-5, 1e-6)) << "tensor " << i;
  }
}

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

INSTANTIATE_TEST_SUITE_P(
    Options, GradientTest,
    testing::Values(DataParallelOptions{}, DataParallelOptions{.bucket_cap_mb = 1e-4},
                    DataParallelOptions{.find_unused_parameters = true},
                    DataParallelOptions{.gradient_as_bucket_view = true},
                    DataParallelOptions{.bucket_cap_mb = 1e-4, .static_graph = true}));

TEST(WrapTest, AllRanksStartFromRankZeroAndFrozenParametersToo) {
  std::vector<std::vector<at::Tensor>> parameters(2);
  RunRanks(2, [&](int rank, const GroupPtr& group) {
    auto net = SeededNet(/*seed=*/rank + 5);
    net->first->weight.requires_grad_(false);
    ASSERT_TRUE(Wrap(net, group).ok());
    for (const at::Tensor& p : net->parameters()) parameters[rank].push_back(p.detach());
  });
  for (size_t i = 0; i < parameters[0].size(); ++i) {
    EXPECT_TRUE(at::equal(parameters[0][i], parameters[1][i]));
    EXPECT_TRUE(at::equal(parameters[0][i], SeededNet(5)->parameters()[i]));
  }
}

TEST(WrapTest, ADifferentModelIsNamedOnEveryRank) {
  RunRanks(3, [&](int rank, const GroupPtr& group) {
    auto net = std::make_shared<Net>(rank == 2 ? 9 : 8);
    absl::Status status = Wrap(net, group).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_TRUE(absl::StrContains(status.message(), "'first.weight: Float [8, 4]' on rank 0"))
        << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "'first.weight: Float [9, 4]' on rank 2"))
        << status;
  });
}

TEST(WrapTest, WrappingTwiceReturnsTheWrapperOrSaysSo) {
  RunRanks(2, [&](int, const GroupPtr& group) {
    auto net = SeededNet();
    auto model = Wrap(net, group);
    ASSERT_TRUE(model.ok());
    auto again = Wrap(*model, group);
    EXPECT_EQ(again->get(), model->get());
    absl::Status status = Wrap(net, group).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_TRUE(absl::StrContains(status.message(), "wrapped already")) << status;
    // Once the wrapper is gone, the module can be wrapped anew.
    again->reset();
    model->reset();
    EXPECT_TRUE(Wrap(net, group).ok());
  });
}

TEST(WrapTest, OptionsAndModulesThatMakeNoSenseAreRefused) {
  EXPECT_FALSE(Wrap(SeededNet(), nullptr, {.bucket_cap_mb = 0}).ok());
  EXPECT_FALSE(
      Wrap(SeededNet(), nullptr, {.find_unused_parameters = true, .static_graph = true}).ok());
  RunRanks(2, [](int, const GroupPtr& group) {
    auto frozen = SeededNet();
    for (at::Tensor& parameter : frozen->parameters()) parameter.requires_grad_(false);
    EXPECT_EQ(Wrap(frozen, group).status().code(), absl::StatusCode::kInvalidArgument);
  });
}

TEST(UnusedParameterTest, TheErrorPrintsItsName) {
  RunRanks(2, [](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet(), group);
    model->forward(Input(rank, 0), /*use_skipped=*/false).sum().backward();
    absl::Status status = CatchStatus("", [&] { model->forward(Input(rank, 1), false); });
    EXPECT_TRUE(absl::StrContains(status.message(), "skipped.weight, skipped.bias")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "find_unused_parameters")) << status;
  });
}

TEST(UnusedParameterTest, FindUnusedParametersTrainsOn) {
  RunRanks(2, [](int rank, const GroupPtr& group) {
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

TEST(NoSyncTest, AccumulatesLocallyAndReducesTheSumOnce) {
  const std::vector<at::Tensor> expected = ExpectedGradients(2, 0, /*steps_accumulated=*/3);
  RunRanks(2, [&](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet(), group);
    {
      auto guard = model->no_sync();
      for (int i = 0; i < 2; ++i) model->forward(Input(rank, i), true).pow(2).sum().backward();
    }
    model->forward(Input(rank, 2), true).pow(2).sum().backward();
    ExpectClose(Gradients(*model->module()), expected);
  });
}

TEST(BufferTest, AreBroadcastFromRankZeroBeforeEachForward) {
  for (bool broadcast : {true, false}) {
    std::vector<at::Tensor> means(2);
    RunRanks(2, [&](int rank, const GroupPtr& group) {
      torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3));
      auto model = *Wrap(net, group, {.broadcast_buffers = broadcast});
      for (int step = 0; step < 3; ++step) {
        model->forward(at::randn({5, 4}) + rank).sum().backward();
      }
      means[rank] = net->named_buffers()["1.running_mean"].clone();
      model->parallel().SyncBuffers();
      at::Tensor synced = net->named_buffers()["1.running_mean"];
      EXPECT_EQ(at::equal(synced, means[rank]), rank == 0);
    });
    EXPECT_FALSE(at::equal(means[0], means[1]));  // after a forward they are each rank's own
  }
}

TEST(NoSyncTest, CannotBeCombinedWithAStaticGraph) {
  RunRanks(2, [&](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet(), group, {.static_graph = true});
    auto guard = model->no_sync();
    absl::Status status = CatchStatus("", [&] { model->forward(Input(rank, 0), true); });
    EXPECT_TRUE(absl::StrContains(status.message(), "static_graph")) << status;
  });
}

TEST(WrapTest, ATiedParameterIsOne) {
  auto net = SeededNet();
  net->register_module("again", net->first.ptr());
  EXPECT_EQ(net->parameters().size(), 8);
  EXPECT_EQ(TrainableParameters(*net).size(), 6);
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
  RunRanks(2, [](int rank, const GroupPtr& group) {
    auto model = *Wrap(std::make_shared<Nested>(), group, {.find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      auto output = (*model)(Input(rank, 0), Input(rank, 1), 2.0);
      (output["y"][0].sum() + output["y"][1].sum()).backward();
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
  RunRanks(2, [](int rank, const GroupPtr& group) {
    auto model = *Wrap(std::make_shared<Opaque>(), group);
    for (int step = 0; step < 2; ++step) model->forward(Input(rank, step)).y.sum().backward();
    auto searched = *Wrap(std::make_shared<Opaque>(), group, {.find_unused_parameters = true});
    absl::Status status = CatchStatus("", [&] { searched->forward(Input(rank, 0)); });
    EXPECT_TRUE(absl::StrContains(status.message(), "CollectTensors")) << status;
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

struct Scale : torch::nn::Module {
  Scale() : w(register_parameter("w", at::zeros({1}))) {}
  at::Tensor forward(const at::Tensor& x) { return w * x; }
  at::Tensor w;
};

// The Reducer's own way is to divide first, in a pass of its own; so did a third of the smallest
// float become 0.
TEST(InlineAverageTest, DividesTheSum) {
  if (BackendUnderTest() != "shm")
    GTEST_SKIP() << BackendUnderTest() << " leaves it to the Reducer";
  RunRanks(3, [&](int, const GroupPtr& group) {
    auto model = *Wrap(std::make_shared<Scale>(), group);
    constexpr float kSmallest = std::numeric_limits<float>::denorm_min();
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      model->forward(at::full({1}, kSmallest)).sum().backward();
      EXPECT_EQ(model->module()->w.grad().item<float>(), kSmallest) << "step " << step;
    }
  });
}

// Of the mapping that an address is in, as /proc/self/maps has it.
std::string NameOfMapping(const void* address) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin, end;
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR, &begin, &end) != 2) continue;
    const auto at = reinterpret_cast<uintptr_t>(address);
    if (begin <= at && at < end) return line.substr(std::min(line.size(), line.find('/')));
  }
  return "";
}

TEST(ArenaTest, BucketsLieInSharedMemoryAndHaveTheSameBits) {
  if (BackendUnderTest() != "shm") GTEST_SKIP() << BackendUnderTest() << " has no arena";
  std::map<bool, std::vector<at::Tensor>> gradients;
  for (const bool arena : {true, false}) {
    // As a user can have it.
    if (!arena) c10::utils::set_env("DDP_DISABLE_COMM_MEM", "1");
    RunRanks(2, [&](int rank, const GroupPtr& group) {
      auto model = *Wrap(SeededNet(), group, {.gradient_as_bucket_view = true});
      // The buckets are made anew after the first.
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        model->forward(Input(rank, step), true).pow(2).sum().backward();
        for (const at::Tensor& gradient : Gradients(*model->module())) {
          EXPECT_EQ(absl::StrContains(NameOfMapping(gradient.data_ptr()), "memfd:ddp-shm"), arena)
              << "step " << step << ": " << NameOfMapping(gradient.data_ptr());
          if (rank == 0) gradients[arena].push_back(gradient.clone());
        }
      }
    });
  }
  c10::utils::set_env("DDP_DISABLE_COMM_MEM", "0");
  ASSERT_EQ(gradients[true].size(), gradients[false].size());
  for (size_t i = 0; i < gradients[true].size(); ++i) {
    EXPECT_TRUE(at::equal(gradients[true][i], gradients[false][i])) << "tensor " << i;
  }
}

TEST(WorldOfOneTest, NeedsNoGroup) {
  auto model = *Wrap(SeededNet(), nullptr);
  for (int step = 0; step < 2; ++step) {
    model->zero_grad();
    model->forward(Input(0, step), true).pow(2).sum().backward();
    ExpectClose(Gradients(*model->module()), ExpectedGradients(1, step));
  }
  EXPECT_EQ(model->parallel().world_size(), 1);
}

}  // namespace
}  // namespace ddp
