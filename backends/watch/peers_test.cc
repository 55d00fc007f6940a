#include "backends/watch/peers.h"

#include <unistd.h>

#include <chrono>
#include <memory>
#include <thread>

#include "backends/common/child_process.h"
#include "backends/watch/probe.h"
#include "gtest/gtest.h"

namespace ddp::backends::watch {
namespace {

// A child that does nothing until it is killed.
class Child : public backends::ChildProcess {
 public:
  Child()
      : ChildProcess([]() -> std::string {
          while (true) pause();
        }) {}

  // The report of this child, if it were on `host`.
  RankReport MakeReport(const std::string& host, const std::string& probe_address = "") const {
    return {
        .host = host,
        .process = backends::ToString(backends::ProcessIdentity{.pid = pid(), .start_ticks = 0}),
        .probe_address = probe_address};
  }
};

TEST(PeersTest, SeesAProcessOfThisHostDie) {
  Child child;
  Peers peers;
  peers.Learn(1, child.MakeReport(peers.host()));
  EXPECT_TRUE(peers.Dead().empty());
  child.Kill();
  EXPECT_EQ(peers.Dead(), std::set<int>{1});
  child.Reap();
  EXPECT_EQ(peers.Dead(), std::set<int>{1});
}

TEST(PeersTest, AProcessThatHadEndedBeforeIsDead) {
  Child child;
  Peers peers;
  const RankReport report = child.MakeReport(peers.host());
  child.Kill();
  child.Reap();
  peers.Learn(3, report);
  EXPECT_EQ(peers.Dead(), std::set<int>{3});
}

TEST(PeersTest, OtherHostsAndThisProcessAreNotWatched) {
  Child child;
  Peers peers;
  const RankReport report = child.MakeReport("another host");
  child.Kill();
  child.Reap();
  peers.Learn(0, {.host = peers.host(), .process = peers.process()});
  peers.Learn(1, report);
  peers.Learn(2, {.host = peers.host(), .process = "no process"});
  EXPECT_TRUE(peers.Dead().empty());
  EXPECT_EQ(peers.remote(), std::set<int>{1});
}

// Probes until rank 1 is dead, or for a second.
bool IsDeadAfterProbes(Peers& peers) {
  for (int i = 0; i < 100 && peers.Dead().empty(); ++i) {
    peers.Probe({0, 1});
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return peers.Dead() == std::set<int>{1};
}

// Two containers of one machine that share the network: loopback leads from one to the other.
constexpr char kHere[] = "boot/net:[1]/pid:[1]", kThere[] = "boot/net:[1]/pid:[2]";

TEST(PeersTest, ARemoteProcessIsDeadWhenItRefusesProbes) {
  Child child;
  std::unique_ptr<ProbeListener> listener = std::move(ProbeListener::Open("127.0.0.1")).value();
  Peers peers(kHere);
  peers.Learn(1, child.MakeReport(kThere));
  EXPECT_FALSE(peers.know_all_probe_addresses());
  peers.Learn(1, child.MakeReport(kThere, listener->address()));
  EXPECT_TRUE(peers.know_all_probe_addresses());
  EXPECT_EQ(peers.Unverified(), std::set<int>{1});
  peers.Probe({1});
  EXPECT_TRUE(peers.Unverified().empty());
  EXPECT_FALSE(IsDeadAfterProbes(peers));
  listener.reset();
  EXPECT_TRUE(IsDeadAfterProbes(peers));
  EXPECT_EQ(peers.refused(), std::set<int>{1});
  peers.MarkAlive(1);
  EXPECT_FALSE(IsDeadAfterProbes(peers)) << "its refusals do not count any more";
}

TEST(PeersTest, NoProbeAddressIsExpectedOfARankThatHasLeft) {
  Child child;
  Peers peers(kHere);
  RankReport report = child.MakeReport(kThere);
  peers.Learn(1, report);
  EXPECT_FALSE(peers.know_all_probe_addresses());
  report.left = true;
  peers.Learn(1, report);
  EXPECT_TRUE(peers.know_all_probe_addresses());
}

// Process ids are unique on one host only.
TEST(PeersTest, ARemoteProcessWithOurProcessIdIsNotOurs) {
  std::unique_ptr<ProbeListener> listener = std::move(ProbeListener::Open("127.0.0.1")).value();
  Peers peers(kHere);
  peers.Learn(1,
              {.host = kThere, .process = peers.process(), .probe_address = listener->address()});
  EXPECT_EQ(peers.remote(), std::set<int>{1});
  peers.Probe({1});
  listener.reset();
  EXPECT_TRUE(IsDeadAfterProbes(peers));
}

TEST(PeersTest, ARefusalMeansNothingIfItWasNeverAlive) {
  std::unique_ptr<ProbeListener> listener = std::move(ProbeListener::Open("127.0.0.1")).value();
  const std::string address = listener->address();
  listener.reset();
  Child child;
  Peers peers(kHere);
  peers.Learn(1, child.MakeReport(kThere, address));
  EXPECT_FALSE(IsDeadAfterProbes(peers));
  EXPECT_TRUE(peers.Unverified().empty()) << "the attempts are used up";
}

TEST(PeersTest, TheLoopbackOfAnotherNetworkIsNotProbed) {
  std::unique_ptr<ProbeListener> listener = std::move(ProbeListener::Open("127.0.0.1")).value();
  Child child;
  Peers peers(kHere);
  peers.Learn(1, child.MakeReport("boot/net:[2]/pid:[2]", listener->address()));
  peers.Learn(2, child.MakeReport(kThere, kNoProbeAddress));
  EXPECT_TRUE(peers.know_all_probe_addresses());
  EXPECT_TRUE(peers.Unverified().empty());
}

TEST(PeersTest, MoreRanksThanOneCallProbesTakeTurns) {
  constexpr int kRanks = 100;
  Child child;  // forked before there are listeners to inherit
  std::unique_ptr<ProbeListener> open = std::move(ProbeListener::Open("127.0.0.1")).value();
  std::unique_ptr<ProbeListener> closed = std::move(ProbeListener::Open("127.0.0.1")).value();
  Peers peers(kHere);
  for (int rank = 1; rank <= kRanks; ++rank) {
    peers.Learn(rank, child.MakeReport(kThere, (rank == kRanks ? closed : open)->address()));
  }
  for (int i = 0; i < 100 && !peers.Unverified().empty(); ++i) peers.Probe(peers.remote());
  EXPECT_TRUE(peers.Unverified().empty());
  closed.reset();
  for (int i = 0; i < 100 && peers.Dead().empty(); ++i) {
    peers.Probe(peers.remote());
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(peers.Dead(), std::set<int>{kRanks});
}

}  // namespace
}  // namespace ddp::backends::watch
