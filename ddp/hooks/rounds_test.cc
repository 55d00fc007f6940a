#include "ddp/hooks/rounds.h"

#include <atomic>

#include "base/status.h"
#include "ddp/hooks/hooks_testing.h"
#include "torch/nn/modules/embedding.h"

namespace ddp::hooks {
namespace {

// Sums in `rounds` all-reduces, each of which multiplies by the world size. Notes the order.
class ManyRoundsHook final : public RoundsHook {
 public:
  ManyRoundsHook(const GroupPtr& group, int rounds, std::vector<std::pair<int, int>>* order)
      : RoundsHook(group), rounds_(rounds), order_(order) {}

 protected:
  struct Bucket final : BucketRounds {
    WorkPtr Next() override {
      if (round == hook->rounds_) return nullptr;
      if (hook->order_ != nullptr) hook->order_->emplace_back(round, index);
      if (round == hook->fail_at) TORCH_CHECK(false, "round ", round, " fails");
      ++round;
      return hook->Sum(buffer);
    }
    ManyRoundsHook* hook = nullptr;
    at::Tensor buffer;
    int index = 0, round = 0;
  };

  std::unique_ptr<BucketRounds> Begin(c10d::GradBucket& bucket) override {
    auto rounds = std::make_unique<Bucket>();
    rounds->hook = this;
    rounds->buffer = bucket.getBuffer();
    rounds->index = static_cast<int>(bucket.getIndex());
    return rounds;
  }

 public:
  std::atomic<int> fail_at = -1;

 private:
  const int rounds_;
  std::vector<std::pair<int, int>>* const order_;
};

const Shapes kShapes = {{40}, {30}, {20}, {10}, {50}};

class RoundsInGraphTest : public testing::TestWithParam<bool> {
 protected:
  // 20 bytes: each parameter is a bucket once buckets are rebuilt.
  DataParallelOptions options() const {
    return {.bucket_cap_mb = 2e-5, .static_graph = GetParam()};
  }
};

TEST_P(RoundsInGraphTest, CollectivesAreInOneOrder) {
  // Of a static graph the second backward has the order of gradients.
  const int first_rebuilt = GetParam() ? 2 : 1;
  RunRanks(3, [&](int rank, const GroupPtr& group) {
    std::vector<std::pair<int, int>> order;
    auto model = *Wrap(std::make_shared<Given>(kShapes), group, options());
    ASSERT_TRUE(model->register_comm_hook(std::make_unique<ManyRoundsHook>(group, 3, &order)).ok());
    for (int step = 0; step < 20; ++step) {
      order.clear();
      model->zero_grad();
      const std::vector<at::Tensor> own = RandomGradients(kShapes, rank, step);
      model->forward(own).backward();
      std::vector<at::Tensor> expected = MeanOfRandom(kShapes, 3, step);
      for (at::Tensor& tensor : expected) tensor *= 27;
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(at::allclose(model->module()->values[i].grad(), expected[i], 1e-4, 1e-4));
      }
      const int buckets = static_cast<int>(order.size()) / 3;
      EXPECT_EQ(buckets, step < first_rebuilt ? 1 : 5);
      for (int i = 0; i < 3 * buckets; ++i) {
        EXPECT_EQ(order[i], std::make_pair(i / buckets, i % buckets)) << "step " << step;
      }
    }
    EXPECT_EQ(model->parallel().comm_bytes(), 20 * 3 * 4 * 150);
  });
}

TEST_P(RoundsInGraphTest, AnErrorInALaterRoundEndsTheFirstBackward) {
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    auto model = *Wrap(std::make_shared<Given>(kShapes), group, options());
    auto hook = std::make_unique<ManyRoundsHook>(group, 3, nullptr);
    hook->fail_at = 1;
    ASSERT_TRUE(model->register_comm_hook(std::move(hook)).ok());
    const absl::Status status =
        CatchStatus("", [&] { model->forward(RandomGradients(kShapes, rank, 1)).backward(); });
    EXPECT_NE(status.message().find("round 1 fails"), absl::string_view::npos) << status;
  });
}

