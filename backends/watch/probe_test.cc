#include "backends/watch/probe.h"

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

constexpr absl::Duration kTimeout = absl::Seconds(10);

ProbeResult ProbeOne(const std::string& address) { return Probe({address}, kTimeout)[0]; }

// Sends what `body` returns, then waits to be killed.
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
  absl::StatusOr<std::unique_ptr<ProbeListener>> listener = ProbeListener::Open(towards);
  return listener.ok() ? listener->release()->address()
                       : absl::StrCat("none: ", listener.status().ToString());
}

TEST(ProbeTest, IsAliveAsLongAsTheProcessExists) {
  Process process([] { return OpenAndLeak("127.0.0.1"); });
  ASSERT_TRUE(absl::StartsWith(process.said, "127.0.0.1:")) << process.said;
  EXPECT_EQ(ProbeOne(process.said), ProbeResult::kAlive);
  process.Stop();
  EXPECT_EQ(ProbeOne(process.said), ProbeResult::kAlive);
  process.Kill();
  EXPECT_EQ(ProbeOne(process.said), ProbeResult::kRefused);
}

TEST(ProbeTest, SupportsIPv6) {
  Process process([] { return OpenAndLeak("::1"); });
  if (absl::StartsWith(process.said, "none")) GTEST_SKIP() << process.said;
  ASSERT_TRUE(absl::StartsWith(process.said, "[::1]:")) << process.said;
  EXPECT_EQ(ProbeOne(process.said), ProbeResult::kAlive);
  process.Kill();
  EXPECT_EQ(ProbeOne(process.said), ProbeResult::kRefused);
}

TEST(ProbeTest, AnswersManyProbes) {
  const std::unique_ptr<ProbeListener> listener =
      std::move(ProbeListener::Open("localhost")).value();
  for (int i = 0; i < 100; ++i) {
    const std::vector<std::string> addresses(100, listener->address());
    for (ProbeResult result : Probe(addresses, kTimeout))
      ASSERT_EQ(result, ProbeResult::kAlive) << i;
    listener->AcceptPending();
  }
}

TEST(ProbeTest, SeveralAddressesAreProbedTogether) {
  Process here([] { return OpenAndLeak("127.0.0.1"); });
  Process gone([] { return OpenAndLeak("127.0.0.1"); });
  gone.Kill();
  EXPECT_EQ(Probe({here.said, "no address", gone.said, "", "127.0.0.1:", here.said}, kTimeout),
            (std::vector<ProbeResult>{ProbeResult::kAlive, ProbeResult::kNoAnswer,
                                      ProbeResult::kRefused, ProbeResult::kNoAnswer,
                                      ProbeResult::kRefused, ProbeResult::kAlive}));
  EXPECT_TRUE(Probe({}, kTimeout).empty());
}

TEST(ProbeTest, NoAnswerIsNotARefusal) {
  // An address reserved for documentation: no host has it.
  EXPECT_EQ(Probe({"192.0.2.1:9"}, absl::Milliseconds(50))[0], ProbeResult::kNoAnswer);
}

TEST(ProbeTest, AnUnknownNameIsUnavailable) {
  EXPECT_EQ(ProbeListener::Open("no such host.invalid").status().code(),
            absl::StatusCode::kUnavailable);
}

// A forked child inherits its parent's descriptors: they would keep a dead parent's listener open.
TEST(ProbeTest, AForkedChildHasItsOwnListener) {
  Process parent([] {
    const std::string mine = ProbeListener::OfThisProcess("127.0.0.1")->address();
    int ends[2];
    if (pipe(ends) != 0) abort();
    if (fork() == 0) {
      const std::string childs = ProbeListener::OfThisProcess("127.0.0.1")->address();
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
  EXPECT_EQ(ProbeOne(mine), ProbeResult::kAlive);
  EXPECT_EQ(ProbeOne(childs), ProbeResult::kAlive);
  parent.Kill();
  EXPECT_EQ(ProbeOne(mine), ProbeResult::kRefused);
  EXPECT_EQ(ProbeOne(childs), ProbeResult::kAlive);
}

TEST(ProbeTest, RecognizesLoopback) {
  EXPECT_TRUE(IsLoopback("127.0.1.1:80"));
  EXPECT_TRUE(IsLoopback("[::1]:80"));
  EXPECT_FALSE(IsLoopback("10.0.0.2:127"));
  EXPECT_FALSE(IsLoopback("[2001:db8::1]:80"));
}

}  // namespace
}  // namespace ddp::backends::watch
