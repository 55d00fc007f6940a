#include "backends/rendezvous.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fstream>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "backends/common/child_process.h"
#include "backends/common/join.h"
#include "base/exit_code.h"
#include "base/loopback_testing.h"
#include "base/threads_testing.h"
#include "base/unique_fd.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"

namespace ddp::backends {
namespace {

using launchers::Rank;

// A listening socket, which the store takes over.
struct Listener {
  Listener() {
    LoopbackListener listener = ListenOnLoopback();
    fd = listener.fd.Release();
    port = listener.port;
  }
  int fd = -1;
  int port = 0;
};

// A port at which nobody listens any more.
int UnusedPort() { return ListenOnLoopback().port; }

std::vector<Rank> World(int size, const Listener& listener) {
  std::vector<Rank> ranks(size);
  for (int i = 0; i < size; ++i) {
    ranks[i].rank = ranks[i].local_rank = i;
    ranks[i].world_size = ranks[i].local_world_size = size;
    ranks[i].master_port = listener.port;
  }
  ranks[0].master_listen_fd = listener.fd;
  return ranks;
}

TEST(JoinTest, RanksMeetOnTheSocketTheyWereHanded) {
  Listener listener;
  std::vector<Rank> ranks = World(3, listener);
  std::vector<absl::StatusOr<c10::intrusive_ptr<c10d::Store>>> stores(
      3, absl::UnknownError("not joined"));
  std::vector<std::vector<std::string>> notes(3);
  RunThreads(3, [&](int i) {
    stores[i] = Join(ranks[i], {.timeout = absl::Seconds(30), .note = absl::StrCat("of rank ", i)},
                     &notes[i]);
  });
  for (const auto& store : stores) ASSERT_TRUE(store.ok()) << store.status();
  for (const auto& all : notes) {
    EXPECT_EQ(all, (std::vector<std::string>{"of rank 0", "of rank 1", "of rank 2"}));
  }
  (*stores[2])->set("k", std::vector<uint8_t>{7});
  EXPECT_EQ((*stores[1])->get("k"), std::vector<uint8_t>{7});
}

// Such as a caller that gathers something with the store that it gets: with a key of Join in place
// of a rank's own, the wait would end early and the value be Join's.
TEST(JoinTest, TheStoreHasNoKeysOfGatherFromAllRanks) {
  Listener listener;
  std::vector<Rank> ranks = World(2, listener);
  RunThreads(2, [&](int i) {
    absl::StatusOr<c10::intrusive_ptr<c10d::Store>> store =
        Join(ranks[i], {.timeout = absl::Seconds(30)});
    ASSERT_TRUE(store.ok()) << store.status();
    if (i == 1) absl::SleepFor(absl::Milliseconds(100));  // rank 0 looks before rank 1 has told
    const std::vector<std::string> expected = {"of rank 0", "of rank 1"};
    const auto gathered = GatherFromAllRanks(**store, i, 2, expected[i], absl::Seconds(30));
    ASSERT_TRUE(gathered.ok()) << gathered.status();
    EXPECT_EQ(*gathered, expected);
  });
}

// Rank 1 is back while rank 0 still has the first group's store, and after it has let go of it.
TEST(JoinTest, ThoseThatJoinAgainMeetInTheSamePlaceWithoutOldKeys) {
  Listener listener;
  std::vector<Rank> ranks = World(2, listener);
  RunThreads(2, [&](int i) {
    absl::StatusOr<c10::intrusive_ptr<c10d::Store>> first, again;
    for (int generation = 0; generation < 3; ++generation) {
      again = Join(ranks[i], {.timeout = absl::Seconds(30)});
      ASSERT_TRUE(again.ok()) << again.status();
      EXPECT_FALSE((*again)->check({absl::StrCat("of rank ", i)}));
      (*again)->set(absl::StrCat("of rank ", i), std::vector<uint8_t>{7});
      (*again)->wait({"of rank 0", "of rank 1"});
      if (generation == 0) first = again;
      if (generation == 1) first = absl::UnknownError("gone");
    }
  });
}

TEST(JoinTest, WhoNeverJoinsIsNamed) {
  Listener listener;
  std::vector<Rank> ranks = World(4, listener);
  absl::Status statuses[2];
  // Rank 0 outlives rank 2, or rank 2 would lose the store that rank 0 serves.
  std::thread rank0([&] { statuses[0] = Join(ranks[0], {.timeout = absl::Seconds(8)}).status(); });
  std::thread rank2([&] { statuses[1] = Join(ranks[2], {.timeout = absl::Seconds(3)}).status(); });
  rank0.join();
  rank2.join();
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_TRUE(absl::StartsWith(status.message(), "Timed out after ")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "never joined: rank 1, 3")) << status;
  }
}

