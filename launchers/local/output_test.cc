#include "launchers/local/output.h"

#include <string>

#include "absl/strings/match.h"
#include "base/option_error.h"
#include "gtest/gtest.h"

namespace ddp::launchers {
namespace {

// "f": to the file, "t": to the terminal, "-": to neither; of stdout and stderr.
std::string Ways(const LocalOptions& options, int local_rank) {
  const OutputPlan plan = OutputPlan::From(options, /*ranks=*/3).value();
  std::string text;
  for (const int stream : {OutputPlan::kStdout, OutputPlan::kStderr}) {
    const OutputPlan::Way way = plan.Of(local_rank, stream);
    if (!way.to_file && !way.to_terminal) text += "-";
    if (way.to_file) text += "f";
    if (way.to_terminal) text += "t";
    text += " ";
  }
  return text;
}

TEST(OutputPlanTest, FollowsTorchrunsOptions) {
  EXPECT_EQ(Ways({}, 1), "t t ");
  EXPECT_EQ(Ways({.log_dir = "logs"}, 1), "ft ft ");
  EXPECT_EQ(Ways({.log_dir = "logs", .redirects = "3"}, 1), "f f ");
  EXPECT_EQ(Ways({.log_dir = "logs", .redirects = "1"}, 1), "f t ");
  EXPECT_EQ(Ways({.log_dir = "logs", .redirects = "1:2,2:3"}, 0), "t t ");
  EXPECT_EQ(Ways({.log_dir = "logs", .redirects = "1:2,2:3"}, 1), "t f ");
  EXPECT_EQ(Ways({.log_dir = "logs", .redirects = "1:2,2:3"}, 2), "f f ");
  EXPECT_EQ(Ways({.log_dir = "logs", .redirects = "3", .tee = "2"}, 0), "f ft ");
  EXPECT_EQ(Ways({.log_dir = "logs", .tee = "0"}, 0), "t t ");
}

TEST(OutputPlanTest, TheFilterIsOfTheTerminal) {
  EXPECT_EQ(Ways({.local_ranks_filter = "0,2"}, 0), "t t ");
  EXPECT_EQ(Ways({.local_ranks_filter = "0,2"}, 1), "- - ");
  EXPECT_EQ(Ways({.log_dir = "logs", .local_ranks_filter = "0"}, 1), "f f ");
}

TEST(OutputPlanTest, RefusesWhatItDoesNotUnderstand) {
  for (const LocalOptions& options :
       {LocalOptions{.log_dir = "logs", .redirects = "4"},
        LocalOptions{.log_dir = "logs", .redirects = "1:x"},
        LocalOptions{.log_dir = "logs", .tee = "-1:1"}, LocalOptions{.redirects = "3"},
        LocalOptions{.tee = "3"}, LocalOptions{.local_ranks_filter = "0,,1"},
        LocalOptions{.local_ranks_filter = "0,3"},
        LocalOptions{.log_dir = "logs", .redirects = "3:1"}}) {
    const absl::Status status = OutputPlan::From(options, /*ranks=*/3).status();
    ASSERT_TRUE(ProblemOf(status)) << status;
    EXPECT_TRUE(absl::StartsWith(ProblemOf(status)->path, "local.")) << status;
  }
}

TEST(OutputPlanTest, NamesAFileForEachAttemptRankAndStream) {
  const OutputPlan plan = OutputPlan::From({.log_dir = "logs"}, /*ranks=*/6).value();
  EXPECT_EQ(plan.FileOf(2, 5, OutputPlan::kStderr), "logs/attempt_2/5/stderr.log");
}

}  // namespace
}  // namespace ddp::launchers
