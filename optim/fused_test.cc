#include "optim/fused.h"

#include <memory>
#include <vector>

#include "ATen/ATen.h"
#include "gtest/gtest.h"
#include "torch/utils.h"

namespace ddp::optim {
namespace {

std::vector<at::Tensor> Parameters() {
  torch::manual_seed(7);
  std::vector<at::Tensor> parameters = {
      at::randn({33, 17}), at::randn({5}),
      at::randn({4, 3, 3, 3}).contiguous(at::MemoryFormat::ChannelsLast), at::randn({})};
  for (at::Tensor& parameter : parameters) parameter.requires_grad_();
  return parameters;
}

// Gradients of step `step`; parameter 1 gets none in step 0, as happens with unused parameters.
void SetGradients(std::vector<at::Tensor>& parameters, int step) {
  torch::manual_seed(100 + step);
  for (size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor gradient = at::randn_like(parameters[i]).detach();
    parameters[i].mutable_grad() = (i == 1 && step == 0) ? at::Tensor() : gradient;
  }
}

// Ten steps of both; the fused ones may differ from the plain ones by rounding alone.
template <typename Fused, typename Plain, typename Options>
void ExpectSameSteps(const Options& options) {
  std::vector<at::Tensor> ours = Parameters();
  std::vector<at::Tensor> theirs = Parameters();
  Fused fused(ours, options);
  Plain plain(theirs, options);
  for (int step = 0; step < 10; ++step) {
    SetGradients(ours, step);
    SetGradients(theirs, step);
    fused.step();
    plain.step();
  }
  for (size_t i = 0; i < ours.size(); ++i) {
    EXPECT_TRUE(at::allclose(ours[i], theirs[i], 1e-5, 1e-6)) << "parameter " << i;
    EXPECT_FALSE(at::equal(ours[i], Parameters()[i])) << "parameter " << i << " did not move";
  }
  EXPECT_EQ(fused.state().size(), plain.state().size());
}

TEST(FusedTest, SGD) {
  using torch::optim::SGDOptions;
  ExpectSameSteps<FusedSGD, torch::optim::SGD>(SGDOptions(0.1));
  ExpectSameSteps<FusedSGD, torch::optim::SGD>(
      SGDOptions(0.1).momentum(0.9).weight_decay(1e-2).nesterov(true));
  ExpectSameSteps<FusedSGD, torch::optim::SGD>(SGDOptions(0.1).momentum(0.9).dampening(0.3));
}

TEST(FusedTest, Adam) {
  using torch::optim::AdamOptions;
  ExpectSameSteps<FusedAdam, torch::optim::Adam>(AdamOptions(1e-2));
  ExpectSameSteps<FusedAdam, torch::optim::Adam>(AdamOptions(1e-2).weight_decay(0.1).amsgrad(true));
}

TEST(FusedTest, AdamW) {
  using torch::optim::AdamWOptions;
  ExpectSameSteps<FusedAdamW, torch::optim::AdamW>(AdamWOptions(1e-2).weight_decay(0.1));
  ExpectSameSteps<FusedAdamW, torch::optim::AdamW>(AdamWOptions(1e-2).amsgrad(true));
}

TEST(FusedTest, StateThatLiesInAnotherOrderIsTakenOver) {
  using torch::optim::SGDOptions;
  std::vector<at::Tensor> ours = Parameters();
  std::vector<at::Tensor> theirs = Parameters();
  FusedSGD fused(ours, SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD plain(theirs, SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 4; ++step) {
    if (step == 2) {  // as a checkpoint would bring it
      auto& state = static_cast<torch::optim::SGDParamState&>(
          *fused.state().at(ours[2].unsafeGetTensorImpl()));
      state.momentum_buffer(state.momentum_buffer().contiguous());
    }
    SetGradients(ours, step);
    SetGradients(theirs, step);
    fused.step();
    plain.step();
  }
  EXPECT_TRUE(at::allclose(ours[2], theirs[2], 1e-5, 1e-6));
}

}  // namespace
}  // namespace ddp::optim
