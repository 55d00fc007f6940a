// What depends on the device of the tensors: DDP, ZeRO, SyncBatchNorm, mixed precision, fused
// optimizers, hooks, random state. The tests use the device that DDP_TEST_DEVICE names (default:
// cpu), with two ranks over gloo, which can share a GPU; and nccl with one rank.
//
// The ranks are threads or, with DDP_TEST_RANK=0 and 1, two processes that find each other by files
// with the prefix DDP_TEST_STORE. On a GPU they must be processes: a process has one thread for the
// backward of a GPU, in which two ranks would wait for each other.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "backends/backend.h"
#include "backends/conformance/rank_threads.h"
#include "backends/process_group.h"
#include "checkpoint/rng_state.h"
#include "ddp/amp/autocast.h"
#include "ddp/amp/grad_scaler.h"
#include "ddp/data/loader.h"
#include "ddp/ddp.h"
#include "ddp/hooks/comm_hook.h"
#include "ddp/sync_batch_norm.h"
#include "ddp/trainer/callbacks/monitors.h"
#include "ddp/zero/zero_redundancy_optimizer.h"
#include "gtest/gtest.h"
#include "optim/fused.h"
#include "torch/csrc/distributed/c10d/FileStore.hpp"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/torch.h"

namespace ddp {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr int kRanks = 2;
constexpr int64_t kBatch = 8;  // per rank

c10::Device Device() {
  const char* name = std::getenv("DDP_TEST_DEVICE");
  return c10::Device(name == nullptr ? "cpu" : name);
}

// Equal weights on each call, whatever the threads of other ranks draw.
torch::nn::Sequential MakeNet(bool batch_norm = false) {
  torch::nn::Sequential net(torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3).padding(1)));
  if (batch_norm) net->push_back(torch::nn::BatchNorm2d(4));
  net->push_back(torch::nn::ReLU());
  net->push_back(torch::nn::Flatten());
  net->push_back(torch::nn::Linear(4 * 6 * 6, 10));
  const torch::NoGradGuard no_grad;
  int64_t seed = 0;
  for (at::Tensor& parameter : net->parameters()) {
    parameter.copy_(at::sin(at::arange(parameter.numel(), at::kFloat) + double(++seed))
                        .mul(0.1)
                        .view(parameter.sizes()));
  }
  net->to(Device());
  return net;
}

at::Tensor Inputs(int rank, int step = 0) {
  const auto index = at::arange(kBatch * 36, at::kFloat) + double(1000 * step + 300 * rank);
  return at::cos(index * 0.7).view({kBatch, 1, 6, 6}).to(Device());
}

at::Tensor Targets(int rank) { return (at::arange(kBatch) + rank).remainder(10).to(Device()); }

at::Tensor Loss(const at::Tensor& output, int rank) {
  return torch::cross_entropy_loss(output.to(at::kFloat), Targets(rank));
}

std::vector<at::Tensor> Copies(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors) copies.push_back(tensor.detach().cpu().clone());
  return copies;
}

void ExpectEqual(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << "parameter " << i;
}

void ExpectClose(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b,
                 double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_LE((a[i] - b[i]).abs().max().item<double>(), tolerance) << "parameter " << i;
  }
}

// The group of this process, if it is one of two ranks: number `rank`.
Group JoinAsProcess(int rank) {
  static int groups = 0;
  backends::BackendOptions options;
  options.store = c10::make_intrusive<c10d::FileStore>(
      absl::StrCat(std::getenv("DDP_TEST_STORE"), ".", groups++), kRanks);
  options.rank.rank = options.rank.local_rank = rank;
  options.rank.world_size = options.rank.local_world_size = kRanks;
  const auto backend = backends::BackendRegistry::Find("gloo").value().create(options).value();
  const auto type = backends::TypeOf("gloo");
  auto group = c10::make_intrusive<c10d::ProcessGroup>(options.store, rank, kRanks);
  group->setBackend(c10::kCPU, type, backend);
  if (!Device().is_cpu()) group->setBackend(Device().type(), type, backend);
  group->setDefaultBackend(type);
  return group;
}

