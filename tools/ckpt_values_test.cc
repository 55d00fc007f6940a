#include "tools/ckpt_values.h"

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "checkpoint/state.h"

namespace ddp::tools::ckpt {
namespace {

using checkpoint::NewTree;
using checkpoint::State;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(CastTest, ACastLeavesCountsOfStepsAndSignsOfViews) {
  State state;
  std::vector<std::string> overflows;
  c10::impl::GenericDict optimizer = NewTree(), moments = NewTree();
  moments.insert("exp_avg", at::ones({3}));
  moments.insert("step", at::scalar_tensor(1001.0, at::kFloat));
  optimizer.insert("state", moments);
  state.root.insert("optimizer", optimizer);
  const at::Tensor complex = at::complex(at::ones({2}), at::ones({2}));
  c10::impl::GenericDict model = NewTree();
  model.insert("imag", at::imag(complex));
  model.insert("of_conjugate", at::imag(complex.conj()));
  state.root.insert("model", model);
  const c10::IValue cast = Cast(state.root, at::kBFloat16, overflows);
  const auto in = [&](const char* component) {
    return cast.toGenericDict().at(component).toGenericDict();
  };
  const auto kept = in("optimizer").at("state").toGenericDict();
  EXPECT_EQ(kept.at("step").toTensor().item<double>(), 1001);
  EXPECT_EQ(kept.at("exp_avg").toTensor().scalar_type(), at::kBFloat16);
  EXPECT_EQ(in("model").at("imag").toTensor()[0].item<double>(), 1);
  EXPECT_EQ(in("model").at("of_conjugate").toTensor()[0].item<double>(), -1);
  EXPECT_EQ(overflows, std::vector<std::string>());
}

// A scaler begins with 65536, which float16 does not hold.
TEST(CastTest, WhatTheTypeDoesNotHoldIsNamed) {
  State state;
  c10::impl::GenericDict model = NewTree(), scaler = NewTree();
  model.insert("large", at::tensor({1., 1e6}));
  model.insert("infinite", at::tensor({1., kInf, kNan}));
  model.insert("count", at::tensor({int64_t{1} << 40}));
  scaler.insert("scale", at::scalar_tensor(65536., at::kFloat));
  state.root.insert("model", model);
  state.root.insert("scaler", scaler);
  std::vector<std::string> overflows;
  const c10::IValue cast = Cast(state.root, at::kHalf, overflows);
  EXPECT_EQ(overflows, std::vector<std::string>{"model/large"});
  const auto kept = cast.toGenericDict().at("scaler").toGenericDict().at("scale").toTensor();
  EXPECT_EQ(kept.item<double>(), 65536);
  overflows.clear();
  Cast(state.root, at::kFloat8_e4m3fn, overflows);
  EXPECT_EQ(overflows, std::vector<std::string>{"model/large"});
}

TEST(ComparisonTest, EqualElementsDoNotCount) {
  const auto largest = [](const at::Tensor& a, const at::Tensor& b) {
    Comparison comparison;
    comparison.Compare(a, b, "a");
    return comparison.max_abs();
  };
  EXPECT_EQ(largest(at::tensor({1., kInf}), at::tensor({2., kInf})), 1);
  EXPECT_EQ(largest(at::tensor({1., kNan}), at::tensor({3., kNan})), 2);
  EXPECT_EQ(largest(at::tensor({1., kInf}), at::tensor({1., -kInf})), kInf);
  EXPECT_TRUE(std::isnan(*largest(at::tensor({1., kNan}), at::tensor({3., 0.}))));
  EXPECT_EQ(largest(at::tensor({1., kNan}), at::tensor({1., kNan})), std::nullopt);
}

}  // namespace
}  // namespace ddp::tools::ckpt
