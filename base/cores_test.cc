#include "base/cores.h"

#include <sched.h>

#include <thread>

#include "gtest/gtest.h"

namespace ddp {
namespace {

TEST(CoresTest, CountsWhatAThreadIsBoundTo) {
  const int all = AvailableCores();
  EXPECT_GE(all, 1);
  int bound = 0;
  std::thread([&bound] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(::sched_getcpu(), &one);
    ASSERT_EQ(::sched_setaffinity(0, sizeof(one), &one), 0);
    bound = AvailableCores();
  }).join();
  EXPECT_EQ(bound, 1);
  EXPECT_EQ(AvailableCores(), all) << "only that thread was bound";
}

}  // namespace
}  // namespace ddp
