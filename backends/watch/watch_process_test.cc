// Ranks as processes: what the others report when a rank dies or stalls, and how fast.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "ATen/Parallel.h"
#include "ATen/ops/ones.h"
#include "absl/log/log_entry.h"
#include "absl/log/log_sink.h"
#include "absl/log/log_sink_registry.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "backends/backend.h"
#include "backends/common/host.h"
#include "backends/watch/watch.h"
#include "base/loopback_testing.h"
#include "base/status.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"

namespace ddp::backends::watch {
namespace {

using absl::StrContains;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// Sends lines "TAG text" to the parent, newlines replaced by spaces.
class Pipe {
 public:
  Pipe() {
    if (pipe(ends_) != 0) std::abort();
  }
  void Say(absl::string_view tag, std::string text) {
    for (char& c : text) c = c == '\n' ? ' ' : c;
    const std::string line = absl::StrCat(tag, " ", text, "\n");
    if (write(ends_[1], line.data(), line.size()) < 0) std::abort();
  }
  // The next line; empty once all writers have closed.
  std::string Line() {
    std::string line;
    char c;
    while (read(ends_[0], &c, 1) == 1 && c != '\n') line += c;
    return line;
  }
  // Lines up to one that begins with `tag`; empty if there is none.
  std::string Await(absl::string_view tag) {
    for (std::string line = Line(); !line.empty(); line = Line()) {
      if (absl::StartsWith(line, tag)) return line;
    }
    return "";
  }
  void CloseWriter() { close(ends_[1]); }

 private:
  int ends_[2];
};

class LogTo : public absl::LogSink {
 public:
  explicit LogTo(Pipe& pipe) : pipe_(pipe) {}
  void Send(const absl::LogEntry& entry) override {
    pipe_.Say("log", std::string(entry.text_message()));
  }

 private:
  Pipe& pipe_;
};

// The host of a rank.
using HostOf = std::function<int(int rank)>;
int OneHost(int) { return 0; }
int AHostEach(int rank) { return rank; }

// Must be constructed before this process has other threads: it forks.
class Processes {
 public:
  using Body = std::function<void(int rank, BackendPtr& backend, Pipe& pipe)>;

  Processes(int size, const WatchOptions& options, const Body& body,
            const std::string& name = "gloo", const HostOf& host_of = OneHost)
      : name_(name), host_of_(host_of), pipes_(size) {
    // Bound here, served by rank 0: nobody can take the port in between.
    LoopbackListener listener = ListenOnLoopback();
    for (int rank = 0; rank < size; ++rank) {
      pids_.push_back(fork());
      if (pids_.back() == 0) {
        alarm(100);
        Child(rank, size, listener.fd.get(), listener.port, options, body);
        _exit(0);
      }
      pipes_[rank].CloseWriter();
    }
    listener.fd.Close();
  }
  ~Processes() {
    for (pid_t pid : pids_) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
  }

  Pipe& pipe(int rank) { return pipes_[rank]; }
  pid_t pid(int rank) const { return pids_[rank]; }

 private:
  void Child(int rank, int size, int listener, int port, const WatchOptions& options,
             const Body& body) {
    Pipe& pipe = pipes_[rank];
    LogTo log(pipe);
    absl::AddLogSink(&log);
    at::set_num_threads(1);
    try {
      c10d::TCPStoreOptions store_options;
      store_options.port = port;
      store_options.isServer = rank == 0;
      store_options.waitWorkers = false;
      if (rank == 0) store_options.masterListenFd = listener;
      auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", store_options);
      BackendOptions backend_options;
      backend_options.store = c10::make_intrusive<c10d::PrefixStore>(name_, store);
      backend_options.rank.rank = backend_options.rank.local_rank = rank;
      backend_options.rank.world_size = backend_options.rank.local_world_size = size;
      backend_options.group.timeout = absl::Seconds(90);
      const BackendEntry entry = BackendRegistry::Find(name_).value();
      BackendPtr backend = entry.create(backend_options).value();
      WatchOptions watch_options = options;
      watch_options.capabilities = entry.capabilities;
      watch_options.host = absl::StrCat(HostId(), "/", host_of_(rank));
      backend = Watch(std::move(backend), c10::make_intrusive<c10d::PrefixStore>("watch", store),
                      watch_options);
      body(rank, backend, pipe);
      pipe.Say("end", "well");
    } catch (const std::exception& error) {
      pipe.Say("error",
               absl::StrCat(absl::ToUnixMillis(absl::Now()), " ", ExceptionMessage(error)));
    }
    absl::RemoveLogSink(&log);
  }

