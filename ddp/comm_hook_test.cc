// Communication hooks, user-defined and built-in. With any hook, backward's thread advances the
// collectives of a backend with collectives_use_callers_cores.

#include <atomic>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "base/backend_capabilities.h"
#include "c10/util/env.h"
#include "ddp/nets_testing.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/csrc/distributed/c10d/comm.hpp"

namespace ddp {
namespace {

using c10::ivalue::Future;
using FuturePtr = c10::intrusive_ptr<Future>;

// Sums where DDP averages, in one collective per bucket or, as PowerSGD does, in two of which the
// second starts when the first has ended.
class SumHook : public c10d::CppCommHookInterface<GroupPtr> {
 public:
  SumHook(GroupPtr group, bool in_two, std::atomic<int>* runs)
      : CppCommHookInterface(std::move(group)), in_two_(in_two), runs_(runs) {}

  FuturePtr runHook(c10d::GradBucket& bucket) override {
    ++*runs_;
    std::vector<at::Tensor> tensors = {bucket.getBufferRef()};
    const FuturePtr sum = state_->allreduce(tensors)->getFuture();
    if (!in_two_) return sum;
    return sum->thenAsync(
        [group = state_, tensors](Future&) mutable {
          tensors[0].mul_(0.5);
          return group->allreduce(tensors)->getFuture();
        },
        sum->elementType());
  }

 private:
  const bool in_two_;
  std::atomic<int>* const runs_;
};

TEST(CommHookTest, TheUsersRunsInsteadOfOurs) {
  for (const bool in_two : {false, true}) {
    RunRanks(3, [&](int rank, const GroupPtr& group) {
      std::atomic<int> runs = 0;
      // One bucket only, so that a collective started by a callback has its place in the order.
      auto model = *Wrap(SeededNet(), group, {.bucket_cap_mb = 25});
      ASSERT_TRUE(
          model->register_comm_hook(std::make_unique<SumHook>(group, in_two, &runs), "sum").ok());
      for (int step = 0; step < 4; ++step) {
        model->zero_grad();
        model->forward(Input(rank, step), true).pow(2).sum().backward();
        std::vector<at::Tensor> expected = ExpectedGradients(3, step);
        for (at::Tensor& gradient : expected) gradient = gradient * (in_two ? 4.5 : 3);
        ExpectClose(Gradients(*model->module()), expected);
        EXPECT_EQ(runs, step + 1);
      }
      EXPECT_EQ(model->parallel().GetDDPLoggingData().strs_map["comm_hook"], "sum");
    });
  }
}

// Sends half the bytes.
class HalfHook : public c10d::CppCommHookInterface<GroupPtr> {
 public:
  using CppCommHookInterface::CppCommHookInterface;
  FuturePtr runHook(c10d::GradBucket& bucket) override {
    std::vector<at::Tensor> half = {bucket.getBuffer().to(at::kHalf).div_(state_->getSize())};
    const FuturePtr sum = state_->allreduce(half)->getFuture();
    return sum->then(
        [half](Future&) { return c10::IValue(std::vector<at::Tensor>{half[0].to(at::kFloat)}); },
        sum->elementType());
  }
};

// Over bucket views, several buckets, and a search for unused parameters.
TEST(CommHookTest, ItsResultMayBeAnotherTensor) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto model = *Wrap(
        SeededNet(), group,
        {.bucket_cap_mb = 1e-4, .find_unused_parameters = true, .gradient_as_bucket_view = true});
    ASSERT_TRUE(model->register_comm_hook(std::make_unique<HalfHook>(group)).ok());
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      model->forward(Input(rank, step), true).pow(2).sum().backward();
      const std::vector<at::Tensor> expected = ExpectedGradients(WorldSize(), step);
      const std::vector<at::Tensor> gradients = Gradients(*model->module());
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(at::allclose(gradients[i], expected[i], 1e-2, 1e-2)) << "tensor " << i;
      }
    }
  });
}