// Calls `train` as each of two ranks over gloo; returns rank 0's result, which must be that of
// rank 1.
std::vector<at::Tensor> OnRanks(
    const std::function<std::vector<at::Tensor>(int rank, const Group& group)>& train) {
  std::vector<std::vector<at::Tensor>> results(kRanks);
  const char* mine = std::getenv("DDP_TEST_RANK");
  if (mine == nullptr) {
    backends::RunRankThreads(kRanks, "gloo",
                             [&](const launchers::Rank& rank, const backends::Group& group) {
                               results[rank.rank] = train(rank.rank, group.process_group);
                             });
  } else {
    const int rank = std::atoi(mine);
    const Group group = JoinAsProcess(rank);
    for (at::Tensor& tensor : train(rank, group)) {
      std::vector<std::vector<at::Tensor>> all = {{at::empty_like(tensor), at::empty_like(tensor)}};
      std::vector<at::Tensor> input = {tensor};
      group->allgather(all, input)->wait();
      for (int r = 0; r < kRanks; ++r) results[r].push_back(all[0][r]);
    }
    group->barrier()->wait();  // no rank closes its connections before
  }
  ExpectEqual(results[0], results[1]);
  return results[0];
}

// Three steps of SGD with momentum.
std::vector<at::Tensor> Train(int rank, const Group& group, int64_t zero_stage = 0,
                              const std::string& hook = "allreduce") {
  torch::nn::Sequential net = MakeNet();
  const torch::optim::SGDOptions sgd = torch::optim::SGDOptions(0.1).momentum(0.9);
  auto model = Wrap(net, group, {.reduce_gradients = zero_stage < 2}).value();
  if (hook != "allreduce") {
    const absl::Status registered = hooks::Register({.name = hook}, group, model->parallel());
    TORCH_CHECK(registered.ok(), registered.ToString());
  }
  std::unique_ptr<torch::optim::Optimizer> plain;
  std::unique_ptr<zero::ZeroRedundancyOptimizer> zero;
  if (zero_stage == 0) {
    plain = std::make_unique<optim::FusedSGD>(net->parameters(), sgd);
  } else {
    zero =
        zero::ZeroRedundancyOptimizer::Create(
            net->parameters(), group, optim::FactoryOf<optim::FusedSGD>(sgd), {.stage = zero_stage})
            .value();
  }
  for (int step = 0; step < 3; ++step) {
    model->zero_grad();
    Loss(model->forward(Inputs(rank, step)), rank).backward();
    zero ? zero->step() : plain->step();
  }
  if (zero) zero->WaitForParameters();
  return Copies(net->parameters());
}

at::Tensor OnDevice(const std::vector<double>& values) {
  return at::tensor(values, at::kDouble).to(Device(), at::kFloat);
}

TEST(DeviceTest, GlooServesEveryCall) {
  using Tensors = std::vector<at::Tensor>;
  OnRanks([](int rank, const Group& group) {
    const double mine = rank + 1.0;
    Tensors results, sum = {OnDevice({mine, 10 * mine})}, first = {OnDevice({mine})};
    group->allreduce(sum)->wait();
    results.push_back(sum[0]);
    group->broadcast(first)->wait();
    results.push_back(first[0]);
    Tensors input = {OnDevice({mine})}, other = {OnDevice({-mine})};
    std::vector<Tensors> all = {{OnDevice({0}), OnDevice({0})}};
    group->allgather(all, input)->wait();
    results.insert(results.end(), all[0].begin(), all[0].end());
    Tensors many = {OnDevice({mine}), OnDevice({2 * mine, 3})};
    group->allreduce_coalesced(many)->wait();
    results.insert(results.end(), many.begin(), many.end());

    // What follows differs between the ranks.
    Tensors part = {OnDevice({0})};
    std::vector<Tensors> parts = {{OnDevice({mine}), OnDevice({10 * mine})}};
    group->reduce_scatter(part, parts)->wait();
    EXPECT_EQ(part[0].item<double>(), rank == 0 ? 3 : 30);
    Tensors received = {OnDevice({0}), OnDevice({0})};
    Tensors sent = {OnDevice({mine}), OnDevice({10 * mine})};
    group->alltoall(received, sent)->wait();
    EXPECT_EQ(received[1].item<double>(), rank == 0 ? 2 : 20);
    std::vector<Tensors> gathered, scattered;
    if (rank == 0) gathered = {{OnDevice({0}), OnDevice({0})}};
    group->gather(gathered, other)->wait();
    EXPECT_TRUE(rank != 0 || gathered[0][1].item<double>() == -2);
    if (rank == 0) scattered = {{OnDevice({7}), OnDevice({8})}};
    group->scatter(part, scattered)->wait();
    EXPECT_EQ(part[0].item<double>(), 7 + rank);
    Tensors message = {OnDevice({rank == 0 ? 5.0 : 0.0})};
    if (rank == 0) {
      group->send(message, 1, /*tag=*/3)->wait();
    } else {
      group->recv(message, 0, /*tag=*/3)->wait();
    }
    results.push_back(message[0]);
    for (const at::Tensor& result : results) EXPECT_EQ(result.device().type(), Device().type());
    EXPECT_TRUE(at::equal(sum[0].cpu(), at::tensor({3.0, 30.0}, at::kFloat)));
    EXPECT_TRUE(at::equal(many[1].cpu(), at::tensor({6.0, 6.0}, at::kFloat)));
    EXPECT_EQ(message[0].item<double>(), 5);
    return Copies(results);
  });
}