  const std::string name_;
  const HostOf host_of_;
  std::vector<Pipe> pipes_;
  std::vector<pid_t> pids_;
};

void AllReduce(const BackendPtr& backend, int64_t numel) {
  std::vector<at::Tensor> tensors = {at::ones({numel})};
  backend->allreduce(tensors)->wait();
}

// Checks the error of rank `survivor` after `victim` was killed at `death`.
void ExpectNamed(Processes& ranks, int survivor, int victim, absl::Time death) {
  const std::string line = ranks.pipe(survivor).Await("error");
  EXPECT_TRUE(StrContains(
      line, absl::StrCat("rank ", victim, " has died (process ", ranks.pid(victim), ")")))
      << "rank " << survivor << ": " << line;
  // All name the victim, not ranks that ended because of it. Without the store they cannot agree.
  for (int rank = 0; rank < 3 && victim != 0; ++rank) {
    EXPECT_EQ(StrContains(line, absl::StrCat("rank ", rank, " has died")), rank == victim) << line;
  }
  int64_t at = 0;
  ASSERT_TRUE(absl::SimpleAtoi(line.substr(6, line.find(' ', 6) - 6), &at)) << line;
  const absl::Duration took = absl::FromUnixMillis(at) - death;
  std::printf("rank %d knew after %s: %s\n", survivor, absl::FormatDuration(took).c_str(),
              line.c_str());
  EXPECT_LT(took, absl::Seconds(30));  // far less than the timeout, 90 s
}

// Long enough for the watchdogs of all ranks to discover each other on a busy machine.
constexpr absl::Duration kDiscovery = absl::Seconds(3);

struct Death {
  int victim;
  HostOf host_of;
};

class DeathTest : public testing::TestWithParam<Death> {};

TEST_P(DeathTest, InAStreamOfCollectivesIsNamedByAllSurvivors) {
  const int victim = GetParam().victim;
  const auto body = [](int, BackendPtr& backend, Pipe& pipe) {
    const absl::Time discovered = absl::Now() + kDiscovery;
    bool said = false;
    while (true) {
      AllReduce(backend, 1000);
      if (!said && absl::Now() > discovered) {
        pipe.Say("running", "");
        said = true;
      }
    }
  };
  Processes ranks(3, {.rank_0_serves_store = true}, body, "gloo", GetParam().host_of);
  for (int rank = 0; rank < 3; ++rank) ASSERT_NE(ranks.pipe(rank).Await("running"), "");
  const absl::Time death = absl::Now();
  kill(ranks.pid(victim), SIGKILL);
  for (int rank = 0; rank < 3; ++rank) {
    if (rank != victim) ExpectNamed(ranks, rank, victim, death);
  }
}

// The victim dies while the others are in `call`.
void ExpectNamedWhileOthersAreIn(const Death& how, const std::function<void(BackendPtr&)>& call) {
  const int victim = how.victim;
  const auto body = [&](int rank, BackendPtr& backend, Pipe& pipe) {
    AllReduce(backend, 10);
    absl::SleepFor(kDiscovery);
    pipe.Say("waiting", "");
    if (rank == victim) pause();
    call(backend);
  };
  Processes ranks(3, {.rank_0_serves_store = true}, body, "gloo", how.host_of);
  for (int rank = 0; rank < 3; ++rank) ASSERT_NE(ranks.pipe(rank).Await("waiting"), "");
  const absl::Time death = absl::Now();
  kill(ranks.pid(victim), SIGKILL);
  for (int rank = 0; rank < 3; ++rank) {
    if (rank != victim) ExpectNamed(ranks, rank, victim, death);
  }
}

TEST_P(DeathTest, WhileOthersWaitForItIsNamedByAllSurvivors) {
  ExpectNamedWhileOthersAreIn(GetParam(), [](BackendPtr& backend) { AllReduce(backend, 1000); });
}

// Gloo does not end such a receive when a rank dies: it belongs to no connection.
TEST_P(DeathTest, WhileOthersReceiveFromAnyRankIsNamedByAllSurvivors) {
  ExpectNamedWhileOthersAreIn(GetParam(), [](BackendPtr& backend) {
    std::vector<at::Tensor> tensors = {at::ones({1000})};
    backend->recvAnysource(tensors, /*tag=*/0)->wait();
  });
}

// The others wait outside of the group's calls, as for a key in a store. Its calls are not
// affected.
TEST_P(DeathTest, WhileOthersAskForDeadRanksIsFoundByAllSurvivors) {
  const int victim = GetParam().victim;
  const auto body = [&](int rank, BackendPtr& backend, Pipe& pipe) {
    AllReduce(backend, 10);
    absl::SleepFor(kDiscovery);
    pipe.Say("waiting", "");
    if (rank == victim) pause();
    std::set<int> dead;
    while (dead.empty()) {
      dead = DeadRanks(backend);
      absl::SleepFor(absl::Milliseconds(20));
    }
    pipe.Say("dead", absl::StrJoin(dead, ", "));
    pause();  // so that the other survivor does not find this one dead, too
  };
  Processes ranks(3, {.rank_0_serves_store = true}, body, "gloo", GetParam().host_of);
  for (int rank = 0; rank < 3; ++rank) ASSERT_NE(ranks.pipe(rank).Await("waiting"), "");
  absl::SleepFor(absl::Seconds(1));  // nobody is found dead who is not
  kill(ranks.pid(victim), SIGKILL);
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == victim) continue;
    EXPECT_EQ(ranks.pipe(rank).Line(), absl::StrCat("dead ", victim));
  }
}

