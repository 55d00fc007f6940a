#include "ddp/clip_grad.h"

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

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

// As C++'s parameters() lists it, once for each of its names.
TEST(ClipGradTest, ASharedParameterCountsOnce) {
  std::vector<at::Tensor> parameters = WithGradients();
  parameters.push_back(parameters[0]);
  EXPECT_DOUBLE_EQ(clip_grad_norm_(parameters, 1.0), 5.0);
  EXPECT_NEAR(parameters[0].grad()[0].item<float>(), 0.6f, 1e-6);
  EXPECT_NEAR(parameters[1].grad()[1].item<float>(), -0.8f, 1e-6);
  at::Tensor complex = at::zeros({2}, at::kComplexFloat);
  complex.mutable_grad() = at::view_as_complex(at::tensor({3.0f, 4.0f, 0.0f, 0.0f}).view({2, 2}));
  EXPECT_FLOAT_EQ(clip_grad_norm_({complex, complex}, 1.0), 5.0);
  EXPECT_NEAR(at::view_as_real(complex.grad())[0][1].item<float>(), 0.8f, 1e-6);
}

TEST(ClipGradTest, ComplexGradientsHaveNoLimits) {
  std::vector<at::Tensor> parameters = WithGradients();
  clip_grad_value_(parameters, 3.5);
  EXPECT_EQ(parameters[1].grad()[1].item<float>(), -3.5f);
  parameters.push_back(at::zeros({2}, at::kComplexFloat));
  parameters.back().mutable_grad() = at::ones({2}, at::kComplexFloat);
  try {
    clip_grad_value_(parameters, 1);
    ADD_FAILURE() << "no error";
  } catch (const c10::Error& error) {
    const std::string said = error.what_without_backtrace();
    EXPECT_NE(said.find("a gradient is complex"), std::string::npos) << said;
  }
  EXPECT_EQ(parameters[1].grad()[1].item<float>(), -3.5f);
}

TEST(ClipGradNormTest, NoGradientsNoNorm) {
  EXPECT_EQ(clip_grad_norm_({at::zeros({2})}, 1.0), 0.0);
}

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<at::Tensor> Random(std::mt19937_64& random, at::ScalarType dtype) {
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 5; ++i) {
    const int64_t most = i == 0 ? 300'000 : 2'000;
    tensors.push_back(at::randn({static_cast<int64_t>(random() % most)}).to(dtype));
  }
  return tensors;
}

NormSegment Whole(int index, const at::Tensor& tensor) {
  return {.tensor = index,
          .numel = tensor.numel(),
          .end = tensor.numel(),
          .values = tensor,
          .element_bytes = static_cast<int64_t>(tensor.element_size())};
}

double OnOneRank(const std::vector<at::Tensor>& tensors, double p) {
  std::vector<NormSegment> segments;
  for (size_t i = 0; i < tensors.size(); ++i) segments.push_back(Whole(i, tensors[i]));
  return BlockedNorm(segments, p);
}

// Cuts every tensor at random units and gives the segments to random ranks; each rank's partial
// sums are taken down, and added up for all.
double OnRanks(const std::vector<at::Tensor>& tensors, double p, int ranks,
               std::mt19937_64& random) {
  struct Owned {
    NormSegment segment;
    int owner;
  };
  std::vector<Owned> cut;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const NormSegment whole = Whole(i, tensors[i]);
    const int64_t unit = 64 / whole.element_bytes;
    for (int64_t at = 0; at < whole.numel;) {
      const int64_t units = 1 + random() % (random() % 2 == 0 ? 5 : 5000);
      NormSegment segment = whole;
      segment.begin = at;
      segment.end = std::min(whole.numel, at + units * unit);
      at = segment.end;
      cut.push_back({segment, static_cast<int>(random() % ranks)});
    }
  }
  at::Tensor sum;
  const auto of_rank = [&](int rank, const std::function<void(at::Tensor&)>& combine) {
    std::vector<NormSegment> segments;
    for (const Owned& owned : cut) {
      NormSegment segment = owned.segment;
      segment.values =
          owned.owner == rank ? segment.values.slice(0, segment.begin, segment.end) : at::Tensor();
      segments.push_back(segment);
    }
    return BlockedNorm(segments, p, combine);
  };
  for (int rank = 0; rank < ranks; ++rank) {
    of_rank(rank,
            [&](at::Tensor& partial) { sum = sum.defined() ? sum + partial : partial.clone(); });
  }
  return of_rank(0, [&](at::Tensor& partial) { partial = sum; });
}