TEST(CommHookTest, ThereIsOneAtMost) {
  const auto register_two = [](const GroupPtr& group) {
    std::atomic<int> runs = 0;
    auto model = *Wrap(SeededNet(), group);
    EXPECT_EQ(model->register_comm_hook(nullptr).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(model->register_comm_hook(std::make_unique<SumHook>(group, false, &runs)).ok());
    EXPECT_EQ(model->register_comm_hook(std::make_unique<SumHook>(group, false, &runs)).code(),
              absl::StatusCode::kFailedPrecondition);
  };
  register_two(nullptr);
  RunRanks(WorldSize(), [&](int, const GroupPtr& group) { register_two(group); });
}

class DoneWork final : public c10d::Work {
 public:
  explicit DoneWork(std::vector<at::Tensor> tensors)
      : future_(c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()))) {
    future_->markCompleted(c10::IValue(tensors));
    finish();
  }
  FuturePtr getFuture() override { return future_; }

 private:
  const FuturePtr future_;
};

// The first of two ranks, whose peer contributes nothing. Counts calls to Progress.
class CountingBackend final : public c10d::Backend, public CapabilityProvider {
 public:
  explicit CountingBackend(bool on_callers_cores)
      : Backend(0, 2), capabilities_{.collectives_use_callers_cores = on_callers_cores} {}
  const std::string getBackendName() const override { return "counting"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions&) override {
    return c10::make_intrusive<DoneWork>(tensors);
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions&) override {
    return c10::make_intrusive<DoneWork>(tensors);
  }
  BackendCapabilities capabilities() const override { return capabilities_; }
  void Progress(const std::function<bool()>& done) override {
    ++progressed;
    EXPECT_TRUE(done());
  }
  int progressed = 0;

 private:
  const BackendCapabilities capabilities_;
};

TEST(CommHookTest, TheBackendsCapabilityDecidesWhoWaitsForTheLastBucket) {
  for (const bool on_callers_cores : {true, false}) {
    for (const bool own_hook : {true, false}) {
      auto backend = c10::make_intrusive<CountingBackend>(on_callers_cores);
      auto group =
          c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), 0, 2);
      group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
      group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
      auto model = *Wrap(SeededNet(), group,
                         {.bucket_cap_mb = 1e-4, .broadcast_buffers = false, .init_sync = false});
      std::atomic<int> runs = 0;
      if (own_hook) {
        ASSERT_TRUE(model->register_comm_hook(std::make_unique<SumHook>(group, false, &runs)).ok());
      }
      for (int step = 1; step <= 3; ++step) {
        model->forward(Input(0, step), true).sum().backward();
        EXPECT_EQ(backend->progressed, on_callers_cores ? step : 0);
      }
      EXPECT_EQ(runs > 0, own_hook);
    }
  }
}

struct Scale : torch::nn::Module {
  Scale() : w(register_parameter("w", at::zeros({1}))) {}
  at::Tensor forward(const at::Tensor& x) { return w * x; }
  at::Tensor w;
};

// Dividing before the sum, as the Reducer does without a hook, would turn a third of the smallest
// float into 0.
TEST(AverageHookTest, DividesTheSum) {
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

TEST(ArenaTest, BucketsLieInSharedMemoryAndHaveTheSameBits) {
  if (BackendUnderTest() != "shm") GTEST_SKIP() << BackendUnderTest() << " has no arena";
  std::map<bool, std::vector<at::Tensor>> gradients;
  for (const bool arena : {true, false}) {
    // As a user can have it.
    if (!arena) c10::utils::set_env("DDP_DISABLE_COMM_MEM", "1");
    RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
      auto model = *Wrap(SeededNet(), group, {.gradient_as_bucket_view = true});
      // Buckets are rebuilt after the first iteration.
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        model->forward(Input(rank, step), true).pow(2).sum().backward();
        for (const at::Tensor& gradient : Gradients(*model->module())) {
          EXPECT_EQ(InArena(gradient), arena) << "step " << step;
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

}  // namespace
}  // namespace ddp
