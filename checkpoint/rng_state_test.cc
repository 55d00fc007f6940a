#include "checkpoint/rng_state.h"

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>
#include <gtest/gtest.h>

namespace ddp::checkpoint {
namespace {

TEST(RngStateTest, ContinuesTheSameSequence) {
  at::manual_seed(7);
  at::randn({3});  // an odd number of normals: the generator caches the next
  const at::Tensor state = RngState();
  const at::Tensor expected = at::randn({5});
  EXPECT_EQ(state.scalar_type(), at::kByte);
  EXPECT_EQ(state.numel(), 5056);
  ASSERT_TRUE(LoadRngState(state).ok());
  EXPECT_TRUE(at::equal(at::randn({5}), expected));
}

TEST(RngStateTest, RefusesWhatIsNone) {
  at::manual_seed(7);
  const at::Tensor before = RngState();
  const at::Tensor scrambled = at::full({5056}, 255, at::kByte);
  for (const c10::IValue& state :
       {c10::IValue(), c10::IValue(7), c10::IValue(at::Tensor()), c10::IValue(at::zeros({5056})),
        c10::IValue(before.slice(0, 0, 100)), c10::IValue(scrambled)}) {
    EXPECT_EQ(CheckRngState(state).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(LoadRngState(state).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(at::equal(RngState(), before));
  }
  // A check alone changes nothing.
  at::rand({1});
  const at::Tensor later = RngState();
  EXPECT_TRUE(CheckRngState(before).ok());
  EXPECT_TRUE(at::equal(RngState(), later));
}

}  // namespace
}  // namespace ddp::checkpoint
