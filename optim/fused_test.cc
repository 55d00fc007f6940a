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

// Takes the steps with both optimizers, with the same gradients.
void TakeTenSteps(torch::optim::Optimizer& fused, std::vector<at::Tensor>& ours,
                  torch::optim::Optimizer& plain, std::vector<at::Tensor>& theirs) {
  for (int step = 0; step < 10; ++step) {
    SetGradients(ours, step);
    SetGradients(theirs, step);
    fused.step();
    plain.step();
  }
}

// Ten steps of both; the fused ones may differ from the plain ones by rounding alone.
template <typename Fused, typename Plain, typename Options>
void ExpectSameSteps(const Options& options) {
  std::vector<at::Tensor> ours = Parameters();
  std::vector<at::Tensor> theirs = Parameters();
  Fused fused(ours, options);
  Plain plain(theirs, options);
  TakeTenSteps(fused, ours, plain, theirs);
  for (size_t i = 0; i < ours.size(); ++i) {
    EXPECT_TRUE(at::allclose(ours[i], theirs[i], 1e-5, 1e-6)) << "parameter " << i;
    EXPECT_FALSE(at::equal(ours[i], Parameters()[i])) << "parameter " << i << " did not move";
  }
  EXPECT_EQ(fused.state().size(), plain.state().size());
}

// The same with two groups that have different options.
template <typename Fused, typename Plain, typename Options>
void ExpectSameStepsOfGroups(const Options& first, const Options& second) {
  using torch::optim::OptimizerParamGroup;
  std::vector<at::Tensor> ours = Parameters();
  std::vector<at::Tensor> theirs = Parameters();
  const auto groups = [&](const std::vector<at::Tensor>& all) {
    return std::vector<OptimizerParamGroup>{
        OptimizerParamGroup({all[0], all[1]}, std::make_unique<Options>(first)),
        OptimizerParamGroup({all[2], all[3]}, std::make_unique<Options>(second))};
  };
  Fused fused(groups(ours), first);
  Plain plain(groups(theirs), first);
  TakeTenSteps(fused, ours, plain, theirs);
  for (size_t i = 0; i < ours.size(); ++i) {
    EXPECT_TRUE(at::allclose(ours[i], theirs[i], 1e-5, 1e-6)) << "parameter " << i;
  }
}

TEST(FusedTest, EachGroupHasItsOwnOptions) {
  using torch::optim::AdamOptions;
  using torch::optim::AdamWOptions;
  using torch::optim::SGDOptions;
  ExpectSameStepsOfGroups<FusedSGD, torch::optim::SGD>(
      SGDOptions(0.1).momentum(0.9), SGDOptions(0.01).momentum(0.5).weight_decay(0.1));
  ExpectSameStepsOfGroups<FusedAdam, torch::optim::Adam>(
      AdamOptions(1e-2), AdamOptions(1e-3).betas({0.8, 0.9}).weight_decay(0.1));
  ExpectSameStepsOfGroups<FusedAdamW, torch::optim::AdamW>(
      AdamWOptions(1e-2), AdamWOptions(1e-3).betas({0.8, 0.9}).weight_decay(0.1));
}

// A gradient in another memory order than its parameter; the kernels ignore strides.
template <typename Fused, typename Plain, typename Options>
void ExpectSameStepsOfTransposed(const Options& options) {
  const at::Tensor start = at::linspace(-1, 1, 24).view({4, 6});
  at::Tensor ours = start.clone().requires_grad_(), theirs = start.clone().requires_grad_();
  Fused fused(std::vector<at::Tensor>{ours}, options);
  Plain plain(std::vector<at::Tensor>{theirs}, options);
  for (int step = 0; step < 3; ++step) {
    const at::Tensor gradient = at::linspace(step, step + 2, 24).view({6, 4}).t();
    ours.mutable_grad() = gradient.clone();
    theirs.mutable_grad() = gradient.clone();
    ASSERT_EQ(ours.grad().stride(0), 1);
    fused.step();
    plain.step();
  }
  EXPECT_TRUE(at::allclose(ours, theirs, 1e-5, 1e-6)) << ours << theirs;
}

TEST(FusedTest, AGradientInAnotherMemoryOrder) {
  ExpectSameStepsOfTransposed<FusedSGD, torch::optim::SGD>(
      torch::optim::SGDOptions(0.1).momentum(0.9));
  ExpectSameStepsOfTransposed<FusedAdam, torch::optim::Adam>(torch::optim::AdamOptions(1e-2));
  ExpectSameStepsOfTransposed<FusedAdamW, torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2));
}

