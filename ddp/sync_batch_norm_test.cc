// The layers on several ranks, whose batches are unequal, against one process with all batches.

#include "ddp/sync_batch_norm.h"

#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "ddp/nets_testing.h"
#include "gtest/gtest.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/container/sequential.h"

namespace ddp {
namespace {

// Layers as members that forward calls, in containers, nested, and one that is used twice.
struct Nested : torch::nn::Module {
  struct Inner : torch::nn::Module {
    Inner() { register_module("norm", norm); }
    at::Tensor forward(const at::Tensor& x) { return norm(x * 2); }
    torch::nn::BatchNorm2d norm{3};
  };
  Nested() {
    member = register_module("member", torch::nn::BatchNorm2d(3));
    inner = register_module("inner", std::make_shared<Inner>());
    sequence = register_module(
        "sequence", torch::nn::Sequential(torch::nn::BatchNorm2d(3), torch::nn::BatchNorm2d(3)));
  }
  at::Tensor forward(const at::Tensor& x) {
    return sequence->forward(member(inner->forward(member(x)).sin()).exp());
  }
  torch::nn::BatchNorm2d member{nullptr};
  std::shared_ptr<Inner> inner;
  torch::nn::Sequential sequence{nullptr};
};

struct Case {
  std::string name;
  std::vector<int64_t> shape;  // of an input, without the batch
  std::function<std::shared_ptr<torch::nn::Module>()> make;
  std::function<at::Tensor(torch::nn::Module&, const at::Tensor&)> forward;
};

template <typename Layer>
Case CaseOf(const std::string& name, std::vector<int64_t> shape,
            const torch::nn::BatchNormOptions& options) {
  return {name, std::move(shape),
          [options] {
            auto layer = std::make_shared<Layer>(options);
            const at::NoGradGuard no_grad;
            if (options.affine()) {
              layer->weight.copy_(at::linspace(0.5, 2, options.num_features()));
              layer->bias.copy_(at::linspace(-1, 1, options.num_features()));
            }
            return std::static_pointer_cast<torch::nn::Module>(layer);
          },
          [](torch::nn::Module& module, const at::Tensor& x) {
            return dynamic_cast<Layer&>(module).forward(x);
          }};
}

std::vector<Case> Cases() {
  using torch::nn::BatchNormOptions;
  return {CaseOf<torch::nn::BatchNorm1dImpl>("1d", {4}, BatchNormOptions(4)),
          CaseOf<torch::nn::BatchNorm1dImpl>("1d of sequences", {4, 5}, BatchNormOptions(4)),
          CaseOf<torch::nn::BatchNorm2dImpl>("2d", {3, 4, 5}, BatchNormOptions(3)),
          CaseOf<torch::nn::BatchNorm3dImpl>("3d", {2, 3, 2, 3}, BatchNormOptions(2)),
          CaseOf<torch::nn::BatchNorm2dImpl>("not affine", {3, 4, 5},
                                             BatchNormOptions(3).affine(false)),
          CaseOf<torch::nn::BatchNorm2dImpl>("no running statistics", {3, 4, 5},
                                             BatchNormOptions(3).track_running_stats(false)),
          CaseOf<torch::nn::BatchNorm2dImpl>("average of all batches", {3, 4, 5},
                                             BatchNormOptions(3).momentum(std::nullopt)),
          {"nested",
           {3, 4, 5},
           [] { return std::make_shared<Nested>(); },
           [](torch::nn::Module& module, const at::Tensor& x) {
             return dynamic_cast<Nested&>(module).forward(x);
           }}};
}

struct Result {
  std::vector<at::Tensor> outputs;  // of each step
  std::vector<at::Tensor> input_gradients;
  std::vector<at::Tensor> gradients;  // of parameters, over all steps
  std::vector<at::Tensor> buffers;
};

// Far from 0, for a variance that a difference of squares would not give.
at::Tensor Values(const Case& one, int64_t batch, int step, at::ScalarType dtype) {
  std::vector<int64_t> shape = one.shape;
  shape.insert(shape.begin(), batch);
  int64_t numel = 1;
  for (int64_t size : shape) numel *= size;
  return (at::arange(numel, at::kDouble) * 12.9898 + step).sin().add(5).view(shape).to(dtype);
}

// `begin`, `end`: which part of the batch this rank has.
Result Train(const Case& one, torch::nn::Module& module, int64_t batch, int64_t begin, int64_t end,
             at::ScalarType dtype, bool channels_last = false) {
  Result result;
  for (int step = 0; step < 2; ++step) {
    at::Tensor x = Values(one, batch, step, dtype).slice(0, begin, end).clone();
    if (channels_last) x = x.contiguous(at::MemoryFormat::ChannelsLast);
    x.requires_grad_(true);
    const at::Tensor y = one.forward(module, x);
    // Its gradient differs from value to value.
    const at::Tensor factors =
        Values(one, batch, step + 7, dtype).slice(0, begin, end).cos().detach();
    (y * factors).sum().backward();
    result.outputs.push_back(y.detach());
    result.input_gradients.push_back(x.grad());
  }
  for (const at::Tensor& parameter : module.parameters()) {
    result.gradients.push_back(parameter.grad());
  }
  for (const at::Tensor& buffer : module.buffers()) result.buffers.push_back(buffer);
  return result;
}

void ExpectNear(const at::Tensor& a, const at::Tensor& b, double tolerance,
                const std::string& what) {
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  if (a.numel() == 0) return;
  const double scale = std::max(1.0, b.abs().max().item<double>());
  EXPECT_LE((a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>() / scale, tolerance)
      << what;
}

// Bounds of the ranks' parts of a batch. `last`: the last rank's number of examples; -1: any.
std::vector<int64_t> Bounds(int world_size, int64_t last) {
  std::vector<int64_t> bounds = {0, 2};
  for (int rank = 1; rank < world_size; ++rank) {
    const bool is_given = last >= 0 && rank == world_size - 1;
    bounds.push_back(bounds.back() + (is_given ? last : 2 + rank));
  }
  return bounds;
}

void ExpectEqualToOneProcess(int world_size, const Case& one, at::ScalarType dtype,
                             double tolerance, int64_t last, bool channels_last) {
  SCOPED_TRACE(absl::StrCat(one.name, " on ", world_size, " ranks"));
  const std::vector<int64_t> bounds = Bounds(world_size, last);
  const int64_t batch = bounds.back();
  const auto whole_module = one.make();
  whole_module->to(dtype);
  const Result whole = Train(one, *whole_module, batch, 0, batch, dtype);
  RunRanks(world_size, [&](int rank, const GroupPtr& group) {
    const auto module = one.make();
    module->to(dtype);
    const auto layers = ConvertSyncBatchNorm(*module, "torch", group);
    ASSERT_TRUE(layers.ok()) << layers.status();
    EXPECT_GT(*layers, 0);
    const Result part =
        Train(one, *module, batch, bounds[rank], bounds[rank + 1], dtype, channels_last);
    for (size_t step = 0; step < whole.outputs.size(); ++step) {
      const auto cut = [&](const at::Tensor& tensor) {
        return tensor.slice(0, bounds[rank], bounds[rank + 1]);
      };
      ExpectNear(part.outputs[step], cut(whole.outputs[step]), tolerance, "output");
      ExpectNear(part.input_gradients[step], cut(whole.input_gradients[step]), tolerance,
                 "input gradient");
    }
    ASSERT_EQ(part.gradients.size(), whole.gradients.size());
    for (size_t i = 0; i < part.gradients.size(); ++i) {
      std::vector<at::Tensor> sum = {part.gradients[i].to(at::kDouble).contiguous().clone()};
      group->allreduce(sum)->wait();
      ExpectNear(sum[0], whole.gradients[i], tolerance, "gradient");
    }
    ASSERT_EQ(part.buffers.size(), whole.buffers.size());
    for (size_t i = 0; i < part.buffers.size(); ++i) {
      ExpectNear(part.buffers[i], whole.buffers[i], tolerance, "buffer");
      const at::Tensor mine = part.buffers[i].to(at::kDouble);
      std::vector<at::Tensor> of_rank_0 = {mine.clone()};
      group->broadcast(of_rank_0)->wait();
      EXPECT_TRUE(at::equal(mine, of_rank_0[0])) << "differs between ranks";
    }
  });
}

void ExpectEqualToOneProcess(const Case& one, at::ScalarType dtype, double tolerance,
                             int64_t last = -1, bool channels_last = false) {
  for (const int world_size : {2, 3}) {
    ExpectEqualToOneProcess(world_size, one, dtype, tolerance, last, channels_last);
  }
}

TEST(SyncBatchNormTest, EqualsOneProcessWithTheWholeBatch) {
  for (const Case& one : Cases()) {
    // Through five layers, one process's own rounding is larger.
    ExpectEqualToOneProcess(one, at::kFloat, one.name == "nested" ? 1e-4 : 1e-5);
    ExpectEqualToOneProcess(one, at::kDouble, 1e-12);
  }
}

TEST(SyncBatchNormTest, ARankMayHaveAnEmptyBatch) {
  ExpectEqualToOneProcess(Cases()[2], at::kDouble, 1e-12, /*last=*/0);
}

TEST(SyncBatchNormTest, ARankMayHaveOneValuePerChannel) {
  using torch::nn::BatchNormOptions;
  for (const Case& one :
       {CaseOf<SyncBatchNorm1dImpl>("1d", {4}, BatchNormOptions(4)),
        CaseOf<SyncBatchNorm1dImpl>("1d of sequences", {4, 1}, BatchNormOptions(4)),
        CaseOf<SyncBatchNorm2dImpl>("2d", {3, 1, 1}, BatchNormOptions(3).momentum(std::nullopt)),
        CaseOf<SyncBatchNorm3dImpl>("3d", {2, 1, 1, 1}, BatchNormOptions(2).affine(false))}) {
    ExpectEqualToOneProcess(one, at::kDouble, 1e-12, /*last=*/1);
    ExpectEqualToOneProcess(one, at::kDouble, 1e-12, /*last=*/0);
    ExpectEqualToOneProcess(one, at::kDouble, 1e-12);
  }
}

TEST(SyncBatchNormTest, OurLayersAreTorchsUntilTheyAreConverted) {
  SyncBatchNorm2d ours(3);
  torch::nn::BatchNorm2d torchs(3);
  const at::Tensor x = Values(Cases()[2], 4, 0, at::kFloat);
  for (const bool train : {true, false}) {
    ours->train(train);
    torchs->train(train);
    EXPECT_TRUE(at::equal(ours(x), torchs(x)));
  }
  EXPECT_THROW(ours(x[0]), c10::Error);
  torch::nn::Sequential sequence(SyncBatchNorm2d(3));
  const auto clone = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(sequence->clone());
  EXPECT_TRUE(at::equal(clone->forward(x), sequence->forward(x)));
}

// The other ranks would wait for it in the layer's all-gather.
TEST(SyncBatchNormTest, OneValuePerChannelInALayerOfTorchsFailsOnAllRanks) {
  const auto of_size = [](int64_t n) { return at::arange(n * 4, at::kFloat).sin().view({n, 4}); };
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3),
                              torch::nn::Linear(3, 3), torch::nn::BatchNorm1d(3));
    ASSERT_TRUE(ConvertSyncBatchNorm(*net, "torch", group).ok());
    auto model = *Wrap(net, group);
    model->forward(of_size(4)).sum().backward();
    for (const bool all : {false, true}) {
      const int64_t n = all || rank == 1 ? 1 : 4;
      const absl::Status status = CatchStatus("", [&] { model->forward(of_size(n)); });
      const std::string expected =
          all ? absl::StrCat(
                    "rank ", rank,
                    ": sync_bn: one of layers '1', '3' has one value per channel on rank 0, 1")
              : absl::StrCat("rank ", rank,
                             ": sync_bn: layer '1' has one value per channel on rank 1,");
      EXPECT_TRUE(absl::StrContains(status.message(), expected)) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "drop_last")) << status;
    }
    // The group still works.
    model->forward(of_size(4)).sum().backward();
  });
}