// The store, like torchrun's agent, outlives the ranks and has their keys. They are a process of
// their own: one process counts its groups, and would not use old keys.
TEST(JoinTest, ARestartedRankDoesNotMeetThoseBeforeTheRestart) {
  Listener listener;
  std::vector<Rank> ranks = World(2, listener);
  for (Rank& rank : ranks) {
    rank.master_is_external = true;
    rank.master_listen_fd = std::nullopt;
  }
  ChildProcess before([&]() -> std::string {
    absl::Status statuses[2];
    std::thread rank1(
        [&] { statuses[1] = Join(ranks[1], {.timeout = absl::Seconds(30)}).status(); });
    statuses[0] = Join(ranks[0], {.timeout = absl::Seconds(30)}).status();
    rank1.join();
    return absl::StrCat(statuses[0].ToString(), ", ", statuses[1].ToString());
  });
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(listener.port);
  options.isServer = true;
  options.waitWorkers = false;
  options.masterListenFd = listener.fd;
  const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  ASSERT_EQ(before.Result(), "OK, OK");

  Rank again = ranks[0];
  again.restart_count = 1;
  const absl::Status status = Join(again, {.timeout = absl::Seconds(3)}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "never joined: rank 1")) << status;
}

TEST(JoinTest, WhoWaitsForAnotherWorldIsNamedLongBeforeTheTimeout) {
  for (const int other_size : {2, 4}) {
    Listener listener;
    std::vector<Rank> ranks = World(3, listener);
    ranks[1].world_size = other_size;
    absl::Status statuses[2];
    // Longer than a test may take.
    RunThreads(2,
               [&](int i) { statuses[i] = Join(ranks[i], {.timeout = absl::Hours(1)}).status(); });
    for (const absl::Status& status : statuses) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_EQ(ExitCodeIn(status), kUsageExitCode) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "rank 0 of 3 (pid ")) << status;
      EXPECT_TRUE(
          absl::StrContains(status.message(), absl::StrCat("rank 1 of ", other_size, " (pid ")))
          << status;
    }
  }
}

// It would take part in the others' collectives.
TEST(JoinTest, ASecondProcessOfOneRankIsRefused) {
  Listener listener;
  std::vector<Rank> ranks = World(2, listener);
  const auto join = [&](Messages& channel) {
    channel.Receive();
    return std::string(Join(ranks[1], {.timeout = absl::Minutes(2)}).status().message());
  };
  ChildProcess first(join), second(join);
  first.channel().Send("join");
  const auto store = Join(ranks[0], {.timeout = absl::Minutes(2)});
  ASSERT_TRUE(store.ok()) << store.status();
  EXPECT_EQ(first.Result(), "");
  second.channel().Send("join");
  const std::string message = second.Result();
  EXPECT_TRUE(absl::StrContains(message, "has come second, after rank 1 of 2 (pid ")) << message;
  EXPECT_TRUE(absl::StrContains(message, "needs a RANK, or node_rank, of its own")) << message;
}

TEST(JoinTest, AMissingRankZeroIsNamedWithItsAddress) {
  Rank rank;
  rank.rank = 1;
  rank.world_size = 2;
  rank.master_port = UnusedPort();
  absl::Status status = Join(rank, {.timeout = absl::Seconds(3)}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(absl::StrContains(status.message(), absl::StrCat("127.0.0.1:", rank.master_port)))
      << status;
  EXPECT_TRUE(absl::StartsWith(status.message(), "Timed out after 3s: rank 1 ")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "Connection refused: rank 0 never started"))
      << status;
}

// c10d begins to wait once more when its first wait has ended.
TEST(JoinTest, TheTimeoutIsWaitedForOnce) {
  Rank rank;
  rank.rank = 1;
  rank.world_size = 2;
  rank.master_port = UnusedPort();
  constexpr absl::Duration kTimeout = absl::Seconds(5);
  for (const char* address : {"127.0.0.1", "no-such-host.invalid"}) {
    rank.master_addr = address;
    const absl::Time start = absl::Now();
    EXPECT_FALSE(Join(rank, {.timeout = kTimeout}).ok());
    EXPECT_LT(absl::Now() - start, 1.9 * kTimeout) << address;
  }
}

