// Measures the overhead of watching in the normal case: a collective that does nothing, called on a
// backend and on the same backend watched.
//
//   bazel run -c opt //backends/watch:watch_benchmark
//
// Prints nanoseconds per call: medians and minima over alternating rounds.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "ATen/ops/ones.h"
#include "backends/watch/null_backend.h"
#include "backends/watch/watch.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"

namespace ddp::backends::watch {
namespace {

constexpr int kRounds = 2001;
constexpr int kCalls = 2000;  // 0.1 ms: most rounds are not interrupted

double NanosecondsPerCall(c10d::Backend& backend, std::vector<at::Tensor>& tensors) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; ++i) backend.allreduce(tensors)->wait();
  const std::chrono::duration<double, std::nano> elapsed = std::chrono::steady_clock::now() - start;
  return elapsed.count() / kCalls;
}

int Main() {
  const c10::intrusive_ptr<c10d::Backend> bare = c10::make_intrusive<NullBackend>(0, 1, "shm");
  const auto watched = Watch(bare, c10::make_intrusive<c10d::HashStore>(), {});
  std::vector<at::Tensor> tensors = {at::ones({1000})};
  std::vector<double> bare_ns, watched_ns;
  for (int round = 0; round < kRounds; ++round) {
    bare_ns.push_back(NanosecondsPerCall(*bare, tensors));
    watched_ns.push_back(NanosecondsPerCall(*watched, tensors));
  }
  const auto print = [](const char* name, std::vector<double>& ns) {
    std::sort(ns.begin(), ns.end());
    std::printf("%-8s median %6.1f ns   min %6.1f ns\n", name, ns[ns.size() / 2], ns.front());
  };
  print("bare", bare_ns);
  print("watched", watched_ns);
  std::printf("added    median %6.1f ns   min %6.1f ns\n",
              watched_ns[kRounds / 2] - bare_ns[kRounds / 2], watched_ns[0] - bare_ns[0]);
  return 0;
}

}  // namespace
}  // namespace ddp::backends::watch

int main() { return ddp::backends::watch::Main(); }
