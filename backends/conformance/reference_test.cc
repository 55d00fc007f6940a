// The suite's own parts: plans and values by hand, and wrong results that must be found.

#include <algorithm>
#include <cstring>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "backends/conformance/cover.h"
#include "backends/conformance/plan.h"
#include "backends/conformance/values.h"
#include "c10/util/BFloat16.h"
#include "gtest/gtest.h"

namespace ddp::backends::conformance {
namespace {

using Output = std::vector<Segment>;
using Bytes = std::vector<uint8_t>;

template <typename T>
std::vector<T> As(const Bytes& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

TEST(PlanTest, ReduceScatterGivesEachRankItsPartOfTheSum) {
  const Plan plan = MakePlan(Op::kReduceScatterBase, 5, /*world_size=*/3, /*rank=*/2, /*root=*/0);
  EXPECT_EQ(plan.inputs, std::vector<int64_t>{15});
  ASSERT_EQ(plan.outputs.size(), 1);
  EXPECT_EQ(plan.outputs[0], (Output{{Segment::kAllRanks, 0, 10, 5}}));
}

TEST(PlanTest, OnlyTheRootGathers) {
  EXPECT_TRUE(MakePlan(Op::kGather, 4, 2, /*rank=*/0, /*root=*/1).outputs.empty());
  const Plan root = MakePlan(Op::kGather, 4, 2, /*rank=*/1, /*root=*/1);
  ASSERT_EQ(root.outputs.size(), 2);
  EXPECT_EQ(root.outputs[0], (Output{{0, 0, 0, 4}}));
  EXPECT_EQ(root.outputs[1], (Output{{1, 0, 0, 4}}));
}

// Whatever one rank sends to another must be what that one expects of it, in size and place.
TEST(PlanTest, AlltoallReadsEachInputOnceAndWholly) {
  for (Op op : {Op::kAlltoall, Op::kAlltoallBase, Op::kAlltoallBaseUnequal}) {
    for (int world : {1, 2, 3, 4}) {
      bool has_empty = false;
      for (int source = 0; source < world; ++source) {
        const Plan sent = MakePlan(op, 6, world, source, 0);
        std::set<std::pair<int, int64_t>> read;
        int64_t elements = 0;
        for (int target = 0; target < world; ++target) {
          for (const Output& output : MakePlan(op, 6, world, target, 0).outputs) {
            for (const Segment& segment : output) {
              if (segment.rank != source) continue;
              has_empty |= segment.count == 0;
              ASSERT_LE(segment.offset + segment.count, sent.inputs[segment.input]);
              elements += segment.count;
              for (int64_t i = 0; i < segment.count; ++i) {
                EXPECT_TRUE(read.emplace(segment.input, segment.offset + i).second);
              }
            }
          }
        }
        int64_t all = 0;
        for (int64_t input : sent.inputs) all += input;
        EXPECT_EQ(elements, all) << Name(op) << " world " << world << " rank " << source;
      }
      EXPECT_EQ(has_empty, op != Op::kAlltoallBase && world > 1);
    }
  }
}

TEST(ValuesTest, SumsInRankOrderAndRoundsOnce) {
  Case c{.op = Op::kAllreduce, .dtype = at::kBFloat16, .count = 1000, .world_size = 4};
  const Values values(c, 4, /*salt=*/5);
  std::vector<std::vector<c10::BFloat16>> inputs;
  for (int rank = 0; rank < 4; ++rank) {
    inputs.push_back(As<c10::BFloat16>(values.Input(rank, 0, 0, 1000)));
  }
  const auto sums = As<c10::BFloat16>(values.Expected({{Segment::kAllRanks, 0, 0, 1000}}));
  for (int i = 0; i < 1000; ++i) {
    float sum = inputs[0][i];
    for (int rank = 1; rank < 4; ++rank) sum += static_cast<float>(inputs[rank][i]);
    ASSERT_EQ(sums[i].x, c10::BFloat16(sum).x) << i;
  }
}

TEST(ValuesTest, IntegersWrapAndAveragesRoundTowardsZero) {
  Case c{.op = Op::kAllreduce, .reduction = ReductionOp::kProduct, .dtype = at::kChar};
  const Values products(c, 8, 1);
  const auto product = As<int8_t>(products.Expected({{Segment::kAllRanks, 0, 7, 1}}));
  uint8_t expected = 1;
  for (int rank = 0; rank < 8; ++rank) expected *= As<uint8_t>(products.Input(rank, 0, 7, 1))[0];
  EXPECT_EQ(static_cast<uint8_t>(product[0]), expected);

  c.reduction = ReductionOp::kAvg;
  const Values averages(c, 2, 1);
  const auto average = As<int8_t>(averages.Expected({{Segment::kAllRanks, 0, 0, 100}}));
  const auto a = As<int8_t>(averages.Input(0, 0, 0, 100)),
             b = As<int8_t>(averages.Input(1, 0, 0, 100));
  bool negative_odd = false;
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(average[i], (a[i] + b[i]) / 2);
    negative_odd |= a[i] + b[i] < 0 && (a[i] + b[i]) % 2 != 0;
  }
  EXPECT_TRUE(negative_odd);
}

// What a backend may get wrong: each of these must be seen, in every dtype.
TEST(ValuesTest, WrongResultsDoNotPass) {
  for (c10::ScalarType dtype : AllDtypes()) {
    for (Op op : {Op::kAllgather, Op::kAllreduce}) {
      const Case c{.op = op, .dtype = dtype, .count = 64, .world_size = 3};
      if (!IsMeaningful(c)) continue;
      const Values values(c, 3, /*salt=*/9), other_call(c, 3, /*salt=*/10), fewer(c, 2, 9);
      const bool reduced = HasReduction(op);
      const Output output = {{reduced ? Segment::kAllRanks : 1, 0, 0, 64}};
      const Bytes right = values.Expected(output);
      for (Exactness exactness : {Exactness::kBits, Exactness::kRounding}) {
        const auto finds = [&](const Bytes& wrong) {
          return absl::IsDataLoss(values.Compare(output, wrong, exactness));
        };
        SCOPED_TRACE(CaseName(c));
        EXPECT_TRUE(values.Compare(output, right, exactness).ok());
        EXPECT_TRUE(finds(values.Input(1, 0, 1, 64))) << "from the next element on";
        EXPECT_TRUE(finds(values.Input(2, 0, 0, 64))) << "of another rank";
        EXPECT_TRUE(finds(other_call.Expected(output))) << "of another call";
        EXPECT_EQ(finds(fewer.Expected(output)), reduced) << "of all ranks but one";
        Bytes one_byte = right;
        one_byte.at(right.size() - 1) ^= 0x41;
        EXPECT_TRUE(finds(one_byte)) << "one byte";
        EXPECT_TRUE(finds(Bytes(right.begin(), right.end() - 1))) << "too short";
      }
    }
  }
}

TEST(ValuesTest, LargeOutputsAreComparedToTheirEnd) {
  const Case c{.op = Op::kAllgather, .dtype = at::kShort, .world_size = 2};
  const Values values(c, 2, /*salt=*/3);
  const int64_t count = Values::kBlock + 5;
  const Output output = {{0, 0, 0, count}, {1, 0, 0, count}};
  const Bytes right = values.Expected(output);
  EXPECT_TRUE(values.Compare(output, right, Exactness::kBits).ok());
  Bytes swapped(right.begin() + count * 2, right.end());
  swapped.insert(swapped.end(), right.begin(), right.begin() + count * 2);
  EXPECT_FALSE(values.Compare(output, swapped, Exactness::kBits).ok());
  for (int64_t element : {count - 1, count, 2 * count - 1}) {
    Bytes wrong = right;
    wrong[element * 2] ^= 1;
    const absl::Status status = values.Compare(output, wrong, Exactness::kBits);
    EXPECT_TRUE(absl::StrContains(status.message(), absl::StrCat("element ", element, " is not")))
        << status;
    EXPECT_TRUE(absl::StrContains(status.message(), absl::StrCat("; 1 of ", 2 * count))) << status;
  }
}

TEST(CoverTest, HoldsEveryPairOfOperationAndSizeAndOfDtypeAndWorld) {
  const std::vector<Case> cover = PairwiseCover();
  std::set<std::pair<Op, int64_t>> op_count;
  std::set<std::pair<c10::ScalarType, int>> dtype_world;
  std::set<std::pair<TensorLayout, Scope>> layout_scope;
  std::set<std::string> names;
  for (const Case& c : cover) {
    EXPECT_TRUE(IsMeaningful(c)) << CaseName(c);
    EXPECT_TRUE(names.insert(CaseName(c)).second) << CaseName(c) << " twice";
    op_count.emplace(c.op, c.count);
    dtype_world.emplace(c.dtype, c.world_size);
    layout_scope.emplace(c.layout, c.scope);
  }
  for (Op op : AllOps()) {
    if (!MovesData(op)) continue;
    // Each size, whichever dtype has it.
    for (size_t i = 0; i < Counts(c10::ScalarType::Float).size(); ++i) {
      const auto has_size = [&](c10::ScalarType dtype) {
        return op_count.count({op, Counts(dtype)[i]}) != 0;
      };
      EXPECT_TRUE(std::any_of(AllDtypes().begin(), AllDtypes().end(), has_size))
          << Name(op) << " with size " << i;
    }
  }
  EXPECT_EQ(dtype_world.size(), AllDtypes().size() * AllWorldSizes().size());
  EXPECT_EQ(layout_scope.size(), AllLayouts().size() * AllScopes().size());
  EXPECT_GT(cover.size(), 500);
  EXPECT_LT(cover.size(), 3000);
}

TEST(CoverTest, TheFullProductHasEachCaseOnce) {
  std::set<std::string> names;
  const int64_t step = 9973;  // a sample: the whole takes seconds
  int64_t cases = 0;
  for (int64_t i = 0; i < FullProductSize(); i += step) {
    if (const std::optional<Case> c = FullProduct(i)) {
      EXPECT_TRUE(names.insert(CaseName(*c)).second) << CaseName(*c);
      ++cases;
    }
  }
  EXPECT_GT(cases, 30);
}

}  // namespace
}  // namespace ddp::backends::conformance
