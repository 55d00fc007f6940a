#include "launchers/slurm/follow.h"

#include <signal.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/signal_pipe.h"
#include "gtest/gtest.h"
#include "launchers/slurm/fake_commands.h"

namespace ddp::launchers::slurm {
namespace {

class FollowTest : public testing::Test {
 protected:
  // Follows job 7 in the folder of the commands: each look at the queue is one step of the job.
  absl::StatusOr<LaunchResult> Follow7(bool cancel = false,
                                       absl::Duration patience = absl::Milliseconds(300)) {
    absl::StatusOr<SignalPipe> signals = SignalPipe::Install();
    if (!signals.ok()) return signals.status();
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    absl::StatusOr<LaunchResult> result = Follow({.id = "7",
                                                  .folder = commands_.folder(),
                                                  .cancel_on_interrupt = cancel,
                                                  .log_interval = absl::Milliseconds(1),
                                                  .first_queue_interval = absl::Milliseconds(5),
                                                  .last_queue_interval = absl::Milliseconds(20),
                                                  .patience = patience},
                                                 *signals);
    out_ = testing::internal::GetCapturedStdout();
    err_ = testing::internal::GetCapturedStderr();
    return result;
  }

  std::string Log() const { return absl::StrCat(commands_.folder(), "/job.log"); }

  FakeCommands commands_{"follow"};
  std::string out_, err_;
};

// The beginning of a squeue that counts its calls in $n.
constexpr char kCount[] = "n=$(($(cat $HERE/n 2>/dev/null) + 1)); echo $n >$HERE/n\n";

TEST_F(FollowTest, CopiesTheLogAndReturnsTheCode) {
  commands_.Write("squeue", absl::StrCat(kCount, R"(
case $n in
  1|2) echo 7 PD ;;
  3) echo 7 R; printf 'first li' >$HERE/job.log ;;
  4) echo 7 R; printf 'ne\nsecond' >>$HERE/job.log ;;
  *) echo 7 CG; echo 3 >$HERE/exit_code ;;
esac)"));
  const absl::StatusOr<LaunchResult> result = Follow7();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->exit_code, 3);
  EXPECT_EQ(result->description, absl::StrCat("job 7 ended with exit code 3; log: ", Log()));
  EXPECT_EQ(out_, "first line\nsecond");
  EXPECT_EQ(err_, "job 7: queued\njob 7: running\njob 7: ended with exit code 3\n");
}

TEST_F(FollowTest, SuccessNeedsNoDescription) {
  commands_.Write("squeue", "echo 7 R; echo done >$HERE/job.log; echo 0 >$HERE/exit_code");
  EXPECT_EQ(Follow7()->description, "");
  EXPECT_EQ(out_, "done\n");
}

TEST_F(FollowTest, JobThatVanishesIsAnErrorThatNamesTheLog) {
  commands_.Write("squeue", absl::StrCat(kCount, "((n > 1)) || echo 7 PD"));
  const absl::Status status = Follow7().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(absl::StrContains(status.message(), "job 7 is no longer in the queue")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), Log())) << status;
}

// The file system may show the exit code late.
TEST_F(FollowTest, ExitCodeMayComeAfterTheQueueHasForgotten) {
  commands_.Write("squeue", absl::StrCat(kCount, "((n < 4)) || echo 4 >$HERE/exit_code"));
  EXPECT_EQ(Follow7(/*cancel=*/false, /*patience=*/absl::Minutes(1))->exit_code, 4);
}

// A preempted job whose script could not ask the queue has left the code of the signal.
TEST_F(FollowTest, JobThatIsQueuedAgainHasNotEnded) {
  commands_.Write("squeue", absl::StrCat(kCount, R"(
case $n in
  1) echo 7 R; echo first >$HERE/job.log; echo 143 >$HERE/exit_code ;;
  2|3|4) echo 7 PD ;;
  *) echo 7 R; rm -f $HERE/exit_code; echo second >>$HERE/job.log; echo 0 >$HERE/exit_code ;;
esac)"));
  EXPECT_EQ(Follow7()->exit_code, 0);
  EXPECT_EQ(out_, "first\nsecond\n");
  EXPECT_TRUE(absl::StrContains(err_, "job 7: running\njob 7: queued\njob 7: running\n")) << err_;
}

TEST_F(FollowTest, CancelledJobHasEnded) {
  commands_.Write("squeue", absl::StrCat(kCount, R"(
((n == 1)) && echo 7 R
echo 143 >$HERE/exit_code)"));
  EXPECT_EQ(Follow7()->exit_code, 143);
}

TEST_F(FollowTest, QueueThatFailsForAWhileIsNoEnd) {
  commands_.Write("squeue", absl::StrCat(kCount, R"(
if ((n < 5)); then echo 'squeue: error: no controller' >&2; exit 1; fi
echo 0 >$HERE/exit_code)"));
  EXPECT_EQ(Follow7()->exit_code, 0);
  EXPECT_TRUE(absl::StrContains(err_, "job 7: its state is unknown: ")) << err_;
  EXPECT_EQ(err_.find("unknown"), err_.rfind("unknown")) << err_;
}

TEST_F(FollowTest, InterruptLeavesTheJob) {
  commands_.Write("squeue", "echo 7 R; kill -INT $PPID");
  const absl::StatusOr<LaunchResult> result = Follow7();
  EXPECT_EQ(result->exit_code, 130);
  EXPECT_EQ(result->description, absl::StrCat("interrupted: job 7 goes on; watch it with 'tail -f ",
                                              Log(), "', cancel it with 'scancel 7'"));
}

TEST_F(FollowTest, InterruptCancelsTheJobIfAskedTo) {
  commands_.Write("squeue", "echo 7 R; kill -TERM $PPID");
  commands_.Write("scancel", "echo \"$@\" >$HERE/cancelled");
  const absl::StatusOr<LaunchResult> result = Follow7(/*cancel=*/true);
  EXPECT_EQ(result->exit_code, 143);
  EXPECT_EQ(commands_.Contents("cancelled"), "7\n");
  EXPECT_TRUE(absl::StrContains(result->description, "job 7 is cancelled")) << result->description;
  commands_.Write("scancel", "echo 'scancel: error: no controller' >&2; exit 1");
  const absl::StatusOr<LaunchResult> failed = Follow7(/*cancel=*/true);
  ASSERT_TRUE(failed.ok()) << failed.status();
  EXPECT_EQ(failed->exit_code, 143);
  EXPECT_TRUE(absl::StrContains(failed->description,
                                "job 7 could not be cancelled: scancel: no controller; log: "))
      << failed->description;
}

}  // namespace
}  // namespace ddp::launchers::slurm
