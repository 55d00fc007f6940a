// Fits y = 3x - 1 on two ranks, each with half of the points:
//   RANK=0 own_model STORE & RANK=1 own_model STORE      (STORE: path of a new file)
// Prints the fitted weight and bias, which must be the same on both ranks.
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "absl/status/statusor.h"
#include "ddp/ddp.h"
#include "torch/csrc/distributed/c10d/FileStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroupGloo.hpp"
#include "torch/nn/modules/linear.h"
#include "torch/optim/sgd.h"
#include "torch/utils.h"

namespace {

constexpr int kWorldSize = 2;

struct Line : torch::nn::Module {
  Line() { linear = register_module("linear", torch::nn::Linear(1, 1)); }
  at::Tensor forward(const at::Tensor& x) { return linear->forward(x); }
  torch::nn::Linear linear{nullptr};
};

c10::intrusive_ptr<c10d::ProcessGroup> MakeGroup(int rank, const char* path) {
  auto store = c10::make_intrusive<c10d::FileStore>(path, kWorldSize);
  auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::seconds(60));
  options->devices = {c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1")};
  auto gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, kWorldSize, options);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, kWorldSize);
  group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::GLOO, gloo);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
  return group;
}

}  // namespace

int main(int argc, char** argv) {
  const char* rank_variable = std::getenv("RANK");
  if (argc != 2 || rank_variable == nullptr) return 2;
  const int rank = std::atoi(rank_variable);
  torch::manual_seed(rank);  // different starts: the wrapper broadcasts rank 0's

  auto model = ddp::Wrap(std::make_shared<Line>(), MakeGroup(rank, argv[1]));
  if (!model.ok()) {
    std::fprintf(stderr, "%s\n", model.status().ToString().c_str());
    return 1;
  }
  at::Tensor x = at::linspace(-1, 1, 16).reshape({16, 1}).slice(0, rank * 8, rank * 8 + 8);
  at::Tensor y = 3 * x - 1;
  torch::optim::SGD optimizer((*model)->module()->parameters(), 0.3);
  for (int step = 0; step < 200; ++step) {
    at::Tensor loss = at::mse_loss((*model)->forward(x), y);
    (*model)->zero_grad();
    loss.backward();
    optimizer.step();
  }
  const Line& line = *(*model)->module();
  std::printf("weight %.6f bias %.6f\n", line.linear->weight.item<double>(),
              line.linear->bias.item<double>());
}