TEST(DeviceTest, NcclWithOneRank) {
  if (!Device().is_cuda()) GTEST_SKIP() << "nccl needs a GPU";
  const absl::StatusOr<backends::BackendEntry> entry = backends::BackendRegistry::Find("nccl");
  ASSERT_TRUE(entry.ok()) << entry.status();
  backends::BackendOptions options;
  options.store = c10::make_intrusive<c10d::HashStore>();
  auto backend = entry->create(options);
  ASSERT_TRUE(backend.ok()) << backend.status();
  const at::Tensor ones = at::ones({1000}, at::TensorOptions(Device()));
  std::vector<at::Tensor> tensors = {ones.clone()};
  (*backend)->allreduce(tensors)->wait();
  EXPECT_TRUE(at::equal(tensors[0], ones));
  (*backend)->broadcast(tensors)->wait();
  EXPECT_TRUE(at::equal(tensors[0], ones));
  (*backend)->barrier()->wait();
}

TEST(DeviceTest, DdpTrainsAsOneRankWithAllExamples) {
  torch::nn::Sequential net = MakeNet();
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 3; ++step) {
    sgd.zero_grad();
    const at::Tensor output = net->forward(at::cat({Inputs(0, step), Inputs(1, step)}));
    torch::cross_entropy_loss(output, at::cat({Targets(0), Targets(1)})).backward();
    sgd.step();
  }
  const auto ranks = OnRanks([](int rank, const Group& group) { return Train(rank, group); });
  ExpectClose(ranks, Copies(net->parameters()), 1e-5);
}

TEST(DeviceTest, DdpMovesItsInputsToDeviceIds) {
  if (!Device().is_cuda()) GTEST_SKIP() << "device_ids are for GPUs";
  OnRanks([](int rank, const Group& group) {
    torch::nn::Sequential net = MakeNet();
    auto model = Wrap(net, group, {.device_ids = {Device().index()}}).value();
    Loss(model->forward(Inputs(rank).cpu()), rank).backward();
    return Copies({net->parameters()[0].grad()});
  });
}

TEST(DeviceTest, ZeroHasTheBitsOfDdp) {
  const auto stage = [](int64_t number) {
    return OnRanks([number](int rank, const Group& group) { return Train(rank, group, number); });
  };
  const auto unsharded = stage(0);
  ExpectEqual(stage(1), unsharded);
  ExpectEqual(stage(2), unsharded);
}

TEST(DeviceTest, HooksTrain) {
  const auto with = [](const std::string& hook) {
    return OnRanks([hook](int rank, const Group& group) { return Train(rank, group, 0, hook); });
  };
  const auto exact = with("allreduce");
  for (const std::string hook : {"bf16_compress", "fp16_compress", "powersgd"}) {
    SCOPED_TRACE(hook);
    ExpectClose(with(hook), exact, 0.05);
  }
}