// Rank 0 serves the store.
INSTANTIATE_TEST_SUITE_P(OnOneHost, DeathTest,
                         testing::Values(Death{0, OneHost}, Death{2, OneHost}));
INSTANTIATE_TEST_SUITE_P(AcrossHosts, DeathTest,
                         testing::Values(Death{0, AHostEach}, Death{2, AHostEach},
                                         Death{2, [](int rank) { return rank / 2; }}));

class StallTest : public testing::TestWithParam<std::string> {};

TEST_P(StallTest, AStoppedRankIsReportedAndWaitedFor) {
  const auto body = [](int, BackendPtr& backend, Pipe& pipe) {
    AllReduce(backend, 10);
    pipe.Say("running", "");
    while (true) AllReduce(backend, 1000);
  };
  Processes ranks(2, {.stall = absl::Seconds(1)}, body, GetParam());
  for (int rank = 0; rank < 2; ++rank) ASSERT_NE(ranks.pipe(rank).Await("running"), "");
  kill(ranks.pid(1), SIGSTOP);
  const std::string line = ranks.pipe(0).Await("log");
  EXPECT_TRUE(StrContains(line, "has waited ")) << line;
  EXPECT_TRUE(StrContains(line, "does not answer") || StrContains(line, "called it")) << line;
  kill(ranks.pid(1), SIGCONT);
  kill(ranks.pid(1), SIGKILL);
  const std::string error = ranks.pipe(0).Await("error");
  EXPECT_TRUE(StrContains(error, "rank 1") && StrContains(error, "has died")) << error;
}

// With hier, each of the two ranks is on a host of its own.
INSTANTIATE_TEST_SUITE_P(Over, StallTest, testing::Values("gloo", "shm", "hier_in_turns"),
                         [](const auto& info) { return info.param; });

// Not with gloo: it ends the process if it receives more than it expects.
TEST(WatchProcessTest, AMismatchOverShmIsAnErrorOnBothSides) {
  const auto body = [](int rank, BackendPtr& backend, Pipe&) {
    AllReduce(backend, 10);
    if (rank == 0) AllReduce(backend, 10);
    std::vector<at::Tensor> tensors = {at::ones({10})};
    c10d::BroadcastOptions options;
    options.rootRank = 0;
    backend->broadcast(tensors, options)->wait();
  };
  Processes ranks(2, {}, body, "shm");
  for (int rank = 0; rank < 2; ++rank) {
    const std::string error = ranks.pipe(rank).Await("error");
    EXPECT_TRUE(StrContains(error, "allreduce") && StrContains(error, "broadcast")) << error;
  }
}

TEST(WatchProcessTest, AnOrderlyEndIsSilent) {
  Processes ranks(3, {.rank_0_serves_store = true}, [](int, BackendPtr& backend, Pipe&) {
    for (int i = 0; i < 50; ++i) AllReduce(backend, 1000);
    backend.reset();
  });
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(ranks.pipe(rank).Line(), "end well");
}

}  // namespace
}  // namespace ddp::backends::watch
