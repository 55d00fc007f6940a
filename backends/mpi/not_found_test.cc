#include "gtest/gtest.h"

TEST(MpiTest, EverythingThatNeedsAnMpi) {
  GTEST_SKIP() << "no MPI was found on this machine; install Debian's openmpi-bin and "
                  "libopenmpi-dev, and have Bazel look again (`bazel sync --configure`)";
}
