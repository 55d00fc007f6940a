// The C++ side of checkpoint_interop_test.py:
//
//   checkpoint_peer sample OUT             writes state_testing.h's sample
//   checkpoint_peer copy IN OUT            reads a checkpoint and writes what it read
//   checkpoint_peer module IN OUT          loads IN["model"] into a small network, writes its state
//   checkpoint_peer train KIND STEPS RANKS IN OUT
//                                          resumes from IN's "params" and "optimizer"; with RANKS
//                                          above 0 as that many ranks with a sharded optimizer
//   checkpoint_peer sharded RANKS IN FOLDER
//                                          as that many ranks with a sharded Adam, saves IN's
//                                          "model" and "optimizer" to FOLDER/epoch_3.sharded
//   checkpoint_peer rng IN OUT             restores IN's "rng", writes random numbers and state
#include <ATen/Functions.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "backends/conformance/rank_threads.h"
#include "base/coordinator.h"
#include "base/status.h"
#include "checkpoint/format.h"
#include "checkpoint/manager.h"
#include "checkpoint/module_state.h"
#include "checkpoint/rng_state.h"
#include "checkpoint/state.h"
#include "checkpoint/state_testing.h"
#include "ddp/session/store_coordinator.h"
#include "ddp/zero/sharded_state.h"
#include "ddp/zero/zero_redundancy_optimizer.h"
#include "optim/kind.h"
#include "optim/state_dict.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"

namespace ddp::checkpoint {
namespace {

absl::StatusOr<State> Read(const std::string& path) {
  DDP_ASSIGN_OR_RETURN(const std::unique_ptr<Format> format, CreateFormat("pt"));
  return format->Read(path);
}

absl::Status Write(const State& state, const std::string& path) {
  DDP_ASSIGN_OR_RETURN(const std::unique_ptr<Format> format, CreateFormat("pt"));
  return format->Write(state, path);
}

// The network of checkpoint_interop_test.py.
struct Net : torch::nn::Module {
  Net() {
    register_module(
        "features",
        torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3).bias(false)),
                              torch::nn::BatchNorm2d(4)));
    register_module("head", torch::nn::Linear(4, 2));
    register_parameter("scale", torch::ones({1}));
  }
};

absl::Status Module(const std::string& in, const std::string& out) {
  DDP_ASSIGN_OR_RETURN(const State state, Read(in));
  Net net;
  DDP_RETURN_IF_ERROR(LoadModuleState(net, state.root.at("model")));
  State written;
  written.root.insert("model", ModuleState(net));
  return Write(written, out);
}

optim::OptimizerFactory OptimizerOf(const std::string& kind) {
  if (kind == "sgd") return optim::FactoryOf<torch::optim::SGD>(torch::optim::SGDOptions(7));
  if (kind == "adam") return optim::FactoryOf<torch::optim::Adam>(torch::optim::AdamOptions());
  return optim::FactoryOf<torch::optim::AdamW>(torch::optim::AdamWOptions());
}

std::vector<at::Tensor> ParametersOf(const State& state) {
  std::vector<at::Tensor> parameters;
  for (const c10::IValue& value : state.root.at("params").toListRef()) {
    parameters.push_back(value.toTensor().clone().requires_grad_());
  }
  return parameters;
}

void Backward(const std::vector<at::Tensor>& parameters) {
  at::Tensor loss = at::zeros({});
  for (const at::Tensor& parameter : parameters) loss = loss + parameter.pow(3).sum();
  loss.backward();
}

absl::Status WriteTrained(const std::vector<at::Tensor>& parameters, const optim::Dict& optimizer,
                          const std::string& out) {
  State written;
  c10::impl::GenericList values(c10::AnyType::get());
  for (const at::Tensor& parameter : parameters) values.push_back(parameter.detach().clone());
  written.root.insert("params", values);
  written.root.insert("optimizer", optimizer);
  return Write(written, out);
}

absl::Status Train(const std::string& kind, int steps, const std::string& in,
                   const std::string& out) {
  DDP_ASSIGN_OR_RETURN(const State state, Read(in));
  const std::vector<at::Tensor> parameters = ParametersOf(state);
  const auto optimizer = OptimizerOf(kind)({torch::optim::OptimizerParamGroup(parameters)});
  DDP_RETURN_IF_ERROR(optim::LoadOptimizerState(*optimizer, state.root.at("optimizer")));
  for (int step = 0; step < steps; ++step) {
    optimizer->zero_grad();
    Backward(parameters);
    optimizer->step();
  }
  DDP_ASSIGN_OR_RETURN(const optim::Dict optimizer_state, optim::OptimizerState(*optimizer));
  return WriteTrained(parameters, optimizer_state, out);
}

