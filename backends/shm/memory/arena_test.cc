#include "backends/shm/memory/arena.h"

#include <cstring>

#include "gtest/gtest.h"

namespace ddp::backends::shm {
namespace {

constexpr size_t kPage = 4096;

class ArenaTest : public testing::Test {
 protected:
  SharedMemory memory_ = SharedMemory::Create(16 * kPage).value();
  Arena arena_{&memory_, 4 * kPage, 8 * kPage};
};

TEST_F(ArenaTest, GivesWholePagesInItsPartOfTheMemory) {
  std::byte* one = arena_.Allocate(1);
  std::byte* two = arena_.Allocate(kPage + 1);
  EXPECT_EQ(one, memory_.data() + 4 * kPage);
  EXPECT_EQ(two, one + kPage);
  EXPECT_EQ(arena_.Allocate(0), two + 2 * kPage);
  std::memset(one, 1, 3 * kPage);
}

TEST_F(ArenaTest, GivesNothingWhereNothingFits) {
  EXPECT_EQ(arena_.Allocate(8 * kPage + 1), nullptr);
  EXPECT_NE(arena_.Allocate(8 * kPage), nullptr);
  EXPECT_EQ(arena_.Allocate(1), nullptr);
}

TEST_F(ArenaTest, WhatIsFreedInAnyOrderIsOneAgain) {
  std::byte* blocks[4];
  for (std::byte*& block : blocks) block = arena_.Allocate(2 * kPage);
  for (int i : {2, 0, 3, 1}) arena_.Free(blocks[i]);
  EXPECT_EQ(arena_.Allocate(8 * kPage), blocks[0]);
}

TEST_F(ArenaTest, TheFirstGapThatFitsIsTaken) {
  std::byte* first = arena_.Allocate(kPage);
  std::byte* second = arena_.Allocate(3 * kPage);
  arena_.Allocate(kPage);
  arena_.Free(first);
  arena_.Free(second);
  arena_.Allocate(2 * kPage);
  EXPECT_EQ(arena_.Allocate(3 * kPage), second + 4 * kPage);
  EXPECT_EQ(arena_.Allocate(2 * kPage), first + 2 * kPage);
}

TEST_F(ArenaTest, AForeignBlockIsRefused) {
  EXPECT_DEATH(arena_.Free(memory_.data()), "did not give");
}

}  // namespace
}  // namespace ddp::backends::shm
