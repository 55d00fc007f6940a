// What Wrap does and refuses, with a world size of 1 and larger ones.

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "base/option_error.h"
#include "base/status.h"
#include "ddp/all_gather.h"
#include "ddp/collective_status.h"
#include "ddp/model_wrapper.h"
#include "ddp/nets_testing.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/conv.h"
#include "torch/nn/modules/embedding.h"

namespace ddp {
namespace {

using absl::StatusCode;
using absl::StrContains;

// Calls `body` without a group, for a world size of 1, and with one.
void InWorldsOfOneAndMore(const std::function<void(const GroupPtr& group)>& body) {
  body(nullptr);
  RunRanks(WorldSize(), [&](int, const GroupPtr& group) { body(group); });
}

TEST(WrapTest, AllRanksStartFromRankZeroAndFrozenParametersToo) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto net = SeededNet(/*seed=*/rank + 5);
    net->first->weight.requires_grad_(false);
    ASSERT_TRUE(Wrap(net, group).ok());
    const std::vector<at::Tensor> mine = net->parameters(), first = SeededNet(5)->parameters();
    ASSERT_EQ(mine.size(), first.size());
    for (size_t i = 0; i < mine.size(); ++i) EXPECT_TRUE(at::equal(mine[i], first[i])) << i;
  });
}

TEST(WrapTest, WithoutInitSyncNothingIsSent) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto net = SeededNet(/*seed=*/rank + 5);
    // Neither collective: rank 1 makes twice as many.
    for (int i = 0; i <= rank; ++i) ASSERT_TRUE(Wrap(net, group, {.init_sync = false}).ok());
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      EXPECT_TRUE(at::equal(net->parameters()[i], SeededNet(rank + 5)->parameters()[i]));
    }
  });
}

TEST(WrapTest, ADifferentModelIsNamedOnEveryRank) {
  RunRanks(3, [&](int rank, const GroupPtr& group) {
    auto net = std::make_shared<Net>(rank == 2 ? 9 : 8);
    absl::Status status = Wrap(net, group).status();
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
    EXPECT_TRUE(StrContains(status.message(), "'first.weight: Float [8, 4]' on rank 0")) << status;
    EXPECT_TRUE(StrContains(status.message(), "'first.weight: Float [9, 4]' on rank 2")) << status;
  });
}

// Buckets of gradients are laid out by strides, so that the ranks would add different elements.
TEST(WrapTest, AnotherMemoryFormatIsNamed) {
  const auto conv = [](bool channels_last, bool frozen) {
    torch::nn::Conv2d net(3, 4, 3);
    at::NoGradGuard no_grad;
    if (channels_last) {
      net->weight.set_data(net->weight.contiguous(at::MemoryFormat::ChannelsLast));
    }
    if (frozen) net->weight.requires_grad_(false);
    return net;
  };
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    const absl::Status status = Wrap(conv(rank == 1, false), group).status();
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
    EXPECT_TRUE(StrContains(status.message(), "'weight: Float [4, 3, 3, 3]' on rank 0")) << status;
    EXPECT_TRUE(StrContains(status.message(),
                            "'weight: Float [4, 3, 3, 3] strides [27, 1, 9, 3]' on rank 1"))
        << status;
    EXPECT_TRUE(Wrap(conv(true, false), group).ok());
    // Nothing of a frozen one is laid out.
    EXPECT_TRUE(Wrap(conv(rank == 1, true), group).ok());
  });
}

TEST(WrapTest, TheErrorOfOneRankIsEveryRanks) {
  RunRanks(3, [&](int rank, const GroupPtr& group) {
    const auto wrap = [&](const DataParallelOptions& on_rank_1) {
      return Wrap(SeededNet(), group, rank == 1 ? on_rank_1 : DataParallelOptions{}).status();
    };
    const std::string from = rank == 1 ? "" : "rank 1: ";
    absl::Status status = wrap({.ignored = {"weight"}});
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(absl::StartsWith(status.message(), from + "ignored: ")) << status;
    EXPECT_FALSE(IsFromCollective(status));
    status = wrap({.bucket_cap_mb = -1});
    EXPECT_EQ(status.message(), from + "bucket_cap_mb=-1 must be positive, in MiB");
    EXPECT_EQ(ProblemOf(status).has_value(), rank == 1);
    EXPECT_TRUE(wrap({}).ok());
  });
}

TEST(WrapTest, AFailureOfCommunicationIsMarked) {
  RunRanks(WorldSize(), [](int, const GroupPtr& group) {
    group->abort();
    const absl::Status status = Wrap(SeededNet(), group).status();
    EXPECT_FALSE(status.ok());
    EXPECT_TRUE(IsFromCollective(status)) << status;
  });
}

TEST(WrapTest, TheWrapperKnowsItsModule) {
  InWorldsOfOneAndMore([](const GroupPtr& group) {
    auto net = SeededNet();
    auto model = *Wrap(net, group);
    const ModelWrapper& wrapper = model->parallel();
    EXPECT_EQ(wrapper.module(), net.get());
  });
}