TEST(SyncBatchNormTest, RanksInOtherLayersAndSecondDerivativesAreRefused) {
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    torch::nn::Sequential net(torch::nn::BatchNorm1d(3), torch::nn::BatchNorm1d(3));
    ASSERT_TRUE(ConvertSyncBatchNorm(*net, "torch", group).ok());
    const at::Tensor x = at::arange(12, at::kFloat).view({4, 3}).requires_grad_();
    const absl::Status other = CatchStatus(
        "", [&] { net->ptr(rank == 0 ? 0 : 1)->as<torch::nn::BatchNorm1dImpl>()->forward(x); });
    EXPECT_TRUE(absl::StrContains(other.message(), "ranks must run the same layers")) << other;
    const at::Tensor y = net->forward(x).square().sum();
    const absl::Status second = CatchStatus("", [&] {
      torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true);
    });
    EXPECT_TRUE(absl::StrContains(second.message(), "no second derivative")) << second;
  });
}

TEST(SyncBatchNormTest, ChannelsLast) {
  ExpectEqualToOneProcess(Cases()[2], at::kFloat, 1e-5, /*last=*/-1,
                          /*channels_last=*/true);
}

TEST(SyncBatchNormTest, BFloat16) {
  // A bfloat16 has 8 bits; one process rounds its running statistics and parameters to it, too.
  ExpectEqualToOneProcess(Cases()[2], at::kBFloat16, 1.0 / 32);
}

