// For tests of this folder: ranks as threads over backend $DDP_TEST_BACKEND (default gloo), a small
// module, and its expected gradients.
//
//   RunRanks(2, [](int rank, const GroupPtr& group) {
//     auto model = *Wrap(SeededNet(), group);
//     model->forward(Input(rank, 0), true).pow(2).sum().backward();
//     ExpectClose(Gradients(*model->module()), ExpectedGradients(2, 0));
//   });
#pragma once

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "backends/conformance/rank_threads.h"
#include "ddp/ddp.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/nn/modules/linear.h"
#include "torch/utils.h"

namespace ddp {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

inline std::string BackendUnderTest() {
  const char* name = std::getenv("DDP_TEST_BACKEND");
  return name == nullptr ? "gloo" : name;
}

// World size of most tests. hier_in_turns needs three ranks, so that one host has two of them;
// under mpirun all tests have the same number of ranks.
inline int WorldSize() {
  return BackendUnderTest() == "hier_in_turns" || BackendUnderTest() == "mpi" ? 3 : 2;
}

using RankBody = std::function<void(int rank, const GroupPtr& group)>;

// What RunRanks calls. tests/ddp_over_mpi replaces it: there each rank is a process.
inline std::function<void(int world_size, const RankBody& body)>& RankRunner() {
  static std::function<void(int, const RankBody&)> runner = [](int world_size,
                                                               const RankBody& body) {
    backends::RunRankThreads(world_size, BackendUnderTest(),
                             [&](const launchers::Rank& rank, const backends::Group& group) {
                               body(rank.rank, group.process_group);
                             });
  };
  return runner;
}

inline void RunRanks(int world_size, const RankBody& body) { RankRunner()(world_size, body); }

// Whether this rank writes a variable that the test declares outside of RunRanks: one of the
// threads, or each process.
inline bool Records(int rank) { return rank == 0 || BackendUnderTest() == "mpi"; }

struct Net : torch::nn::Module {
  explicit Net(int64_t hidden = 8) {
    first = register_module("first", torch::nn::Linear(4, hidden));
    second = register_module("second", torch::nn::Linear(hidden, 2));
    skipped = register_module("skipped", torch::nn::Linear(3, 3));
  }
  // `use_skipped` decides whether all parameters take part.
  at::Tensor forward(const at::Tensor& x, bool use_skipped) {
    at::Tensor y = second->forward(first->forward(x).relu());
    if (use_skipped) {
      const at::Tensor z = skipped->forward(at::tensor({0.6f, 0.9f, 1.4f}).view({1, 3}));
      y = y + (z * at::tensor({1.0f, 0.5f, -0.25f})).sum();
    }
    return y;
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, skipped{nullptr};
};

// All elements differ, as do those in Net's forward, so that gradients that trade places within a
// bucket do not go unseen.
inline at::Tensor Input(int rank, int step) {
  return 0.1f * (rank + 1) + 0.01f * step +
         0.05f * at::arange(20, at::kFloat).mul(1.7f).sin().view({5, 4});
}

inline std::vector<at::Tensor> Gradients(const torch::nn::Module& module) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : module.parameters()) gradients.push_back(parameter.grad());
  return gradients;
}

// The same module on every call. Threads share the default generator.
template <typename M = Net>
std::shared_ptr<M> SeededNet(uint64_t seed = 1) {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  torch::manual_seed(seed);
  return std::make_shared<M>();
}

// Expected gradients, computed in one process: the mean over ranks of the gradients of `loss`.
template <typename M>
std::vector<at::Tensor> MeanGradients(int world_size,
                                      const std::function<at::Tensor(M& module, int rank)>& loss) {
  const std::shared_ptr<M> module = SeededNet<M>();
  for (int rank = 0; rank < world_size; ++rank) (loss(*module, rank) / world_size).backward();
  return Gradients(*module);
}

inline std::vector<at::Tensor> ExpectedGradients(int world_size, int step,
                                                 int steps_accumulated = 1) {
  return MeanGradients<Net>(world_size, [&](Net& net, int rank) {
    at::Tensor loss = at::zeros({});
    for (int i = 0; i < steps_accumulated; ++i) {
      loss = loss + net.forward(Input(rank, step + i), true).pow(2).sum();
    }
    return loss;
  });
}

// Whether /proc/self/maps has the tensor's memory within shm's arena, from which the other ranks
// read it without a copy.
inline bool InArena(const at::Tensor& tensor) {
  const auto at = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin, end;
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR, &begin, &end) != 2) continue;
    if (begin <= at && at < end) return line.find("memfd:ddp-shm") != std::string::npos;
  }
  return false;
}

// Collective.
inline void ExpectSameBitsOnAllRanks(const GroupPtr& group, const std::vector<at::Tensor>& tensors,
                                     const std::string& what = "") {
  for (size_t i = 0; i < tensors.size(); ++i) {
    std::vector<at::Tensor> of_rank_zero = {tensors[i].detach().clone()};
    group->broadcast(of_rank_zero)->wait();
    EXPECT_TRUE(at::equal(of_rank_zero[0], tensors[i])) << what << ": tensor " << i;
  }
}

// An undefined tensor equals one of zeros.
inline void ExpectClose(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    const auto dense = [](const at::Tensor& x) {
      return (x.is_sparse() ? x.to_dense() : x).detach();
    };
    if (!a[i].defined() || !b[i].defined()) {
      const at::Tensor& other = a[i].defined() ? a[i] : b[i];
      EXPECT_TRUE(!other.defined() || dense(other).eq(0).all().item<bool>()) << "tensor " << i;
      continue;
    }
    EXPECT_TRUE(at::allclose(dense(a[i]), dense(b[i]), 1e-5, 1e-6))
        << "tensor " << i << ": " << dense(a[i]) << "\ndiffers from " << dense(b[i]) << "\nby "
        << dense(a[i]) - dense(b[i]);
  }
}

}  // namespace ddp
