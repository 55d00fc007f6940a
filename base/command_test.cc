#include "base/command.h"

#include <string>

#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace ddp {
namespace {

TEST(CommandTest, ReturnsCodeAndBothStreams) {
  const auto result = RunCommand({"sh", "-c", "echo out; echo err >&2; exit 3"});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->exit_code, 3);
  EXPECT_EQ(result->out, "out\n");
  EXPECT_EQ(result->err, "err\n");
}

// More than a pipe holds, on both streams at once.
TEST(CommandTest, ReadsLongOutput) {
  const auto result =
      RunCommand({"sh", "-c",
                  "for s in 1 2; do head -c 300000 /dev/zero; head -c 300000 /dev/zero >&2; done"});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->out.size(), 600000u);
  EXPECT_EQ(result->err.size(), 600000u);
}

TEST(CommandTest, StandardInputIsEmpty) { EXPECT_EQ(RunCommand({"cat"})->out, ""); }

TEST(CommandTest, TakesAnEnvironment) {
  const auto result = RunCommand({"/bin/sh", "-c", "echo $A$B"}, {{"A", "x"}});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->out, "x\n");
}

TEST(CommandTest, SignalIsACode) {
  EXPECT_EQ(RunCommand({"sh", "-c", "kill -9 $$"})->exit_code, 137);
}

TEST(CommandTest, NamesAProgramThatDoesNotExist) {
  const absl::Status status = RunCommand({"no-such-program"}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(absl::StrContains(status.message(), "'no-such-program'")) << status;
}

TEST(CommandTest, KillsWhatDoesNotEnd) {
  // The grandchild holds the pipes, too.
  const absl::Status status =
      RunCommand({"sh", "-c", "sleep 1000 & sleep 1000"}, absl::Milliseconds(100)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(absl::StrContains(status.message(), "100ms")) << status;
}

}  // namespace
}  // namespace ddp
