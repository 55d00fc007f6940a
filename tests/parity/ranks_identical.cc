// Trains on synthetic data and then compares every rank's parameters with rank 0's, bit for bit.
//
//   ranks_identical BACKEND

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "ddp/session/session.h"
#include "ddp/trainer/trainer.h"
#include "tools/datasets/registry.h"
#include "tools/models/registry.h"
#include "torch/utils.h"

namespace ddp {
namespace {

// The bytes of all parameters and buffers, in order, as text.
std::string Fingerprint(const torch::nn::Module& module) {
  uint64_t hash = 14695981039346656037ull;
  std::vector<at::Tensor> tensors = module.parameters();
  for (const at::Tensor& buffer : module.buffers()) tensors.push_back(buffer);
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor flat = tensor.detach().contiguous();
    const auto* bytes = static_cast<const unsigned char*>(flat.data_ptr());
    for (size_t i = 0; i < flat.nbytes(); ++i) hash = (hash ^ bytes[i]) * 1099511628211ull;
  }
  return absl::StrCat(absl::Hex(hash));
}

absl::Status TrainAndCompare(const session::Session& session) {
  DDP_ASSIGN_OR_RETURN(auto data, tools::datasets::Load(
                                      {.name = "synthetic", .train_size = 1000, .test_size = 100}));
  torch::manual_seed(session.rank());  // ranks start apart: rank 0's model must win
  DDP_ASSIGN_OR_RETURN(
      auto task,
      tools::models::Make({.name = "cnn", .input_shape = {1, 28, 28}, .num_classes = 10}));
  trainer::TrainerOptions options;
  options.batch_size = 16;
  options.epochs = 2;
  options.optimizer.lr = 0.01;
  DDP_RETURN_IF_ERROR(trainer::Train(session, task, *data.train, *data.test, options).status());

  const std::string mine = Fingerprint(*task.module);
  DDP_ASSIGN_OR_RETURN(const std::string first, session.Broadcast(mine));
  if (mine != first) {
    return absl::InternalError(absl::StrCat("parameters ", mine, " are not rank 0's, ", first));
  }
  if (session.is_main()) std::printf("%d ranks, parameters %s\n", session.size(), mine.c_str());
  return absl::OkStatus();
}

}  // namespace
}  // namespace ddp

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s BACKEND\n", argv[0]);
    return 2;
  }
  return ddp::session::Run(
      {.launcher = {.default_nproc_per_node = 3}, .group = {.backend = argv[1]}}, argc, argv,
      ddp::TrainAndCompare);
}
