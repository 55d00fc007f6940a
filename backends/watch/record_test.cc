#include "backends/watch/record.h"

#include "gtest/gtest.h"

namespace ddp::backends::watch {
namespace {

constexpr int8_t kFloat32 = 6;
constexpr int8_t kFloat64 = 7;

Record AllReduce(uint64_t numel = 1000, uint8_t reduce_op = 0, int8_t dtype = kFloat32) {
  Record record{.op = Op::kAllReduce, .reduce_op = reduce_op, .dtype = dtype};
  record.Add(numel);
  return record;
}

Record Broadcast(int32_t root) {
  Record record{.root = root, .op = Op::kBroadcast, .dtype = kFloat32};
  record.Add(1000);
  return record;
}

TEST(RecordTest, ReadsAsPeopleWriteIt) {
  EXPECT_EQ(ToString(AllReduce()), "allreduce(sum) float32 [1000]");
  EXPECT_EQ(ToString(Broadcast(2)), "broadcast(root 2) float32 [1000]");
  EXPECT_EQ(ToString(Record{.op = Op::kBarrier}), "barrier");

  Record reduce{.root = 1, .op = Op::kReduce, .reduce_op = 4, .dtype = 4};
  reduce.Add(5);
  reduce.Add(7);
  EXPECT_EQ(ToString(reduce), "reduce(max, root 1) int64 [12 in 2 tensors]");

  Record recv{.root = 3, .op = Op::kRecv, .dtype = 15};
  recv.Add(0);
  EXPECT_EQ(ToString(recv), "recv(from rank 3) bfloat16 [0]");
  EXPECT_EQ(ToString(Record{.op = Op::kAllReduce, .reduce_op = 77, .dtype = 99}),
            "allreduce(reduce op 77) dtype 99");
}

// Each way in which calls can differ tells them apart, in pairs and in the rolling signature.
TEST(RecordTest, WhateverDiffersDisagrees) {
  Record in_two{.op = Op::kAllReduce, .reduce_op = 0, .dtype = kFloat32};
  in_two.Add(500);
  in_two.Add(500);
  Record in_other_order = in_two;
  in_other_order.layout = 0;
  in_other_order.Add(0);
  const Record all[] = {
      AllReduce(),  AllReduce(1001), AllReduce(1000, 4), AllReduce(1000, 0, kFloat64), Broadcast(0),
      Broadcast(1), in_two,          in_other_order,     Record{.op = Op::kBarrier}};
  for (const Record& a : all) {
    for (const Record& b : all) {
      EXPECT_EQ(Agree(a, b), &a == &b) << ToString(a) << " / " << ToString(b);
      EXPECT_EQ(Extend(0, a) == Extend(0, b), &a == &b) << ToString(a) << " / " << ToString(b);
    }
  }
}

TEST(RecordTest, TheSignatureKnowsTheOrder) {
  const uint64_t one = Extend(Extend(0, AllReduce()), Broadcast(0));
  const uint64_t other = Extend(Extend(0, Broadcast(0)), AllReduce());
  EXPECT_NE(one, other);
  EXPECT_NE(Extend(one, Record{.op = Op::kBarrier}), Extend(other, Record{.op = Op::kBarrier}));
}

TEST(RecordTest, UnequalPartsAreLegalWhereARankMayBringItsOwn) {
  Record a{.root = 0, .op = Op::kGather, .dtype = kFloat32};
  Record b = a;
  a.Add(10);
  b.Add(20);
  EXPECT_FALSE(Agree(a, b));
  EXPECT_EQ(Extend(0, a), Extend(0, b));  // decided only when the two meet
  b.same_numel = false;                   // the root has asked for unequal ones
  EXPECT_TRUE(Agree(a, b));
  b.root = 1;
  EXPECT_FALSE(Agree(a, b));
}

}  // namespace
}  // namespace ddp::backends::watch