// torch::optim::SGD takes them, the others refuse them.
TEST(FusedTest, ASparseGradient) {
  at::Tensor ours = at::ones({4, 2}).requires_grad_(), theirs = at::ones({4, 2}).requires_grad_();
  FusedSGD fused(std::vector<at::Tensor>{ours}, torch::optim::SGDOptions(0.5));
  torch::optim::SGD plain(std::vector<at::Tensor>{theirs}, torch::optim::SGDOptions(0.5));
  const at::Tensor rows = at::tensor({1, 3}, at::kLong).view({1, 2});
  const at::Tensor gradient = at::sparse_coo_tensor(rows, at::ones({2, 2}), {4, 2});
  ours.mutable_grad() = gradient;
  theirs.mutable_grad() = gradient;
  fused.step();
  plain.step();
  EXPECT_TRUE(at::equal(ours, theirs)) << ours << theirs;
  EXPECT_EQ(ours.sum().item<double>(), 8 - 0.5 * 4);
  FusedAdam adam(std::vector<at::Tensor>{ours}, torch::optim::AdamOptions(0.5));
  EXPECT_THROW(adam.step(), c10::Error);
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

// A module lists it once for each of its names.
template <typename Fused, typename Plain, typename Options>
void ExpectASharedParameterStepsOnce(const Options& options) {
  std::vector<at::Tensor> ours = Parameters(), theirs = Parameters();
  std::vector<at::Tensor> listed = ours;
  listed.insert(listed.begin() + 1, {ours[0], ours[2]});
  Fused fused(listed, options);
  EXPECT_EQ(fused.size(), ours.size());
  Plain plain(theirs, options);
  // A group that was added later, too.
  const at::Tensor own = at::ones({3}).requires_grad_(), other = own.detach().clone();
  fused.add_param_group(torch::optim::OptimizerParamGroup(std::vector<at::Tensor>{own, own}));
  plain.add_param_group(torch::optim::OptimizerParamGroup(std::vector<at::Tensor>{other}));
  own.mutable_grad() = at::ones({3});
  other.mutable_grad() = at::ones({3});
  TakeTenSteps(fused, ours, plain, theirs);
  ours.push_back(own);
  theirs.push_back(other);
  for (size_t i = 0; i < ours.size(); ++i) {
    EXPECT_TRUE(at::allclose(ours[i], theirs[i], 1e-5, 1e-6)) << "parameter " << i;
  }
  const auto in_two_groups = [&] {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<at::Tensor>{ours[0]});
    groups.emplace_back(std::vector<at::Tensor>{ours[1], ours[0]});
    Fused(groups, options);
  };
  EXPECT_THROW(in_two_groups(), c10::Error);
}

TEST(FusedTest, ASharedParameterStepsOnce) {
  ExpectASharedParameterStepsOnce<FusedSGD, torch::optim::SGD>(
      torch::optim::SGDOptions(0.1).momentum(0.9));
  ExpectASharedParameterStepsOnce<FusedAdam, torch::optim::Adam>(torch::optim::AdamOptions(1e-2));
  ExpectASharedParameterStepsOnce<FusedAdamW, torch::optim::AdamW>(
      torch::optim::AdamWOptions(1e-2));
}

// Against real parameters of one more dimension.
template <typename Fused, typename Plain, typename Options>
void ExpectComplexNumbersToBePairs(const Options& options) {
  const at::Tensor start = at::randn({5, 4}, at::kComplexFloat);
  at::Tensor ours = start.clone().requires_grad_(), beside = at::ones({2}).requires_grad_();
  at::Tensor theirs = at::view_as_real(start).clone().requires_grad_();
  Fused fused(std::vector<at::Tensor>{ours, beside}, options);
  Plain plain(std::vector<at::Tensor>{theirs}, options);
  for (int step = 0; step < 5; ++step) {
    const at::Tensor gradient = at::randn({5, 4}, at::kComplexFloat);
    // Once with the flag that its numbers are conjugated.
    ours.mutable_grad() = step == 2 ? gradient.conj_physical().conj() : gradient;
    theirs.mutable_grad() = at::view_as_real(gradient).clone();
    fused.step();
    plain.step();
  }
  EXPECT_TRUE(at::allclose(at::view_as_real(ours), theirs, 1e-5, 1e-6)) << ours << theirs;
  EXPECT_FALSE(at::allclose(ours, start, 1e-3, 1e-3));
}

TEST(FusedTest, ComplexParametersArePairsOfRealNumbers) {
  using torch::optim::AdamOptions;
  using torch::optim::AdamWOptions;
  ExpectComplexNumbersToBePairs<FusedSGD, torch::optim::SGD>(
      torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.1));
  ExpectComplexNumbersToBePairs<FusedAdam, torch::optim::Adam>(AdamOptions(1e-2).amsgrad(true));
  ExpectComplexNumbersToBePairs<FusedAdamW, torch::optim::AdamW>(AdamWOptions(1e-2));
}

// The base class's step would square it.
TEST(FusedTest, AComplexGradientThatCannotBeFusedIsRefused) {
  at::Tensor complex = at::ones({4, 2}, at::kComplexFloat).requires_grad_();
  complex.mutable_grad() = at::ones({2, 4}, at::kComplexFloat).t();
  EXPECT_THROW(FusedAdam(std::vector<at::Tensor>{complex}, torch::optim::AdamOptions(0.1)).step(),
               c10::Error);
  EXPECT_THROW(FusedAdamW(std::vector<at::Tensor>{complex}, torch::optim::AdamWOptions(0.1)).step(),
               c10::Error);
  FusedSGD(std::vector<at::Tensor>{complex}, torch::optim::SGDOptions(0.5)).step();
  EXPECT_TRUE(complex.eq(0.5).all().item<bool>());
}

}  // namespace
}  // namespace ddp::optim