TEST(SyncBatchNormTest, NoCommunicationInEvalMode) {
  for (const Case& one : Cases()) {
    SCOPED_TRACE(one.name);
    RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
      const auto module = one.make(), plain = one.make();
      ASSERT_TRUE(ConvertSyncBatchNorm(*module, "torch", group).ok());
      module->eval();
      plain->eval();
      if (rank != 0) return;  // rank 0 would wait
      const at::Tensor x = Values(one, 4, 0, at::kFloat);
      EXPECT_TRUE(at::equal(one.forward(*module, x), one.forward(*plain, x)));
    });
  }
}

TEST(SyncBatchNormTest, OtherLayersStayAsTheyAre) {
  const Case one = Cases()[2];
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    const auto converted = one.make(), plain = one.make();
    ASSERT_TRUE(ConvertSyncBatchNorm(*converted, "torch", group).ok());
    if (rank != 0) return;
    at::Tensor x = Values(one, 4, 0, at::kFloat).requires_grad_(true);
    const at::Tensor y = one.forward(*plain, x);
    y.sin().sum().backward();
    const auto expected = at::native_batch_norm(x, plain->parameters()[0], plain->parameters()[1],
                                                {}, {}, /*training=*/true, 0.1, 1e-5);
    EXPECT_TRUE(at::allclose(y, std::get<0>(expected)));
    EXPECT_TRUE(x.grad().defined());
    // A copy is another module.
    EXPECT_NO_THROW(one.forward(*converted->clone(), x));
  });
}

