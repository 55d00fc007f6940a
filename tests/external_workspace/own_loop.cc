// A custom training loop on two ranks: own_loop DIR STEPS. It can stop within an epoch and resume
// there: `own_loop A 7; own_loop A 15` gives the same bits as `own_loop B 15`.
#include <iostream>

#include "base/status.h"
#include "checkpoint/manager.h"
#include "checkpoint/module_state.h"
#include "ddp/data/sampler.h"
#include "ddp/ddp.h"
#include "ddp/session/session.h"
#include "optim/state_dict.h"
#include "torch/torch.h"

using namespace ddp;

absl::Status Train(const session::Session& ranks, const std::string& directory, int64_t steps) {
  torch::manual_seed(1);
  const auto x = torch::randn({100, 8}), y = x.sum(1, true).sin();
  torch::nn::Sequential net(torch::nn::Linear(8, 16), torch::nn::BatchNorm1d(16), torch::nn::ReLU(),
                            torch::nn::Linear(16, 1));
  torch::optim::Adam optimizer(net->parameters(), 1e-2);
  DDP_ASSIGN_OR_RETURN(auto model, Wrap(net, ranks.process_group()));
  DDP_ASSIGN_OR_RETURN(auto manager, checkpoint::Manager::Create({directory}, ranks));
  const data::DistributedSamplerOptions share = {.num_replicas = ranks.size(),
                                                 .rank = ranks.rank()};
  DDP_ASSIGN_OR_RETURN(auto sampler, data::DistributedSampler::Create(x.size(0), share));
  int64_t epoch = 0, sample = 0, step = 0;
  DDP_ASSIGN_OR_RETURN(auto newest, manager->LoadNewest());
  if (newest) {
    const auto& saved = newest->state.root;
    DDP_RETURN_IF_ERROR(checkpoint::LoadModuleState(*net, saved.at("model")));
    DDP_RETURN_IF_ERROR(ddp::optim::LoadOptimizerState(optimizer, saved.at("optimizer")));
    epoch = saved.at("epoch").toInt(), sample = saved.at("sample").toInt();
    step = saved.at("step").toInt();
  }
  if (ranks.is_main()) std::cout << "from step " << step << std::endl;
  for (; step < steps; ++step) {
    sampler.set_epoch(epoch);
    const auto batch = torch::tensor(sampler.Indices(sample)).slice(0, 0, 10);
    torch::mse_loss(model->forward(x.index({batch})), y.index({batch})).backward();
    optimizer.step();
    model->zero_grad();
    sample += batch.numel() * ranks.size();  // examples of this epoch, over all ranks
    if (sample >= sampler.total_size()) ++epoch, sample = 0;
  }
  model->parallel().SyncBuffers();
  DDP_ASSIGN_OR_RETURN(auto adam, ddp::optim::OptimizerState(optimizer));
  checkpoint::State state;
  state.root.insert("model", checkpoint::ModuleState(*net));
  state.root.insert("optimizer", adam), state.root.insert("epoch", epoch);
  state.root.insert("sample", sample), state.root.insert("step", step);
  return manager->Save(checkpoint::StepName(step), std::move(state)).status();
}

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  return session::Run({.launcher = {.nproc_per_node = 2}}, argc, argv, [&](const auto& ranks) {
    return Train(ranks, argv[1], std::atoll(argv[2]));
  });
}