TEST(WrapTest, WrappingTwiceReturnsTheWrapperOrSaysSo) {
  InWorldsOfOneAndMore([](const GroupPtr& group) {
    auto net = SeededNet();
    auto model = Wrap(net, group);
    ASSERT_TRUE(model.ok());
    auto again = Wrap(*model, group);
    EXPECT_EQ(again->get(), model->get());
    absl::Status status = Wrap(net, group).status();
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
    EXPECT_TRUE(StrContains(status.message(), "wrapped already")) << status;
    // After the wrapper is destroyed, the module can be wrapped again.
    again->reset();
    model->reset();
    EXPECT_TRUE(Wrap(net, group).ok());
  });
}

TEST(WrapTest, OptionsAndModulesThatMakeNoSenseAreRefused) {
  InWorldsOfOneAndMore([](const GroupPtr& group) {
    const auto message = [&](const DataParallelOptions& options) {
      const absl::Status status = Wrap(SeededNet(), group, options).status();
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      return std::string(status.message());
    };
    EXPECT_TRUE(StrContains(message({.bucket_cap_mb = 0}), "bucket_cap_mb=0 must be positive"));
    EXPECT_TRUE(
        StrContains(message({.device_ids = {0, 1}}), "device_ids=0,1 is more than one device"));
    EXPECT_TRUE(StrContains(message({.device_ids = {0}}), "'first.weight' is on cpu"));
    EXPECT_TRUE(StrContains(message({.static_graph = true, .reduce_gradients = false}),
                            "static_graph=true has no effect with reduce_gradients=false"));
    for (const DataParallelOptions& options :
         {DataParallelOptions{.device_ids = {0, 1}}, {.device_ids = {0}}}) {
      const auto problem = ProblemOf(Wrap(SeededNet(), group, options).status());
      ASSERT_TRUE(problem.has_value());
      EXPECT_EQ(problem->path, "device_ids");
    }
    EXPECT_TRUE(StrContains(message({.ignored = {"weight"}}), "no parameter or buffer 'weight'"));
    EXPECT_TRUE(
        StrContains(message({.ignored = {"first.weight", "first.bias", "second.weight",
                                         "second.bias", "skipped.weight", "skipped.bias"}}),
                    "no parameter of the module requires a gradient, but for those in `ignored`"));

    auto frozen = SeededNet();
    for (at::Tensor& parameter : frozen->parameters()) parameter.requires_grad_(false);
    EXPECT_EQ(Wrap(frozen, group).status().code(), StatusCode::kInvalidArgument);
    auto scattered = SeededNet();
    scattered->register_parameter("elsewhere", at::empty({2}, at::kMeta));
    for (const bool trains : {true, false}) {
      scattered->named_parameters()["elsewhere"].requires_grad_(trains);
      const absl::Status status = Wrap(scattered, group).status();
      EXPECT_TRUE(
          StrContains(status.message(), trains ? "'elsewhere' is on meta, 'first.weight' on cpu"
                                               : "'elsewhere' on meta"))
          << status;
    }
    EXPECT_TRUE(Wrap(scattered, group, {.ignored = {"elsewhere"}}).ok());
  });
}

TEST(WrapTest, ATiedParameterIsOne) {
  auto net = SeededNet();
  net->register_module("again", net->first.ptr());
  EXPECT_EQ(net->parameters().size(), 8);
  EXPECT_EQ(TrainableParameters(*net).size(), 6);
}

// What a forward with gradients throws; "" if nothing.
std::string ErrorOfForward(DistributedDataParallel<Net>& model, int rank) {
  return std::string(CatchStatus("", [&] { model.forward(Input(rank, 0), true); }).message());
}

TEST(WrapTest, AParameterThatIsUnfrozenLaterIsNamed) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto net = SeededNet();
    net->first->weight.requires_grad_(false);
    auto model = *Wrap(net, group);
    model->forward(Input(rank, 0), true).sum().backward();
    net->first->weight.requires_grad_(true);
    for (int i = 0; i < 2; ++i) {
      const std::string error = ErrorOfForward(*model, rank);
      EXPECT_TRUE(
          StrContains(error, "parameter 'first.weight' requires a gradient, but was frozen"))
          << error;
    }
    {
      const at::NoGradGuard no_grad;
      EXPECT_EQ(ErrorOfForward(*model, rank), "");
    }
    // Its remedy.
    model.reset();
    model = *Wrap(net, group);
    model->zero_grad();
    model->forward(Input(rank, 0), true).pow(2).sum().backward();
    ExpectClose(Gradients(*net), ExpectedGradients(WorldSize(), 0));
  });
}

