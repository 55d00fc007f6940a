#include "tools/bench/collective_task.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::tools::bench {
namespace {

using testing::HasSubstr;

TEST(ParseTask, ReadsEachWord) {
  const CollectiveTask task = *ParseTask(
      "do=verify op=allgather dtype=bfloat16 bytes=48 iterations=3 through=backend "
      "variant=in_place seed=7 expected_seed=8 arena=1\n");
  EXPECT_EQ(task.what, CollectiveTask::Do::kVerify);
  EXPECT_EQ(task.op, CollectiveOp::kAllGather);
  EXPECT_EQ(task.dtype, Dtype::kBFloat16);
  EXPECT_EQ(task.bytes, 48);
  EXPECT_EQ(task.iterations, 3);
  EXPECT_EQ(task.through, "backend");
  EXPECT_EQ(task.variant, "in_place");
  EXPECT_TRUE(task.arena);
  EXPECT_EQ(task.seed, 7u);
  EXPECT_EQ(task.expected_seed, 8u);
}

TEST(ParseTask, NamesWhatItDoesNotUnderstand) {
  for (const std::string word : {"op=allredoce", "bytes=-4", "iterations=0", "colour=red", "op"}) {
    EXPECT_THAT(std::string(ParseTask("do=time " + word).status().message()), HasSubstr(word));
  }
}

CollectiveTask Make(CollectiveOp op, Dtype dtype, int64_t bytes) {
  CollectiveTask task;
  task.op = op;
  task.dtype = dtype;
  task.bytes = bytes;
  task.seed = task.expected_seed = 5;
  return task;
}

TEST(Elements, MustBeWholeForEachRank) {
  EXPECT_EQ(*Elements(Make(CollectiveOp::kAllReduce, Dtype::kFloat32, 12), 2), 3);
  EXPECT_FALSE(Elements(Make(CollectiveOp::kAllReduce, Dtype::kFloat32, 6), 2).ok());
  EXPECT_FALSE(Elements(Make(CollectiveOp::kAllGather, Dtype::kFloat32, 12), 2).ok());
  const CollectiveTask scatter = Make(CollectiveOp::kReduceScatter, Dtype::kFloat16, 24);
  EXPECT_EQ(InputElements(scatter, 3), 12);
  EXPECT_EQ(OutputElements(scatter, 3), 4);
  const CollectiveTask gather = Make(CollectiveOp::kAllGather, Dtype::kInt64, 48);
  EXPECT_EQ(InputElements(gather, 3), 2);
  EXPECT_EQ(OutputElements(gather, 3), 6);
}

// The inputs of all ranks, and each collective written down naively.
std::vector<std::vector<float>> Inputs(const CollectiveTask& task, int world_size) {
  std::vector<std::vector<float>> inputs(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    inputs[rank].resize(InputElements(task, world_size));
    Input(task, {rank, world_size}, task.seed)
        .Fill(inputs[rank].data(), static_cast<int64_t>(inputs[rank].size()));
  }
  return inputs;
}

std::vector<float> Output(const CollectiveTask& task, const std::vector<std::vector<float>>& inputs,
                          int rank) {
  const int world_size = static_cast<int>(inputs.size());
  const int64_t n = OutputElements(task, world_size);
  std::vector<float> output(n);
  for (int64_t i = 0; i < n; ++i) {
    for (const std::vector<float>& input : inputs) {
      if (task.op == CollectiveOp::kAllReduce) output[i] += input[i];
      if (task.op == CollectiveOp::kReduceScatter) output[i] += input[rank * n + i];
    }
    const int64_t share = n / world_size;
    if (task.op == CollectiveOp::kAllGather) output[i] = inputs[i / share][i % share];
    if (task.op == CollectiveOp::kBroadcast) output[i] = inputs[0][i];
  }
  return output;
}

class CheckOutputTest : public testing::TestWithParam<CollectiveOp> {};

TEST_P(CheckOutputTest, TakesTheCollectiveAndNothingElse) {
  for (int world_size : {1, 2, 3, 8}) {
    // The data is longer than the period, and no multiple of it.
    const CollectiveTask task = Make(GetParam(), Dtype::kFloat32, 4 * 24 * 1001);
    const std::vector<std::vector<float>> inputs = Inputs(task, world_size);
    for (int rank = 0; rank < world_size; ++rank) {
      const Place place = {rank, world_size};
      std::vector<float> output = Output(task, inputs, rank);
      EXPECT_TRUE(CheckOutput(task, place, output.data()).ok());

      CollectiveTask other = task;
      other.expected_seed = 6;
      EXPECT_FALSE(CheckOutput(other, place, output.data()).ok());

      std::rotate(output.begin(), output.begin() + 1024, output.end());
      EXPECT_FALSE(CheckOutput(task, place, output.data()).ok());
      std::rotate(output.begin(), output.end() - 1024, output.end());
      output.back() += 1;
      EXPECT_THAT(std::string(CheckOutput(task, place, output.data()).message()),
                  HasSubstr("element " + std::to_string(output.size() - 1)));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ops, CheckOutputTest,
                         testing::Values(CollectiveOp::kAllReduce, CollectiveOp::kReduceScatter,
                                         CollectiveOp::kAllGather, CollectiveOp::kBroadcast));

template <typename T>
std::vector<T> Encoded(Dtype dtype) {
  std::vector<T> encoded(4);
  Pattern(dtype, {0, 1, 12, 255}).Fill(encoded.data(), 4);
  return encoded;
}

TEST(Pattern, EncodesEachType) {
  using testing::ElementsAre;
  EXPECT_THAT(Encoded<float>(Dtype::kFloat32), ElementsAre(0, 1, 12, 255));
  EXPECT_THAT(Encoded<double>(Dtype::kFloat64), ElementsAre(0, 1, 12, 255));
  EXPECT_THAT(Encoded<int32_t>(Dtype::kInt32), ElementsAre(0, 1, 12, 255));
  EXPECT_THAT(Encoded<int64_t>(Dtype::kInt64), ElementsAre(0, 1, 12, 255));
  // The expected values are numpy's float16 and torch's bfloat16.
  EXPECT_THAT(Encoded<uint16_t>(Dtype::kFloat16), ElementsAre(0, 0x3c00, 0x4a00, 0x5bf8));
  EXPECT_THAT(Encoded<uint16_t>(Dtype::kBFloat16), ElementsAre(0, 0x3f80, 0x4140, 0x437f));
}

}  // namespace
}  // namespace ddp::tools::bench