TEST(DeviceTest, SyncBatchNormNormalisesOverAllRanks) {
  torch::nn::Sequential net = MakeNet(/*batch_norm=*/true);
  torch::cross_entropy_loss(net->forward(at::cat({Inputs(0), Inputs(1)})),
                            at::cat({Targets(0), Targets(1)}))
      .backward();
  const auto ranks = OnRanks([](int rank, const Group& group) {
    torch::nn::Sequential synchronised = MakeNet(/*batch_norm=*/true);
    EXPECT_EQ(ConvertSyncBatchNorm(*synchronised, "torch", group).value(), 1);
    auto model = Wrap(synchronised, group).value();
    Loss(model->forward(Inputs(rank)), rank).backward();
    std::vector<at::Tensor> results;
    for (const at::Tensor& parameter : synchronised->parameters()) {
      results.push_back(parameter.grad());
    }
    for (const at::Tensor& buffer : synchronised->buffers()) results.push_back(buffer);
    return Copies(results);
  });
  std::vector<at::Tensor> expected;
  for (const at::Tensor& parameter : net->parameters()) expected.push_back(parameter.grad());
  for (const at::Tensor& buffer : net->buffers()) expected.push_back(buffer);
  ExpectClose(ranks, Copies(expected), 1e-5);
}

TEST(DeviceTest, TheScalerSkipsStepsThatOverflow) {
  OnRanks([](int rank, const Group& group) {
    torch::nn::Sequential net = MakeNet();
    optim::FusedSGD sgd(net->parameters(), torch::optim::SGDOptions(0.1));
    auto model = Wrap(net, group).value();
    // The largest power of two: gradients of float16 overflow until it has fallen.
    auto scaler = GradScaler::Create({.init_scale = 0x1p127}, Device(), group).value();
    int skipped = 0, steps = 0;
    for (int step = 0; step < 200 && steps < 3; ++step) {
      model->zero_grad();
      at::Tensor output;
      {
        const Autocast autocast(Device().type(), at::kHalf);
        output = model->forward(Inputs(rank, step));
        EXPECT_EQ(output.scalar_type(), at::kHalf);
      }
      scaler->scale(Loss(output, rank)).backward();
      const auto before = Copies(net->parameters());
      if (scaler->step(sgd)) {
        ++steps;
      } else {
        ++skipped;
        ExpectEqual(Copies(net->parameters()), before);
      }
      scaler->update();
    }
    EXPECT_GT(skipped, 10);
    EXPECT_EQ(steps, 3);
    for (const at::Tensor& parameter : net->parameters()) {
      EXPECT_TRUE(at::isfinite(parameter).all().item<bool>());
    }
    return Copies(net->parameters());
  });
}

template <typename Optimizer, typename Options>
std::vector<at::Tensor> FiveSteps(const Options& options) {
  torch::nn::Sequential net = MakeNet();
  Optimizer optimizer(net->parameters(), options);
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    Loss(net->forward(Inputs(0, step)), 0).backward();
    optimizer.step();
  }
  return Copies(net->parameters());
}

TEST(DeviceTest, FusedOptimizersAreTorchs) {
  const auto sgd = torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01);
  ExpectClose(FiveSteps<optim::FusedSGD>(sgd), FiveSteps<torch::optim::SGD>(sgd), 1e-5);
  const auto adam = torch::optim::AdamOptions(1e-2);
  ExpectClose(FiveSteps<optim::FusedAdam>(adam), FiveSteps<torch::optim::Adam>(adam), 1e-4);
  const auto adamw = torch::optim::AdamWOptions(1e-2);
  ExpectClose(FiveSteps<optim::FusedAdamW>(adamw), FiveSteps<torch::optim::AdamW>(adamw), 1e-4);
}

