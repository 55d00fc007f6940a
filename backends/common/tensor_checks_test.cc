#include "backends/common/tensor_checks.h"

#include <string>

#include "ATen/ops/empty.h"
#include "ATen/ops/ones.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace ddp::backends {
namespace {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

constexpr CallName kCall{"shm:allgather", /*rank=*/1, /*world_size=*/3};

// The message of the c10::Error that `check` throws; empty if it throws none.
template <typename Check>
std::string ErrorOf(const Check& check) {
  try {
    check();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

at::Tensor Floats(int64_t count) { return at::ones({count}); }
at::Tensor Ints(int64_t count) { return at::ones({count}, at::kInt); }

TEST(TensorChecksTest, AMessageNamesCallAndRankAndWhatWasGivenAndWhatIsRequired) {
  EXPECT_EQ(ErrorOf([] {
              CheckSingleTensor(kCall, {Floats(1), Floats(1)});
            }),
            "shm:allgather on rank 1 of 3: 2 tensors given; one tensor is required");
  EXPECT_EQ(ErrorOf([] { CheckRank(kCall, "root", 3); }),
            "shm:allgather on rank 1 of 3: root rank 3 given; a rank from 0 to 2 is required");
}

TEST(TensorChecksTest, DenseCpuTensorsPass) {
  const at::Tensor strided = at::ones({4, 6}).t().slice(0, 0, 6, 2);
  for (const at::Tensor& tensor : {Floats(0), Ints(5), strided}) {
    EXPECT_EQ(ErrorOf([&] { CheckTensor(kCall, tensor); }), "");
    EXPECT_EQ(ErrorOf([&] { CheckTensors(kCall, {tensor, tensor}); }), "");
    const Tensors one = {tensor};
    EXPECT_TRUE(CheckSingleTensor(kCall, one).is_same(tensor));
  }
}

TEST(TensorChecksTest, OtherTensorsDoNot) {
  const at::Tensor undefined;
  EXPECT_TRUE(absl::StrContains(ErrorOf([&] { CheckTensor(kCall, undefined); }), "undefined"));
  const at::Tensor sparse = Floats(5).to_sparse();
  EXPECT_TRUE(absl::StrContains(ErrorOf([&] { CheckTensor(kCall, sparse); }), "Sparse on cpu"));
  const at::Tensor meta = at::empty({2}, at::TensorOptions(at::kMeta));
  const std::string error = ErrorOf([&] { CheckTensors(kCall, {Floats(1), meta}); });
  EXPECT_TRUE(absl::StrContains(error, "on meta")) << error;
  EXPECT_TRUE(absl::StrContains(error, "cuda:nccl")) << error;
  for (const at::Tensor& wrong : {undefined, sparse, meta}) {
    EXPECT_NE(ErrorOf([&] { CheckSingleTensor(kCall, {wrong}); }), "");
    EXPECT_NE(ErrorOf([&] { CheckSameDtype(kCall, Floats(1), wrong); }), "");
    EXPECT_NE(ErrorOf([&] { CheckSameSize(kCall, wrong, Floats(1)); }), "");
    EXPECT_NE(ErrorOf([&] { CheckWholeOfParts(kCall, wrong, Floats(1)); }), "");
    EXPECT_NE(ErrorOf([&] { CheckWholeOfParts(kCall, Floats(3), wrong); }), "");
  }
  EXPECT_TRUE(absl::StrContains(ErrorOf([] { CheckSingleTensor(kCall, {}); }), "0 tensors"));
}

TEST(TensorChecksTest, DtypesAndSizes) {
  EXPECT_EQ(ErrorOf([] { CheckSameDtype(kCall, Floats(1), Floats(2)); }), "");
  EXPECT_TRUE(absl::StrContains(ErrorOf([] { CheckSameDtype(kCall, Floats(1), Ints(1)); }),
                                "an input of Float and an output of Int"));
  EXPECT_EQ(ErrorOf([] { CheckSameSize(kCall, at::ones({2, 3}), Floats(6)); }), "");
  EXPECT_TRUE(absl::StrContains(ErrorOf([] { CheckSameSize(kCall, Floats(6), Floats(7)); }),
                                "6 elements and an output of 7"));
  EXPECT_NE(ErrorOf([] { CheckSameSize(kCall, Floats(6), Ints(6)); }), "");

  EXPECT_EQ(ErrorOf([] { CheckWholeOfParts(kCall, Floats(6), Floats(2)); }), "");
  EXPECT_TRUE(absl::StrContains(ErrorOf([] { CheckWholeOfParts(kCall, Floats(5), Floats(2)); }),
                                "3 x 2 are required"));
  EXPECT_NE(ErrorOf([] { CheckWholeOfParts(kCall, Floats(6), Ints(2)); }), "");
}

TEST(TensorChecksTest, NumbersOfTensorsAndLists) {
  EXPECT_EQ(ErrorOf([] { CheckOnePerRank(kCall, "inputs", 3); }), "");
  EXPECT_TRUE(absl::StrContains(ErrorOf([] { CheckOnePerRank(kCall, "inputs", 4); }),
                                "4 inputs given; one per rank, 3, is required"));
  EXPECT_EQ(ErrorOf([] { CheckSameCount(kCall, 2, 2); }), "");
  EXPECT_NE(ErrorOf([] { CheckSameCount(kCall, 2, 1); }), "");
  EXPECT_EQ(ErrorOf([] { CheckOwnPart(kCall, 8, 8); }), "");
  EXPECT_NE(ErrorOf([] { CheckOwnPart(kCall, 8, 4); }), "");

  const Tensors three = {Floats(1), Floats(2), Floats(3)};
  const TensorLists one = {three}, two = {three, three}, short_list = {{Floats(1)}}, none;
  EXPECT_EQ(&CheckSingleList(kCall, "outputs", one), &one[0]);
  for (const TensorLists& wrong : {two, short_list, none}) {
    EXPECT_NE(ErrorOf([&] { CheckSingleList(kCall, "outputs", wrong); }), "");
    EXPECT_NE(ErrorOf([&] { CheckListOfRoot(kCall, "outputs", wrong, /*root=*/1); }), "");
  }
  EXPECT_EQ(ErrorOf([&] { CheckListOfRoot(kCall, "outputs", one, /*root=*/1); }), "");
  EXPECT_EQ(ErrorOf([&] { CheckListOfRoot(kCall, "outputs", none, /*root=*/0); }), "");
  EXPECT_TRUE(
      absl::StrContains(ErrorOf([&] { CheckListOfRoot(kCall, "outputs", one, /*root=*/0); }),
                        "only the root, rank 0, has outputs"));
}

TEST(TensorChecksTest, RanksAndReductions) {
  for (int rank : {0, 2}) EXPECT_EQ(ErrorOf([&] { CheckRank(kCall, "peer", rank); }), "");
  for (int rank : {-1, 3}) EXPECT_NE(ErrorOf([&] { CheckRank(kCall, "peer", rank); }), "");

  const Reduction mean = CheckReduction(kCall, c10d::ReduceOp::AVG, at::kHalf);
  EXPECT_EQ(mean.dtype, DType::kHalf);
  EXPECT_EQ(mean.op, ReduceOp::kAvg);
  EXPECT_EQ(mean.factor, 3);
  const std::string error =
      ErrorOf([] { CheckReduction(kCall, c10d::ReduceOp::BAND, at::kFloat); });
  EXPECT_TRUE(absl::StartsWith(error, "shm:allgather on rank 1 of 3: ")) << error;
}

}  // namespace
}  // namespace ddp::backends
