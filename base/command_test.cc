#include "base/command.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

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

// The program writes more than a pipe holds, on both streams at once.
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
  // The grandchild holds the pipes, too, and the only writing end of this one.
  const std::string fifo = testing::TempDir() + "/held_by_the_grandchild";
  unlink(fifo.c_str());
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  const int reader = open(fifo.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  ASSERT_GE(reader, 0);
  const absl::Status status =
      RunCommand({"sh", "-c", "sleep 1000 > \"$0\" & sleep 1000", fifo}, absl::Seconds(6)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(absl::StrContains(status.message(), "6s")) << status;
  // It has opened the pipe in that time, and does not hold it any more.
  pollfd waiting = {.fd = reader, .events = POLLIN, .revents = 0};
  EXPECT_EQ(poll(&waiting, 1, /*timeout=*/10'000), 1);
  EXPECT_TRUE(waiting.revents & POLLHUP);
  close(reader);
}

}  // namespace
}  // namespace ddp
