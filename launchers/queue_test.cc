#include "launchers/queue.h"

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/log/absl_check.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/environment.h"
#include "base/file.h"
#include "gtest/gtest.h"
#include "launchers/launcher.h"

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

TEST(LastErrorInTest, WithoutTheLabelOfSrun) {
  EXPECT_EQ(LastErrorIn("0: epoch 1\n 1: error: no data\n"), "no data");
  EXPECT_EQ(LastErrorIn("12:34: error: none\n"), "");
}

TEST(LastErrorInTest, MayBeEmpty) {
  EXPECT_EQ(LastErrorIn(""), "");
  EXPECT_EQ(LastErrorIn("[rank 1\nall is well"), "");
}

class FilesTest : public testing::Test {
 protected:
  FilesTest() {
    ABSL_CHECK_OK(RemoveTree(folder_));
    ABSL_CHECK_OK(MakeDirectories(folder_));
  }

  void Write(const char* name, absl::string_view text) {
    ABSL_CHECK_OK(WriteFileAtomically(absl::StrCat(folder_, "/", name), text));
  }

  const std::string folder_ = absl::StrCat(
      testing::TempDir(), "/", testing::UnitTest::GetInstance()->current_test_info()->name());
};

TEST_F(FilesTest, IdsOfAllSubmissionsAreKept) {
  EXPECT_EQ(*ReadJobIds(folder_), std::vector<std::string>());
  for (const char* id : {"7", "9_3", "9_3"}) EXPECT_TRUE(AddJobId(folder_, id).ok());
  EXPECT_EQ(*ReadJobIds(folder_), (std::vector<std::string>{"7", "9_3"}));
  EXPECT_TRUE(ForgetJob(folder_).ok());
  EXPECT_EQ(ReadJobIds(folder_)->size(), 2u);
}

TEST_F(FilesTest, SubmissionHasALineUntilItsIdIsKnown) {
  const std::string line = absl::StrCat(kSubmitting, "now");
  EXPECT_TRUE(AddJobId(folder_, line).ok());
  EXPECT_EQ(*ReadJobIds(folder_), std::vector<std::string>{line});
  EXPECT_TRUE(RemoveJobId(folder_, line).ok());
  EXPECT_EQ(*ListDirectory(folder_), std::vector<std::string>());
  for (const std::string& id : {std::string("7"), line, std::string("9")}) {
    EXPECT_TRUE(AddJobId(folder_, id).ok());
  }
  EXPECT_EQ(*ReadJobIds(folder_), (std::vector<std::string>{"7", "9"}));
  // The job has begun, and has written its id, before the submission's answer was written, or
  // without it.
  Write(BatchJob::kId, absl::StrCat("7\n", line, "\n9\n"));
  EXPECT_EQ(*ReadJobIds(folder_), (std::vector<std::string>{"7", "9"}));
  EXPECT_TRUE(AddJobId(folder_, "9").ok());
  EXPECT_EQ(*ReadFile(absl::StrCat(folder_, "/", BatchJob::kId)), "7\n9\n");
}

TEST_F(FilesTest, AttemptsAreLines) {
  EXPECT_EQ(CountAttempts(folder_), 0);
  Write(BatchJob::kAttempts, "1: job 7\n2: job 7\n");
  EXPECT_EQ(CountAttempts(folder_), 2);
}

TEST_F(FilesTest, ForgottenJobHasNoCodeAndAnotherLog) {
  Write(BatchJob::kExitCode, "3\n");
  Write(BatchJob::kLog, "error: old\n");
  EXPECT_EQ(ReadExitCode(folder_), 3);
  EXPECT_TRUE(ForgetJob(folder_).ok());
  EXPECT_EQ(ReadExitCode(folder_), std::nullopt);
  EXPECT_EQ(*ListDirectory(folder_), std::vector<std::string>{kPreviousLog});
}

// A queue that answers in turn what it is told to.
class AnsweringQueue : public Launcher {
 public:
  absl::string_view name() const override { return "answering"; }
  absl::StatusOr<std::optional<Rank>> Detect(const Environment&) const override {
    return std::nullopt;
  }
  std::vector<std::string> Variables() const override { return {}; }
  std::string HowToStart() const override { return ""; }
  absl::StatusOr<std::map<std::string, std::string>> Unfinished(
      const std::vector<std::string>& ids) override {
    ids_.push_back(ids);
    return answers_.at(ids_.size() - 1);
  }