TEST(SyncBatchNormTest, EmptyBatchesOnAllRanksAreRefused) {
  const Case one = Cases()[2];
  RunRanks(WorldSize(), [&](int, const GroupPtr& group) {
    const auto module = one.make();
    ASSERT_TRUE(ConvertSyncBatchNorm(*module, "torch", group).ok());
    const at::Tensor empty = at::empty({0, 3, 4, 5});
    try {
      one.forward(*module, empty);
      ADD_FAILURE() << "not refused";
    } catch (const c10::Error& error) {
      EXPECT_TRUE(absl::StrContains(error.what(), "Expected more than 1 value per channel"))
          << error.what();
    }
  });
}

TEST(SyncBatchNormTest, LayersDoNotKeepTheirGroup) {
  const Case one = Cases()[2];
  const auto module = one.make();
  std::optional<c10::weak_intrusive_ptr<c10d::ProcessGroup>> first;
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    if (rank != 0) return;
    ASSERT_TRUE(ConvertSyncBatchNorm(*module, "torch", group).ok());
    first.emplace(group);
  });
  EXPECT_TRUE(first->expired());
  EXPECT_THROW(one.forward(*module, Values(one, 4, 0, at::kFloat)), c10::Error);
}

TEST(SyncBatchNormTest, RefusesByName) {
  RunRanks(WorldSize(), [](int, const GroupPtr& group) {
    Nested net;
    const auto unknown = ConvertSyncBatchNorm(*std::make_shared<Nested>(), "mmcv", group).status();
    EXPECT_EQ(unknown.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(unknown.message(), "sync_bn=mmcv is unknown; there is: torch");
    const auto nameless = std::make_shared<torch::nn::SequentialImpl>(
        torch::nn::Linear(2, 2),
        torch::nn::BatchNorm1d(
            torch::nn::BatchNormOptions(2).affine(false).track_running_stats(false)));
    const auto status = ConvertSyncBatchNorm(*nameless, "torch", group).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(absl::StrContains(status.message(), "layer '1' has neither")) << status;
  });
}

}  // namespace
}  // namespace ddp