INSTANTIATE_TEST_SUITE_P(Graphs, RoundsInGraphTest, testing::Bool(),
                         [](const testing::TestParamInfo<bool>& info) {
                           return info.param ? "Static" : "Dynamic";
                         });

// A hook may make no collective at all.
TEST(RoundsTest, NoRoundLeavesTheBucketAsItIs) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto model = *Wrap(std::make_shared<Given>(kShapes), group);
    ASSERT_TRUE(
        model->register_comm_hook(std::make_unique<ManyRoundsHook>(group, 0, nullptr)).ok());
    const std::vector<at::Tensor> own = RandomGradients(kShapes, rank, 0);
    model->forward(own).backward();
    ExpectBits(Gradients(*model->module()), own);
  });
}

TEST(RoundsTest, AnErrorInALaterRoundEndsBackward) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto model = *Wrap(std::make_shared<Given>(kShapes), group, {.bucket_cap_mb = 2e-5});
    auto hook = std::make_unique<ManyRoundsHook>(group, 3, nullptr);
    ManyRoundsHook* const observed = hook.get();
    ASSERT_TRUE(model->register_comm_hook(std::move(hook)).ok());
    model->forward(RandomGradients(kShapes, rank, 0)).backward();
    observed->fail_at = 1;
    try {
      model->forward(RandomGradients(kShapes, rank, 1)).backward();
      ADD_FAILURE() << "backward succeeds";
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what()).find("round 1 fails"), std::string::npos) << error.what();
    }
  });
}

// As a caller does that runs a hook for a rank which has no backward.
TEST(RoundsTest, OutsideOfBackwardTheLastBucketWaits) {
  RunRanks(3, [](int rank, const GroupPtr& group) {
    ManyRoundsHook hook(group, 2, nullptr);
    std::vector<at::Tensor> buffers = {at::full({5}, rank), at::full({3}, 1.0)};
    std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures;
    for (size_t i = 0; i < buffers.size(); ++i) {
      const std::vector<int64_t> sizes = buffers[i].sizes().vec();
      c10d::GradBucket bucket(i, buffers.size(), buffers[i], {0}, {static_cast<size_t>(sizes[0])},
                              {sizes}, {buffers[i]}, std::nullopt);
      futures.push_back(hook.runHook(bucket));
    }
    EXPECT_TRUE(futures[0]->completed() && futures[1]->completed());
    EXPECT_TRUE(at::equal(hook.parseHookResult(futures[0]->value()), at::full({5}, 9)));
    EXPECT_TRUE(at::equal(buffers[1], at::full({3}, 9.0)));
  });
}

struct Table : torch::nn::Module {
  at::Tensor forward(const at::Tensor& rows) {
    return (embedding->forward(rows) * at::arange(3)).sum() +
           linear->forward(at::ones({1, 4})).sum();
  }
  torch::nn::Embedding embedding{register_module(
      "embedding", torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 3).sparse(true)))};
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(4, 2))};
};

TEST(RoundsTest, SparseGradientsAreAveraged) {
  for (const char* name : {"bf16_compress", "powersgd"}) {
    RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
      auto model = *Wrap(std::make_shared<Table>(), group);
      ASSERT_TRUE(Register({.name = name}, group, model->parallel()).ok());
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        model->forward(at::full({2}, rank, at::kLong)).backward();
        at::Tensor expected = at::zeros({10, 3});
        for (int i = 0; i < WorldSize(); ++i) {
          expected[i] = 2 * at::arange(3) / static_cast<double>(WorldSize());
        }
        const at::Tensor gradient = model->module()->embedding->weight.grad();
        EXPECT_TRUE(at::allclose(gradient.to_dense(), expected)) << name << gradient;
      }
    });
  }
}

}  // namespace
}  // namespace ddp::hooks