TEST(BlockedNormTest, IsTorchsNorm) {
  std::mt19937_64 random(1);
  for (const double p : {2.0, 1.0, 3.0, 0.0, kInfinity}) {
    const std::vector<at::Tensor> tensors = Random(random, at::kFloat);
    const double expected =
        at::linalg_vector_norm(at::cat(tensors).to(at::kDouble), p).item<double>();
    EXPECT_NEAR(OnOneRank(tensors, p) / expected, 1, 1e-12) << "p = " << p;
  }
}

// Its halves as if on two ranks, too.
TEST(DeviceNormTest, IsTorchsNorm) {
  std::mt19937_64 random(3);
  for (const double p : {2.0, 1.0, 3.0, 0.0, kInfinity}) {
    SCOPED_TRACE(p);
    const std::vector<at::Tensor> tensors = Random(random, at::kDouble);
    const double expected = at::linalg_vector_norm(at::cat(tensors), p).item<double>();
    EXPECT_NEAR(DeviceNorm(tensors, p, at::kCPU) / expected, 1, 1e-10);
    at::Tensor of_first;
    DeviceNorm({tensors[0]}, p, at::kCPU, [&](at::Tensor& partial) { of_first = partial.clone(); });
    const double of_both =
        DeviceNorm({tensors.begin() + 1, tensors.end()}, p, at::kCPU, [&](at::Tensor& partial) {
          partial = std::isinf(p) ? at::maximum(partial, of_first) : partial + of_first;
        });
    EXPECT_NEAR(of_both / expected, 1, 1e-10);
  }
  EXPECT_EQ(DeviceNorm({}, 2, at::kCPU), 0);
}

TEST(BlockedNormTest, TheSameBitsHoweverItIsCut) {
  std::mt19937_64 random(2);
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    for (int round = 0; round < 12; ++round) {
      const std::vector<at::Tensor> tensors = Random(random, dtype);
      const double p = round % 3 == 0 ? 1.0 : round % 3 == 1 ? 2.0 : kInfinity;
      const double expected = OnOneRank(tensors, p);
      ASSERT_GT(expected, 0);
      for (int ranks = 1; ranks <= 4; ++ranks) {
        ASSERT_EQ(OnRanks(tensors, p, ranks, random), expected) << dtype << ", p = " << p;
      }
    }
  }
}

TEST(BlockedNormTest, NothingAndNotFinite) {
  EXPECT_EQ(BlockedNorm({}, 2.0), 0.0);
  EXPECT_EQ(OnOneRank({at::empty({0})}, 2.0), 0.0);
  at::Tensor tensor = at::ones({1000});
  tensor[999] = kInfinity;
  EXPECT_EQ(OnOneRank({tensor}, 2.0), kInfinity);
  tensor[500] = std::numeric_limits<float>::quiet_NaN();
  for (const double p : {2.0, 1.0, kInfinity}) EXPECT_TRUE(std::isnan(OnOneRank({tensor}, p)));
  EXPECT_TRUE(std::isnan(ClipFactor(std::numeric_limits<double>::quiet_NaN(), 1.0)));
  // Without a maximum there is nothing to clip, whatever the norm is.
  for (const double norm : {0.0, 5.0, kInfinity, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_EQ(ClipFactor(norm, kInfinity), 1.0) << norm;
  }
}

}  // namespace
}  // namespace ddp