TEST(JoinTest, ANameThatDoesNotResolveIsNamed) {
  for (const int index : {0, 1}) {
    Listener listener;
    Rank rank = World(2, listener)[index];
    rank.master_addr = "no-such-host.invalid";
    const absl::Status status = Join(rank, {.timeout = absl::Seconds(3)}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_TRUE(absl::StartsWith(
        status.message(), absl::StrCat("Timed out after 3s: rank ", index, " could not reach")))
        << status;
    EXPECT_TRUE(absl::StrContains(
        status.message(), "the name no-such-host.invalid of MASTER_ADDR does not resolve ("))
        << status;
    close(listener.fd);
  }
}

// A name server learns the names of pods when they start. In a child process with an /etc/hosts of
// its own.
TEST(JoinTest, ANameMayResolveLater) {
  const std::string path = absl::StrCat(testing::TempDir(), "/hosts");
  std::ofstream(path) << "127.0.0.1 localhost\n";
  Listener listener;
  ChildProcess child([&]() -> std::string {
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0 ||
        mount(path.c_str(), "/etc/hosts", nullptr, MS_BIND, nullptr) != 0) {
      return "no namespace";
    }
    setenv("RES_OPTIONS", "timeout:1 attempts:1", 1);
    int pipe_ends[2];
    if (pipe(pipe_ends) != 0 || dup2(pipe_ends[1], STDERR_FILENO) < 0) return "no pipe";
    std::vector<Rank> ranks = World(2, listener);
    for (Rank& rank : ranks) {
      rank.master_addr = "rank-zero.test";
      rank.local_rank = 0;
    }
    absl::Status statuses[2];
    std::thread rank1(
        [&] { statuses[1] = Join(ranks[1], {.timeout = absl::Minutes(2)}).status(); });
    std::string said;
    char c;
    while (read(pipe_ends[0], &c, 1) == 1 && c != '\n') said += c;
    std::ofstream(path, std::ios::app) << "127.0.0.1 rank-zero.test\n";
    statuses[0] = Join(ranks[0], {.timeout = absl::Minutes(2)}).status();
    rank1.join();
    return absl::StrCat(said, "|", statuses[0].ToString(), ", ", statuses[1].ToString());
  });
  close(listener.fd);
  const std::string result = child.Result();
  if (result == "no namespace") {
    GTEST_SKIP() << "this system lets no user mount a file in a namespace of his own";
  }
  EXPECT_TRUE(absl::StartsWith(result, "rank 1: MASTER_ADDR=rank-zero.test does not resolve yet ("))
      << result;
  EXPECT_TRUE(absl::EndsWith(result, "|OK, OK")) << result;
}

TEST(JoinTest, AnIpv6AddressHasNoBrackets) {
  const UniqueFd fd(socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in6 address = {};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_loopback;
  socklen_t size = sizeof(address);
  if (bind(fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) {
    GTEST_SKIP() << "this system has no IPv6";
  }
  ASSERT_EQ(getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  ASSERT_EQ(listen(fd.get(), 10), 0);
  Listener listener;
  std::vector<Rank> ranks = World(2, listener);
  close(listener.fd);
  for (Rank& rank : ranks) {
    rank.master_addr = "::1";
    rank.master_port = ntohs(address.sin6_port);
  }
  ranks[0].master_listen_fd = dup(fd.get());
  RunThreads(2, [&](int i) {
    const auto store = Join(ranks[i], {.timeout = absl::Seconds(30)});
    EXPECT_TRUE(store.ok()) << store.status();
  });
}

// Rank 0 listens, but others would not find it.
TEST(JoinTest, AnAddressThatIsNotRankZerosIsSaid) {
  Rank rank;
  rank.world_size = 2;
  rank.master_addr = "192.0.2.1";  // of a network for documentation
  rank.master_port = UnusedPort();
  const absl::Status status = Join(rank, {.timeout = absl::Seconds(3)}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(absl::StrContains(status.message(), "the address is not this machine's")) << status;
}

// The kernel accepts the connection, and nobody answers.
TEST(JoinTest, AProgramThatIsNoStoreIsNotWaitedForWithoutEnd) {
  Listener listener;
  Rank rank;
  rank.rank = 1;
  rank.world_size = 2;
  rank.master_port = listener.port;
  const absl::Status status = Join(rank, {.timeout = absl::Seconds(3)}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(absl::StrContains(status.message(), "may name another program")) << status;
  close(listener.fd);
}

TEST(JoinTest, ATakenPortIsNamed) {
  Listener listener;
  Rank rank;
  rank.world_size = 2;
  rank.master_port = listener.port;
  absl::Status status = Join(rank, {.timeout = absl::Seconds(5)}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(absl::StrContains(status.message(), "the port is taken")) << status;
  close(listener.fd);
}

}  // namespace
}  // namespace ddp::backends
