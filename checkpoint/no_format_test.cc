// A program that links no checkpoint format, and has no checkpoints.
#include <gtest/gtest.h>

#include "base/options.h"
#include "checkpoint/manager.h"

namespace ddp::checkpoint {
namespace {

TEST(NoFormatTest, OnlyAFolderNeedsOne) {
  EXPECT_EQ(ValidateOptions(ManagerOptions()), absl::OkStatus());
  EXPECT_EQ(Validate(ManagerOptions()), absl::OkStatus());
  EXPECT_EQ(Validate({.directory = "runs/a"}).message(),
            "format=pt is no checkpoint format: none is linked into this program");
}

}  // namespace
}  // namespace ddp::checkpoint
