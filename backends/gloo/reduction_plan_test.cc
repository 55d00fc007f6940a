#include "backends/gloo/reduction_plan.h"

#include <string>

#include "ATen/ops/full.h"
#include "gtest/gtest.h"
#include "third_party/libtorch/compat.h"

namespace ddp::backends::gloo {
namespace {

using c10::ScalarType;
using c10d::ReduceOp;

TEST(PlanReductionTest, WhatGlooHasIsLeftToIt) {
  for (ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    for (auto op : {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT, ReduceOp::MIN}) {
      EXPECT_TRUE(PlanReduction(dtype, op).is_native) << dtype << " " << op;
    }
  }
  for (ScalarType dtype : {at::kByte, at::kChar, at::kInt, at::kLong}) {
    for (auto op : {ReduceOp::SUM, ReduceOp::MAX, ReduceOp::BAND, ReduceOp::BXOR}) {
      EXPECT_TRUE(PlanReduction(dtype, op).is_native) << dtype << " " << op;
    }
  }
  EXPECT_TRUE(PlanReduction(at::kComplexFloat, ReduceOp::SUM).is_native);
}

TEST(PlanReductionTest, AveragesOfIntegersAreSumsDividedAfterwards) {
  const ReductionPlan plan = PlanReduction(at::kLong, ReduceOp::AVG);
  EXPECT_FALSE(plan.is_native);
  EXPECT_EQ(plan.op, ReduceOp::SUM);
  EXPECT_EQ(plan.dtype, at::kLong);
  EXPECT_TRUE(plan.divide);
}

TEST(PlanReductionTest, DtypesThatGlooLacksAreWidened) {
  EXPECT_EQ(PlanReduction(at::kShort, ReduceOp::SUM).dtype, at::kInt);
  EXPECT_EQ(PlanReduction(at::kUInt32, ReduceOp::MAX).dtype, at::kLong);
  EXPECT_EQ(PlanReduction(at::kFloat8_e4m3fn, ReduceOp::SUM).dtype, at::kFloat);
}

TEST(PlanReductionTest, PremulSumScalesFirstAndSums16BitFloatsIn32) {
  for (ScalarType dtype : {at::kHalf, at::kBFloat16, at::kFloat}) {
    const ReductionPlan plan = PlanReduction(dtype, c10d::makePreMulSum(0.5));
    EXPECT_EQ(plan.dtype, at::kFloat);
    EXPECT_EQ(plan.op, ReduceOp::SUM);
    EXPECT_EQ(plan.factor, 0.5);
  }
  EXPECT_EQ(PlanReduction(at::kDouble, c10d::makePreMulSum(at::full({1}, 3.0))).factor, 3.0);
}

TEST(PlanReductionTest, WhatHasNoMeaningNamesDtypeAndOperation) {
  const auto message = [](ScalarType dtype, const ReduceOp& op) -> std::string {
    try {
      PlanReduction(dtype, op);
      return "";
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
  };
  EXPECT_NE(message(at::kBool, ReduceOp::AVG).find("AVG of bool"), std::string::npos);
  EXPECT_NE(message(at::kInt, c10d::makePreMulSum(2.0)).find("PREMUL_SUM of Int"),
            std::string::npos);
  EXPECT_NE(message(at::kUInt64, ReduceOp::SUM).find("UInt64"), std::string::npos);
}

}  // namespace
}  // namespace ddp::backends::gloo
