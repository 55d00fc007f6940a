#include "base/writer_lock.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/log/absl_check.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "gtest/gtest.h"

namespace ddp {
namespace {

class WriterLockTest : public testing::Test {
 protected:
  WriterLockTest() {
    ABSL_CHECK_OK(RemoveTree(folder_));
    ABSL_CHECK_OK(MakeDirectories(folder_));
  }

  // Another process that holds the folder until it is killed.
  pid_t Hold(const std::string& job) {
    int ready[2];
    ABSL_CHECK_EQ(pipe(ready), 0);
    const pid_t pid = fork();
    if (pid == 0) {
      const auto lock = WriterLock::Take(folder_, {.job = job});
      if (!lock.ok() || write(ready[1], "x", 1) != 1) _exit(1);
      while (true) pause();
    }
    char byte;
    ABSL_CHECK_EQ(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    close(ready[1]);
    return pid;
  }

  static void Kill(pid_t pid) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }

  const std::string folder_ = absl::StrCat(
      testing::TempDir(), "/", testing::UnitTest::GetInstance()->current_test_info()->name());
};

TEST_F(WriterLockTest, AnotherRunIsRefusedAndBothAreNamed) {
  const pid_t holder = Hold("a");
  const absl::Status refused =
      WriterLock::Take(folder_, {.job = "b", .grace = absl::InfiniteDuration()}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  for (const std::string& part :
       {absl::StrCat("is written by another run, pid ", holder, " on host "),
        absl::StrCat("; this one is pid ", getpid(), " on host "), std::string(", job a;"),
        std::string(", job b;")}) {
    EXPECT_TRUE(absl::StrContains(refused.message(), part)) << refused;
  }
  Kill(holder);
  EXPECT_TRUE(WriterLock::Take(folder_, {.job = "b"}).ok());
}

TEST_F(WriterLockTest, RunsWithoutAJobAreDifferent) {
  const pid_t holder = Hold("none");
  const WriterLockOptions options = {.grace = absl::InfiniteDuration(),
                                     .patience = absl::ZeroDuration()};
  EXPECT_FALSE(WriterLock::Take(folder_, options).ok());
  Kill(holder);
}

TEST_F(WriterLockTest, LaterLifeWaitsForTheFormer) {
  for (const std::string job : {"a", "none"}) {
    const pid_t holder = Hold(job);
    std::vector<std::string> told;
    const auto waits = [&](absl::string_view whom) {
      told.emplace_back(whom);
      Kill(holder);
    };
    const absl::Status status = WriterLock::Take(folder_, {.job = job,
                                                           .life = 1,
                                                           .grace = absl::InfiniteDuration(),
                                                           .patience = absl::ZeroDuration(),
                                                           .waits = waits})
                                    .status();
    EXPECT_TRUE(status.ok()) << status;
    ASSERT_EQ(told.size(), 1);
    EXPECT_TRUE(absl::StartsWith(told[0], absl::StrCat("pid ", holder, " on host "))) << told[0];
  }
}

TEST_F(WriterLockTest, RunsOfASharedJobAreDifferentUnlessItHasBegunAgain) {
  const pid_t holder = Hold("a");
  WriterLockOptions options = {.job = "a",
                               .job_is_shared = true,
                               .grace = absl::InfiniteDuration(),
                               .patience = absl::ZeroDuration()};
  const absl::Status refused = WriterLock::Take(folder_, options).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(absl::StrContains(refused.message(), absl::StrCat("pid ", holder, " on host ")))
      << refused;
  options.life = 1;
  options.waits = [&](absl::string_view) { Kill(holder); };
  const absl::Status later = WriterLock::Take(folder_, options).status();
  EXPECT_TRUE(later.ok()) << later;
}

TEST_F(WriterLockTest, LaterLifeWaitsNotForever) {
  const pid_t holder = Hold("a");
  WriterLockOptions options = {.job = "a", .life = 1, .grace = absl::Milliseconds(100)};
  const absl::Status refused = WriterLock::Take(folder_, options).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(absl::StartsWith(
      refused.message(),
      absl::StrCat("is still written by a former life of this job, pid ", holder, " on host ")))
      << refused;
  // One that was not begun again may be another run to which the same name was given.
  options.life = 0;
  EXPECT_EQ(WriterLock::Take(folder_, options).status().code(),
            absl::StatusCode::kFailedPrecondition);
  Kill(holder);
}

TEST_F(WriterLockTest, IsReleasedByTheDestructor) {
  std::optional<WriterLock> lock = WriterLock::Take(folder_, {.job = "a"}).value();
  const WriterLockOptions hasty = {.job = "b", .patience = absl::ZeroDuration()};
  EXPECT_FALSE(WriterLock::Take(folder_, hasty).ok());
  lock.reset();
  EXPECT_EQ(*ListDirectory(folder_), std::vector<std::string>());
  EXPECT_TRUE(WriterLock::Take(folder_, hasty).ok());
}

TEST_F(WriterLockTest, TheLastJobThatClaimsAFolderOwnsIt) {
  EXPECT_EQ(OwnerOf(folder_), "");
  for (const std::string job : {"a", "b", "b"}) {
    const WriterLock lock = WriterLock::Take(folder_, {.job = job}).value();
    ABSL_CHECK_OK(lock.Claim());
    EXPECT_EQ(OwnerOf(folder_), job);
  }
  // Also once no lock is held.
  EXPECT_EQ(*ListDirectory(folder_), std::vector<std::string>{".job"});
  EXPECT_EQ(OwnerOf(folder_), "b");
  EXPECT_EQ(OwnerOf(folder_ + "/missing"), "");
}

TEST_F(WriterLockTest, FolderMustExist) {
  EXPECT_EQ(WriterLock::Take(folder_ + "/missing", {}).status().code(),
            absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace ddp
