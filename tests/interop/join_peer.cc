// The C++ side of join_interop_test.py:
//
//   join_peer DIVIDE_BY_INITIAL IN OUT
//
// Trains one rank per list in IN["inputs"], of a batch per step, from IN["parameters"]; writes each
// rank's gradients by step, and its parameters in the end.
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "backends/conformance/rank_threads.h"
#include "base/status.h"
#include "checkpoint/format.h"
#include "checkpoint/state.h"
#include "ddp/ddp.h"
#include "ddp/join.h"

namespace ddp {
namespace {

struct Net : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return second->forward(first->forward(x).tanh()); }
  torch::nn::Linear first{register_module("first", torch::nn::Linear(4, 8))};
  torch::nn::Linear second{register_module("second", torch::nn::Linear(8, 2))};
};

c10::List<at::Tensor> Copies(const std::vector<at::Tensor>& tensors) {
  c10::List<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors) copies.push_back(tensor.detach().clone());
  return copies;
}

absl::Status Train(bool divide_by_initial, const std::string& in, const std::string& out) {
  DDP_ASSIGN_OR_RETURN(const std::unique_ptr<checkpoint::Format> format,
                       checkpoint::CreateFormat("pt"));
  DDP_ASSIGN_OR_RETURN(const checkpoint::State given, format->Read(in));
  const auto parameters = given.root.at("parameters").toListRef().vec();
  const auto inputs = given.root.at("inputs").toListRef().vec();
  const int ranks = static_cast<int>(inputs.size());
  std::vector<c10::impl::GenericDict> results;
  for (int rank = 0; rank < ranks; ++rank) results.push_back(checkpoint::NewTree());
  std::vector<absl::Status> statuses(ranks);
  backends::RunRankThreads(
      ranks, "gloo", [&](const launchers::Rank& place, const backends::Group& group) {
        auto net = std::make_shared<Net>();
        {
          const at::NoGradGuard no_grad;
          for (size_t i = 0; i < parameters.size(); ++i) {
            net->parameters()[i].copy_(parameters[i].toTensor());
          }
        }
        auto model = *Wrap(net, group.process_group);
        torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1));
        int step = 0;
        statuses[place.rank] =
            Join({&model->parallel()}, {.divide_by_initial_world_size = divide_by_initial}, [&] {
              for (const c10::IValue& input : inputs[place.rank].toListRef()) {
                model->zero_grad();
                model->forward(input.toTensor()).pow(2).mean().backward();
                std::vector<at::Tensor> gradients;
                for (const at::Tensor& p : net->parameters()) gradients.push_back(p.grad());
                results[place.rank].insert("step_" + std::to_string(step++), Copies(gradients));
                sgd.step();
              }
              return absl::OkStatus();
            });
        results[place.rank].insert("parameters", Copies(net->parameters()));
      });
  for (const absl::Status& status : statuses) DDP_RETURN_IF_ERROR(status);
  checkpoint::State state;
  for (int rank = 0; rank < ranks; ++rank) {
    state.root.insert("rank_" + std::to_string(rank), results[rank]);
  }
  return format->Write(state, out);
}

}  // namespace
}  // namespace ddp

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const absl::Status status = ddp::Train(std::string(argv[1]) == "1", argv[2], argv[3]);
  if (status.ok()) return 0;
  std::cerr << status << "\n";
  return 1;
}
