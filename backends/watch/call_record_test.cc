#include "backends/watch/call_record.h"

#include "gtest/gtest.h"

namespace ddp::backends::watch {
namespace {

constexpr int8_t kFloat32 = 6;
constexpr int8_t kFloat64 = 7;

CallRecord AllReduce(uint64_t numel = 1000, uint8_t reduce_op = 0, int8_t dtype = kFloat32) {
  CallRecord record{.kind = CollectiveKind::kAllReduce, .reduce_op = reduce_op, .dtype = dtype};
  record.Add(numel);
  return record;
}

CallRecord Broadcast(int32_t root) {
  CallRecord record{.root = root, .kind = CollectiveKind::kBroadcast, .dtype = kFloat32};
  record.Add(1000);
  return record;
}

TEST(CallRecordTest, ToStringShowsTheCall) {
  EXPECT_EQ(ToString(AllReduce()), "allreduce(sum) float32 [1000]");
  EXPECT_EQ(ToString(Broadcast(2)), "broadcast(root 2) float32 [1000]");
  EXPECT_EQ(ToString(CallRecord{.kind = CollectiveKind::kBarrier}), "barrier");

  CallRecord reduce{.root = 1, .kind = CollectiveKind::kReduce, .reduce_op = 4, .dtype = 4};
  reduce.Add(5);
  reduce.Add(7);
  EXPECT_EQ(ToString(reduce), "reduce(max, root 1) int64 [12 in 2 tensors]");

  CallRecord recv{.root = 3, .kind = CollectiveKind::kRecv, .dtype = 15};
  recv.Add(0);
  EXPECT_EQ(ToString(recv), "recv(from rank 3) bfloat16 [0]");
  EXPECT_EQ(ToString(CallRecord{.kind = CollectiveKind::kAllReduce, .reduce_op = 77, .dtype = 99}),
            "allreduce(reduce op 77) dtype 99");
}

// Each difference is detected by Agree and by the rolling signature.
TEST(CallRecordTest, AnyDifferenceIsAMismatch) {
  CallRecord in_two{.kind = CollectiveKind::kAllReduce, .reduce_op = 0, .dtype = kFloat32};
  in_two.Add(500);
  in_two.Add(500);
  CallRecord in_other_order = in_two;
  in_other_order.layout = 0;
  in_other_order.Add(0);
  const CallRecord all[] = {AllReduce(),
                            AllReduce(1001),
                            AllReduce(1000, 4),
                            AllReduce(1000, 0, kFloat64),
                            Broadcast(0),
                            Broadcast(1),
                            in_two,
                            in_other_order,
                            CallRecord{.kind = CollectiveKind::kBarrier}};
  for (const CallRecord& a : all) {
    for (const CallRecord& b : all) {
      EXPECT_EQ(Agree(a, b), &a == &b) << ToString(a) << " / " << ToString(b);
      EXPECT_EQ(Extend(0, a) == Extend(0, b), &a == &b) << ToString(a) << " / " << ToString(b);
    }
  }
}

TEST(CallRecordTest, TheSignatureDependsOnTheOrder) {
  const uint64_t one = Extend(Extend(0, AllReduce()), Broadcast(0));
  const uint64_t other = Extend(Extend(0, Broadcast(0)), AllReduce());
  EXPECT_NE(one, other);
  EXPECT_NE(Extend(one, CallRecord{.kind = CollectiveKind::kBarrier}),
            Extend(other, CallRecord{.kind = CollectiveKind::kBarrier}));
}

TEST(CallRecordTest, PartsOfDifferentSizesAreAllowedWhereEachRankChoosesItsOwn) {
  CallRecord a{.root = 0, .kind = CollectiveKind::kGather, .dtype = kFloat32};
  CallRecord b = a;
  a.Add(10);
  b.Add(20);
  EXPECT_FALSE(Agree(a, b));
  EXPECT_EQ(Extend(0, a), Extend(0, b));  // only Agree compares the sizes
  b.same_numel = false;                   // the root passes parts of different sizes
  EXPECT_TRUE(Agree(a, b));
  b.root = 1;
  EXPECT_FALSE(Agree(a, b));
}

}  // namespace
}  // namespace ddp::backends::watch
