#include "base/progress_board.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace ddp {
namespace {

Environment With(int fd) {
  return Environment(
      std::map<std::string, std::string>{{ProgressBoard::kVariable, absl::StrCat(fd)}});
}

TEST(ProgressBoardTest, KeepsWhatAKilledProcessHasWritten) {
  ProgressBoard board = ProgressBoard::Create().value();
  EXPECT_FALSE(board.Read());
  const pid_t pid = fork();
  if (pid == 0) {
    std::optional<ProgressBoard> ours = ProgressBoard::FromEnvironment(With(board.fd()));
    ours->Begin(400, "runs/a/epoch_3.pt");
    ours->Reached(402);
    raise(SIGKILL);
  }
  ASSERT_EQ(waitpid(pid, nullptr, 0), pid);
  const std::optional<Progress> progress = board.Read();
  ASSERT_TRUE(progress);
  EXPECT_EQ(progress->begun_at, 400);
  EXPECT_EQ(progress->step, 402);
  EXPECT_EQ(progress->earlier_checkpoint, "runs/a/epoch_3.pt");
  board.Clear();
  EXPECT_FALSE(board.Read());
}

TEST(ProgressBoardTest, IsNotFoundInAnotherDescriptor) {
  EXPECT_FALSE(ProgressBoard::FromEnvironment(Environment(std::map<std::string, std::string>())));
  EXPECT_FALSE(ProgressBoard::FromEnvironment(With(1 << 19)));
  const UniqueFd null(open("/dev/null", O_RDWR));
  EXPECT_FALSE(ProgressBoard::FromEnvironment(With(null.get())));
}

TEST(ProgressBoardTest, HasNoPathRatherThanHalfOfOne) {
  ProgressBoard board = ProgressBoard::Create().value();
  board.Begin(1, std::string(5000, 'x'));
  EXPECT_EQ(board.Read()->earlier_checkpoint, "");
}

}  // namespace
}  // namespace ddp