TEST(WrapTest, AParameterThatIsAddedLaterIsNamed) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto net = SeededNet();
    auto model = *Wrap(net, group);
    EXPECT_EQ(ErrorOfForward(*model, rank), "");
    net->second = net->replace_module("second", torch::nn::Linear(8, 2));
    const std::string error = ErrorOfForward(*model, rank);
    EXPECT_TRUE(
        StrContains(error, "parameter 'second.weight' requires a gradient, but was not part"))
        << error;
  });
}

TEST(WrapTest, WhichParametersAreTrainedMayChangeOtherwise) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto net = SeededNet();
    net->skipped->weight.requires_grad_(false);
    net->register_module("again", net->first.ptr());
    auto model = *Wrap(net, group, {.find_unused_parameters = true, .ignored = {"skipped.weight"}});
    for (const bool trains : {true, false, true}) {
      net->second->weight.requires_grad_(trains);   // one of the wrapped ones
      net->skipped->weight.requires_grad_(trains);  // an ignored one
      model->zero_grad();
      model->forward(Input(rank, 0), true).sum().backward();
    }
    EXPECT_EQ(ErrorOfForward(*model, rank), "");
  });
  // Nothing is reduced.
  auto net = SeededNet();
  net->first->weight.requires_grad_(false);
  auto model = *Wrap(net, nullptr);
  net->first->weight.requires_grad_(true);
  EXPECT_EQ(ErrorOfForward(*model, 0), "");
}

TEST(WrapTest, AnEmbeddingWithMaxNormIsReported) {
  using torch::nn::EmbeddingOptions;
  const auto report_of = [](const EmbeddingOptions& options,
                            const std::vector<std::string>& ignored) {
    testing::internal::CaptureStderr();
    RunRanks(WorldSize(), [&](int, const GroupPtr& group) {
      torch::nn::Sequential net(torch::nn::Embedding(options), torch::nn::Linear(3, 2));
      EXPECT_TRUE(Wrap(net, group, {.ignored = ignored}).ok());
    });
    return testing::internal::GetCapturedStderr();
  };
  const EmbeddingOptions limited = EmbeddingOptions(5, 3).max_norm(1);
  EXPECT_TRUE(
      StrContains(report_of(limited, {}), "'0.weight' belongs to an embedding with max_norm"));
  EXPECT_FALSE(StrContains(report_of(limited, {"0.weight"}), "max_norm"));
  EXPECT_FALSE(StrContains(report_of(EmbeddingOptions(5, 3), {}), "max_norm"));
}

TEST(WrapTest, IgnoredParametersAndBuffersStayEachRanksOwn) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3),
                              torch::nn::Linear(3, 3));
    {
      at::NoGradGuard no_grad;
      for (at::Tensor& parameter : net->parameters()) parameter.fill_(0.1 * (rank + 1));
      net->named_buffers()["1.running_mean"].fill_(rank);
    }
    // This buffer even has another shape on each rank.
    net->register_buffer("own", at::full({rank + 1}, rank));
    auto model = *Wrap(net, group, {.ignored = {"0.weight", "1.running_mean", "own"}});
    EXPECT_TRUE(net->named_parameters()["0.weight"].eq(0.1f * (rank + 1)).all().item<bool>());
    EXPECT_TRUE(net->named_parameters()["0.bias"].eq(0.1f).all().item<bool>());
    EXPECT_TRUE(net->named_buffers()["1.running_mean"].eq(rank).all().item<bool>());

    const auto of_all_ranks = [&](const at::Tensor& gradient) {
      return AllGather(*group, gradient.contiguous());
    };
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      EXPECT_FALSE(net->named_parameters()["0.weight"].grad().defined());
      model->forward(at::arange(20, at::kFloat).view({5, 4}).sin() + rank).pow(2).sum().backward();
      const auto own = of_all_ranks(net->named_parameters()["0.weight"].grad());
      EXPECT_FALSE(at::allclose(own[0], own[1]));
      const auto averaged = of_all_ranks(net->named_parameters()["2.bias"].grad());
      EXPECT_TRUE(at::equal(averaged[0], averaged[1]));
    }
    model->parallel().SyncBuffers();
    EXPECT_EQ(net->named_buffers()["own"].numel(), rank + 1);
    EXPECT_EQ(model->parallel().parameters().size(), net->parameters().size());
  });
}

TEST(LoggingTest, TheLoggersDataIsReadable) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet(), group, {.find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) model->forward(Input(rank, step), true).sum().backward();
    c10::DDPLoggingData data = model->parallel().GetDDPLoggingData();
    EXPECT_EQ(data.ints_map["world_size"], WorldSize());
    EXPECT_EQ(data.ints_map["rank"], rank);
    EXPECT_EQ(data.ints_map["find_unused_parameters"], 1);
    EXPECT_EQ(data.ints_map["num_parameter_tensors"], 6);
    EXPECT_GT(data.ints_map["iteration"], 0);
  });
  EXPECT_TRUE((*Wrap(SeededNet(), nullptr))->parallel().GetDDPLoggingData().ints_map.empty());
}

}  // namespace
}  // namespace ddp
