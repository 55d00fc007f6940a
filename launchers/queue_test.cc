#include "launchers/queue.h"

#include "gtest/gtest.h"

namespace ddp::launchers {
namespace {

TEST(LastErrorInTest, IsTheLastOfAProgramOfOurs) {
  EXPECT_EQ(LastErrorIn("error: first\nerror: second\nno error: at the beginning\n"), "second");
  EXPECT_EQ(LastErrorIn("[rank 1] error: --lr=-1 must be at least 0"),
            "--lr=-1 must be at least 0");
  EXPECT_EQ(LastErrorIn("step 1\rerror: after a progress line\nsrun: error: task 1: exited"),
            "after a progress line");
}

TEST(LastErrorInTest, IsElseTheLastOfSlurm) {
  EXPECT_EQ(LastErrorIn("slurmstepd: error: *** JOB 7 CANCELLED ***\n"),
            "slurmstepd: error: *** JOB 7 CANCELLED ***");
  EXPECT_EQ(LastErrorIn("slurmstepd: error: a\nsrun: error: b\n"), "srun: error: b");
}

TEST(LastErrorInTest, MayBeEmpty) {
  EXPECT_EQ(LastErrorIn(""), "");
  EXPECT_EQ(LastErrorIn("[rank 1\nall is well"), "");
}

}  // namespace
}  // namespace ddp::launchers