// Milliseconds of a step, median of 50.
double StepMs(const std::function<void(int step)>& take_step) {
  std::vector<double> times;
  for (int step = 0; step < 60; ++step) {
    const auto began = std::chrono::steady_clock::now();
    take_step(step);
    if (Device().is_cuda()) torch::cuda::synchronize(Device().index());
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - began;
    if (step >= 10) times.push_back(took.count());
  }
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

// A figure for check.sh's table, not a bar.
TEST(DeviceTest, OverheadOfDdpWithOneRank) {
  torch::nn::Sequential net = MakeNet();
  auto model = Wrap(net, nullptr).value();
  optim::FusedSGD sgd(net->parameters(), torch::optim::SGDOptions(0.01));
  const auto step = [&](const auto& forward, int number) {
    model->zero_grad();
    Loss(forward(Inputs(0, number)), 0).backward();
    sgd.step();
  };
  const auto bare = [&](const at::Tensor& input) { return net->forward(input); };
  const auto wrapped = [&](const at::Tensor& input) { return model->forward(input); };
  const double without = StepMs([&](int number) { step(bare, number); });
  const double with = StepMs([&](int number) { step(wrapped, number); });
  std::printf("figure: a step with DDP at one rank %.3f ms, without %.3f ms, ratio %.2f\n", with,
              without, with / without);
  EXPECT_GT(without, 0);
}

// Example i is 3000 numbers from i on.
class Ramps : public data::Dataset {
 public:
  int64_t size() const override { return 400; }
  data::Batch Get(absl::Span<const int64_t> indices) const override {
    const at::Tensor index = at::tensor(std::vector<int64_t>(indices.begin(), indices.end()));
    return {index.to(at::kFloat).unsqueeze(1) + at::arange(3000, at::kFloat), index};
  }
};

// The host's copy of a batch is given back at once, and used again, while copies are under way.
TEST(DeviceTest, BatchesArriveThroughPinnedMemory) {
  const Ramps ramps;
  const data::LoaderOptions options = {
      .batch_size = 16, .num_workers = 2, .pin_memory_device = Device()};
  auto loader = data::AnyLoader::Create(ramps, options).value();
  std::vector<data::AnyBatch> batches;
  for (int pass = 0; pass < 3; ++pass) {
    std::vector<int64_t> indices(ramps.size());
    for (int64_t i = 0; i < ramps.size(); ++i) indices[i] = (i * 7 + pass) % ramps.size();
    ASSERT_TRUE(loader->Begin(data::ShareOf(indices)).ok());
    while (true) {
      auto batch = loader->Next();
      ASSERT_TRUE(batch.ok()) << batch.status();
      if (!*batch) break;
      if (Device().is_cuda()) {
        EXPECT_TRUE((*batch)->Get<data::Batch>().input.is_pinned());
      }
      (*batch)->To(Device());
      batches.push_back(std::move(**batch));
    }
  }
  ASSERT_EQ(batches.size(), 75);
  for (data::AnyBatch& batch : batches) {
    const data::Batch expected = ramps.Get(batch.indices());
    const data::Batch& arrived = batch.Get<data::Batch>();
    EXPECT_EQ(arrived.input.device().type(), Device().type());
    EXPECT_TRUE(at::equal(arrived.input.cpu(), expected.input));
    EXPECT_TRUE(at::equal(arrived.target.cpu(), expected.target));
  }
}

TEST(DeviceTest, MemoryOfTheDeviceIsKnown) {
  const at::Tensor small = at::ones({1}, Device());
  const trainer::DeviceMemory before = trainer::DeviceMemoryOf(Device());
  const double large = Device().is_cuda() ? 64 : 0;  // MiB; the CPU has no caching allocator
  {
    const at::Tensor tensor =
        at::zeros({64, 1 << 20}, at::TensorOptions(Device()).dtype(at::kByte));
    EXPECT_EQ(trainer::DeviceMemoryOf(Device()).now, before.now + large);
  }
  const trainer::DeviceMemory after = trainer::DeviceMemoryOf(Device());
  EXPECT_EQ(after.now, before.now);
  EXPECT_GE(after.peak, before.now + large);
}

TEST(DeviceTest, RandomStateOfTheDeviceComesBack) {
  const at::TensorOptions options(Device());
  const at::Tensor state = checkpoint::RngState(Device());
  const at::Tensor drawn = at::rand({100}, options);
  EXPECT_FALSE(at::equal(at::rand({100}, options), drawn));
  ASSERT_TRUE(checkpoint::LoadRngState(state, Device()).ok());
  EXPECT_TRUE(at::equal(at::rand({100}, options), drawn));
}

}  // namespace
}  // namespace ddp