  std::vector<absl::StatusOr<std::map<std::string, std::string>>> answers_;
  std::vector<std::vector<std::string>> ids_;  // of each question
};

TEST(QueueWatchTest, AsksNotTwiceInAnInterval) {
  AnsweringQueue queue;
  queue.answers_ = {QueueWatch::Answer{{"1", "queued"}}, QueueWatch::Answer{}};
  QueueWatch watch(queue, absl::Hours(1));
  const auto first = watch.Query({"1", "2"});
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(**first, (QueueWatch::Answer{{"1", "queued"}}));
  for (int i = 0; i < 100; ++i) EXPECT_EQ(*watch.Query({"1", "2"}), nullptr);
  EXPECT_EQ(queue.ids_, (std::vector<std::vector<std::string>>{{"1", "2"}}));
  EXPECT_GT(watch.next(), absl::Now());
}

TEST(QueueWatchTest, PassesOverFailuresAndSaysSoOnce) {
  const absl::Status outage = absl::UnavailableError("no controller");
  AnsweringQueue queue;
  queue.answers_ = {QueueWatch::Answer{}, outage, outage,
                    QueueWatch::Answer{}, outage, absl::InternalError("odd")};
  QueueWatch watch(queue, absl::ZeroDuration());
  testing::internal::CaptureStderr();
  for (const bool answers : {true, false, false, true, false, false}) {
    const auto answer = watch.Query({"1"});
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_EQ(*answer != nullptr, answers);
  }
  const std::string line = "the states of the jobs are unknown: no controller; still waiting\n";
  EXPECT_EQ(testing::internal::GetCapturedStderr(), line + line);
}

TEST(QueueWatchTest, FirstQuestionThatFailsIsAnError) {
  for (const absl::Status& failure :
       {absl::FailedPreconditionError("no squeue"), absl::UnavailableError("no controller")}) {
    AnsweringQueue queue;
    queue.answers_ = {failure};
    testing::internal::CaptureStderr();
    EXPECT_EQ(QueueWatch(queue).Query({"1"}).status(), failure);
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  }
}

TEST(EndReasonTest, OfAnErrorIsItsLine) {
  EXPECT_EQ(EndReason("error: no data\n", 1), "no data");
  EXPECT_EQ(EndReason("", 1), "");
}

// Launcher local says at the end which rank it was.
TEST(EndReasonTest, OfAnErrorIsNotItsExitCodeAlone) {
  constexpr char kExit[] = "error: rank 0 (pid 7) exited with code 1\n";
  EXPECT_EQ(EndReason(absl::StrCat("[rank 1] error: rank 1: no data\n", kExit), 1),
            "rank 1: no data");
  EXPECT_EQ(EndReason(kExit, 1), "rank 0 (pid 7) exited with code 1");
  constexpr char kRestarted[] = "rank 0 (pid 7) exited with code 1; restarted 3 times";
  EXPECT_EQ(EndReason(absl::StrCat("error: no data\nerror: ", kRestarted, "\n"), 1), kRestarted);
  // What an attempt before has said is not of this one.
  EXPECT_EQ(EndReason(absl::StrCat("error: no data\nW1 local.cc:3] rank 0 (pid 5) exited with code "
                                   "4; restart 1 of 1\n",
                                   kExit),
                      1),
            "rank 0 (pid 7) exited with code 1");
}

TEST(EndReasonTest, OfAKilledJobIsTheSignalAndNoOlderError) {
  EXPECT_EQ(EndReason("error: of an earlier attempt\nstep 5\n", 137),
            "killed by signal 9 (Killed)");
  EXPECT_EQ(
      EndReason("error: of an earlier attempt\nslurmstepd: error: *** JOB 7 CANCELLED\n", 143),
      "slurmstepd: error: *** JOB 7 CANCELLED");
  EXPECT_EQ(EndReason("error: rank 1 (pid 7) was killed by signal 9 (Killed)\n", 137),
            "rank 1 (pid 7) was killed by signal 9 (Killed)");
  EXPECT_EQ(EndReason("error: rank 1 (pid 7) was killed by signal 9 (Killed)\n", 143),
            "killed by signal 15 (Terminated)");
}

}  // namespace
}  // namespace ddp::launchers
