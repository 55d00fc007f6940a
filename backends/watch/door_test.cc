#include "backends/watch/door.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "backends/common/child_process.h"
#include "gtest/gtest.h"

namespace ddp::backends::watch {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(10);

Answer KnockAt(const std::string& address) { return Knock({address}, kPatience)[0]; }

// Says what `body` returns, then waits to be killed.
class Process : public backends::ChildProcess {
 public:
  explicit Process(const std::function<std::string()>& body)
      : ChildProcess([&body](backends::Messages& channel) -> std::string {
          channel.Send(body());
          while (true) pause();
        }),
        said(channel().Receive()) {}
  void Stop() {
    kill(pid(), SIGSTOP);
    waitpid(pid(), nullptr, WUNTRACED);
  }

  const std::string said;
};

std::string OpenAndLeak(const std::string& towards) {
  absl::StatusOr<std::unique_ptr<Door>> door = Door::Open(towards);
  return door.ok() ? door->release()->address() : absl::StrCat("none: ", door.status().ToString());
}

TEST(DoorTest, IsOpenAsLongAsTheProcessExists) {
  Process process([] { return OpenAndLeak("127.0.0.1"); });
  ASSERT_TRUE(absl::StartsWith(process.said, "127.0.0.1:")) << process.said;
  EXPECT_EQ(KnockAt(process.said), Answer::kOpen);
  process.Stop();
  EXPECT_EQ(KnockAt(process.said), Answer::kOpen);
  process.Kill();
  EXPECT_EQ(KnockAt(process.said), Answer::kRefused);
}

TEST(DoorTest, SpeaksIPv6) {
  Process process([] { return OpenAndLeak("::1"); });
  if (absl::StartsWith(process.said, "none")) GTEST_SKIP() << process.said;
  ASSERT_TRUE(absl::StartsWith(process.said, "[::1]:")) << process.said;
  EXPECT_EQ(KnockAt(process.said), Answer::kOpen);
  process.Kill();
  EXPECT_EQ(KnockAt(process.said), Answer::kRefused);
}

TEST(DoorTest, LetsManyKnock) {
  const std::unique_ptr<Door> door = std::move(Door::Open("localhost")).value();
  for (int i = 0; i < 100; ++i) {
    const std::vector<std::string> addresses(100, door->address());
    for (Answer answer : Knock(addresses, kPatience)) ASSERT_EQ(answer, Answer::kOpen) << i;
    door->Answer();
  }
}

TEST(DoorTest, SeveralAreKnockedAtTogether) {
  Process here([] { return OpenAndLeak("127.0.0.1"); });
  Process gone([] { return OpenAndLeak("127.0.0.1"); });
  gone.Kill();
  EXPECT_EQ(Knock({here.said, "no address", gone.said, "", "127.0.0.1:", here.said}, kPatience),
            (std::vector<Answer>{Answer::kOpen, Answer::kNone, Answer::kRefused, Answer::kNone,
                                 Answer::kRefused, Answer::kOpen}));
  EXPECT_TRUE(Knock({}, kPatience).empty());
}

TEST(DoorTest, WhereNobodyAnswersNobodyIsSaidToBeDead) {
  // An address for documentation; no host has it.
  EXPECT_EQ(Knock({"192.0.2.1:9"}, absl::Milliseconds(50))[0], Answer::kNone);
}

TEST(DoorTest, NoNameNoDoor) {
  EXPECT_EQ(Door::Open("no such host.invalid").status().code(), absl::StatusCode::kUnavailable);
}

// A forked child has its parent's descriptors: with them the dead parent's door would stay open.
TEST(DoorTest, AChildsDoorIsItsOwn) {
  Process parent([] {
    const std::string mine = Door::OfThisProcess("127.0.0.1")->address();
    int ends[2];
    if (pipe(ends) != 0) abort();
    if (fork() == 0) {
      const std::string childs = Door::OfThisProcess("127.0.0.1")->address();
      const std::string text = childs == mine ? "the same" : childs;
      if (write(ends[1], text.data(), text.size()) < 0) abort();
      alarm(60);
      while (true) pause();
    }
    char buffer[64] = {};
    if (read(ends[0], buffer, sizeof(buffer) - 1) <= 0) abort();
    return absl::StrCat(mine, " ", buffer);
  });
  const size_t space = parent.said.find(' ');
  ASSERT_NE(space, std::string::npos) << parent.said;
  const std::string mine = parent.said.substr(0, space), childs = parent.said.substr(space + 1);
  EXPECT_EQ(KnockAt(mine), Answer::kOpen);
  EXPECT_EQ(KnockAt(childs), Answer::kOpen);
  parent.Kill();
  EXPECT_EQ(KnockAt(mine), Answer::kRefused);
  EXPECT_EQ(KnockAt(childs), Answer::kOpen);
}

TEST(DoorTest, KnowsLoopback) {
  EXPECT_TRUE(IsLoopback("127.0.1.1:80"));
  EXPECT_TRUE(IsLoopback("[::1]:80"));
  EXPECT_FALSE(IsLoopback("10.0.0.2:127"));
  EXPECT_FALSE(IsLoopback("[2001:db8::1]:80"));
}

}  // namespace
}  // namespace ddp::backends::watch