absl::Status TrainSharded(const std::string& kind, int steps, int ranks, const std::string& in,
                          const std::string& out) {
  DDP_ASSIGN_OR_RETURN(const State state, Read(in));
  std::vector<absl::Status> results(ranks);
  const auto run = [&](int rank,
                       const c10::intrusive_ptr<c10d::ProcessGroup>& group) -> absl::Status {
    const std::vector<at::Tensor> parameters = ParametersOf(state);
    DDP_ASSIGN_OR_RETURN(auto optimizer, zero::ZeroRedundancyOptimizer::Create(
                                             parameters, group, OptimizerOf(kind), {.stage = 2}));
    DDP_RETURN_IF_ERROR(optimizer->LoadStateDict(state.root.at("optimizer")));
    for (int step = 0; step < steps; ++step) {
      Backward(parameters);
      optimizer->step();
    }
    DDP_ASSIGN_OR_RETURN(const optim::Dict whole, optimizer->ConsolidateStateDict(0));
    return rank == 0 ? WriteTrained(parameters, whole, out) : absl::OkStatus();
  };
  backends::RunRankThreads(ranks, "gloo",
                           [&](const launchers::Rank& rank, const backends::Group& group) {
                             results[rank.rank] = run(rank.rank, group.process_group);
                           });
  for (const absl::Status& result : results) DDP_RETURN_IF_ERROR(result);
  return absl::OkStatus();
}

// The parameters are those of the "model" that "names" lists, in the optimizer's order.
absl::Status SaveAsRank(const State& in, const Coordinator& ranks,
                        const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                        const std::string& folder) {
  const c10::impl::GenericDict model = in.root.at("model").toGenericDict();
  zero::ParameterNames names;
  std::vector<at::Tensor> parameters;
  for (const c10::IValue& name : in.root.at("names").toListRef()) {
    names.push_back(name.toStringRef());
    parameters.push_back(model.at(name).toTensor().clone().requires_grad_());
  }
  DDP_ASSIGN_OR_RETURN(auto optimizer, zero::ZeroRedundancyOptimizer::Create(
                                           parameters, group, OptimizerOf("adam"), {.stage = 1}));
  DDP_RETURN_IF_ERROR(optimizer->LoadStateDict(in.root.at("optimizer")));
  State state;
  state.root.insert("model", model);
  state.root.insert("epoch", 3);
  c10::impl::GenericDict mine = NewTree();
  mine.insert("rank", ranks.rank());
  mine.insert("rng", RngState());
  state.per_rank.emplace(ranks.rank(), mine);
  DDP_RETURN_IF_ERROR(zero::AddShardedState(*optimizer, names, ranks, "optimizer", state));
  DDP_ASSIGN_OR_RETURN(auto manager,
                       Manager::Create({.directory = folder, .format = "sharded"}, ranks));
  return manager->Save(EpochName(3), state).status();
}

absl::Status SaveSharded(int ranks, const std::string& in, const std::string& folder) {
  DDP_ASSIGN_OR_RETURN(const State state, Read(in));
  if (ranks == 1) return SaveAsRank(state, SingleRank(), nullptr, folder);
  std::vector<absl::Status> results(ranks);
  backends::RunRankThreads(
      ranks, "gloo", [&](const launchers::Rank& rank, const backends::Group& group) {
        const session::StoreCoordinator coordinator(
            {.store = c10::make_intrusive<c10d::PrefixStore>("coordinator", group.store),
             .rank = rank.rank,
             .size = rank.world_size});
        results[rank.rank] = SaveAsRank(state, coordinator, group.process_group, folder);
      });
  for (const absl::Status& result : results) DDP_RETURN_IF_ERROR(result);
  return absl::OkStatus();
}

absl::Status Rng(const std::string& in, const std::string& out) {
  DDP_ASSIGN_OR_RETURN(const State state, Read(in));
  DDP_RETURN_IF_ERROR(LoadRngState(state.root.at("rng")));
  State written;
  written.root.insert("drawn", at::randn({5}));
  written.root.insert("rng", RngState());
  return Write(written, out);
}

absl::Status Copy(const std::string& in, const std::string& out) {
  DDP_ASSIGN_OR_RETURN(const State state, Read(in));
  return Write(state, out);
}

absl::Status Run(const std::vector<std::string>& args) {
  const std::string command = args.empty() ? "" : args[0];
  if (command == "sample" && args.size() == 2) return Write(SampleState(), args[1]);
  if (command == "copy" && args.size() == 3) return Copy(args[1], args[2]);
  if (command == "module" && args.size() == 3) return Module(args[1], args[2]);
  if (command == "sharded" && args.size() == 4) {
    return SaveSharded(std::atoi(args[1].c_str()), args[2], args[3]);
  }
  if (command == "rng" && args.size() == 3) return Rng(args[1], args[2]);
  if (command == "train" && args.size() == 6) {
    const int steps = std::atoi(args[2].c_str()), ranks = std::atoi(args[3].c_str());
    return ranks == 0 ? Train(args[1], steps, args[4], args[5])
                      : TrainSharded(args[1], steps, ranks, args[4], args[5]);
  }
  return absl::InvalidArgumentError("usage: see the head of checkpoint_peer.cc");
}

}  // namespace
}  // namespace ddp::checkpoint

int main(int argc, char** argv) {
  const absl::Status status = ddp::CatchStatus("checkpoint_peer", [&] {
    return ddp::checkpoint::Run(std::vector<std::string>(argv + 1, argv + argc));
  });
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}
