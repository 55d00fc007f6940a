#include "ddp/clip_grad.h"

#include <cmath>
#include <limits>

#include "ATen/ATen.h"
#include "gtest/gtest.h"

namespace ddp {
namespace {

std::vector<at::Tensor> WithGradients() {
  std::vector<at::Tensor> parameters = {at::zeros({2}), at::zeros({3}), at::zeros({1})};
  parameters[0].mutable_grad() = at::tensor({3.0f, 0.0f});
  parameters[1].mutable_grad() = at::tensor({0.0f, -4.0f, 0.0f});
  return parameters;  // the third has none
}

TEST(ClipGradNormTest, ScalesToTheNormAndReturnsTheOneBefore) {
  std::vector<at::Tensor> parameters = WithGradients();
  EXPECT_DOUBLE_EQ(clip_grad_norm_(parameters, 1.0), 5.0);
  EXPECT_NEAR(parameters[0].grad()[0].item<float>(), 0.6f, 1e-6);
  EXPECT_NEAR(parameters[1].grad()[1].item<float>(), -0.8f, 1e-6);
}

TEST(ClipGradNormTest, SmallGradientsStay) {
  std::vector<at::Tensor> parameters = WithGradients();
  clip_grad_norm_(parameters, 100.0);
  EXPECT_EQ(parameters[0].grad()[0].item<float>(), 3.0f);
}

TEST(ClipGradNormTest, OtherNorms) {
  EXPECT_DOUBLE_EQ(clip_grad_norm_(WithGradients(), 1.0, 1.0), 7.0);
  EXPECT_DOUBLE_EQ(clip_grad_norm_(WithGradients(), 1.0, std::numeric_limits<double>::infinity()),
                   4.0);
}

TEST(ClipGradNormTest, NonFiniteIsAnErrorOnRequestAndChangesNothing) {
  std::vector<at::Tensor> parameters = WithGradients();
  parameters[0].grad()[1] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THROW(clip_grad_norm_(parameters, 1.0, 2.0, true), std::exception);
  EXPECT_EQ(parameters[0].grad()[0].item<float>(), 3.0f);
  EXPECT_TRUE(std::isnan(clip_grad_norm_(parameters, 1.0)));
}

TEST(ClipGradNormTest, NoGradientsNoNorm) {
  EXPECT_EQ(clip_grad_norm_({at::zeros({2})}, 1.0), 0.0);
}

}  // namespace
}  // namespace ddp
