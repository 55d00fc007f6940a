#include "backends/watch/peers.h"

#include <unistd.h>

#include <chrono>
#include <memory>
#include <thread>

#include "backends/common/child_process.h"
#include "backends/watch/door.h"
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

  // What it would tell of itself on `host`.
  Report Tell(const std::string& host, const std::string& door = "") const {
    return {
        .host = host,
        .process = backends::ToString(backends::ProcessIdentity{.pid = pid(), .start_ticks = 0}),
        .door = door};
  }
};

TEST(PeersTest, SeesAProcessOfThisHostDie) {
  Child child;
  Peers peers;
  peers.Learn(1, child.Tell(peers.host()));
  EXPECT_TRUE(peers.Dead().empty());
  child.Kill();
  EXPECT_EQ(peers.Dead(), std::set<int>{1});
  child.Reap();
  EXPECT_EQ(peers.Dead(), std::set<int>{1});
}

TEST(PeersTest, WhoWasDeadBeforeIsDead) {
  Child child;
  Peers peers;
  const Report report = child.Tell(peers.host());
  child.Kill();
  child.Reap();
  peers.Learn(3, report);
  EXPECT_EQ(peers.Dead(), std::set<int>{3});
}

TEST(PeersTest, OtherHostsAndThisProcessAreNotWatched) {
  Child child;
  Peers peers;
  const Report report = child.Tell("another host");
  child.Kill();
  child.Reap();
  peers.Learn(0, {.host = peers.host(), .process = peers.process()});
  peers.Learn(1, report);
  peers.Learn(2, {.host = peers.host(), .process = "no process"});
  EXPECT_TRUE(peers.Dead().empty());
  EXPECT_EQ(peers.elsewhere(), std::set<int>{1});
}

// Knocks until rank 1 is dead, or for a second.
bool DiesWhenKnockedAt(Peers& peers) {
  for (int i = 0; i < 100 && peers.Dead().empty(); ++i) {
    peers.Knock({0, 1});
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return peers.Dead() == std::set<int>{1};
}

// Containers of one machine and network, so that loopback leads from one to the other.
constexpr char kHere[] = "boot/net:[1]/pid:[1]", kThere[] = "boot/net:[1]/pid:[2]";

TEST(PeersTest, AProcessElsewhereIsDeadWhenItsDoorShuts) {
  Child child;
  std::unique_ptr<Door> door = std::move(Door::Open("127.0.0.1")).value();
  Peers peers(kHere);
  peers.Learn(1, child.Tell(kThere));
  EXPECT_FALSE(peers.know_all_doors());
  peers.Learn(1, child.Tell(kThere, door->address()));
  EXPECT_TRUE(peers.know_all_doors());
  EXPECT_EQ(peers.Untried(), std::set<int>{1});
  peers.Knock({1});
  EXPECT_TRUE(peers.Untried().empty());
  EXPECT_FALSE(DiesWhenKnockedAt(peers));
  door.reset();
  EXPECT_TRUE(DiesWhenKnockedAt(peers));
  EXPECT_EQ(peers.shut(), std::set<int>{1});
  peers.Vouch(1);
  EXPECT_FALSE(DiesWhenKnockedAt(peers)) << "its door is not believed any more";
}

TEST(PeersTest, WhoLeavesBeforeItTellsOfADoorIsNotWaitedFor) {
  Child child;
  Peers peers(kHere);
  Report report = child.Tell(kThere);
  peers.Learn(1, report);
  EXPECT_FALSE(peers.know_all_doors());
  report.left = true;
  peers.Learn(1, report);
  EXPECT_TRUE(peers.know_all_doors());
}

// Process ids repeat from host to host.
TEST(PeersTest, AProcessElsewhereOfOurNameIsNotOurs) {
  std::unique_ptr<Door> door = std::move(Door::Open("127.0.0.1")).value();
  Peers peers(kHere);
  peers.Learn(1, {.host = kThere, .process = peers.process(), .door = door->address()});
  EXPECT_EQ(peers.elsewhere(), std::set<int>{1});
  peers.Knock({1});
  door.reset();
  EXPECT_TRUE(DiesWhenKnockedAt(peers));
}

TEST(PeersTest, ADoorThatWasNeverOpenSaysNothing) {
  std::unique_ptr<Door> door = std::move(Door::Open("127.0.0.1")).value();
  const std::string address = door->address();
  door.reset();
  Child child;
  Peers peers(kHere);
  peers.Learn(1, child.Tell(kThere, address));
  EXPECT_FALSE(DiesWhenKnockedAt(peers));
  EXPECT_TRUE(peers.Untried().empty()) << "given up";
}

TEST(PeersTest, AnotherNetworksLoopbackIsNotKnockedAt) {
  std::unique_ptr<Door> door = std::move(Door::Open("127.0.0.1")).value();
  Child child;
  Peers peers(kHere);
  peers.Learn(1, child.Tell("boot/net:[2]/pid:[2]", door->address()));
  peers.Learn(2, child.Tell(kThere, kNoDoor));
  EXPECT_TRUE(peers.know_all_doors());
  EXPECT_TRUE(peers.Untried().empty());
}

TEST(PeersTest, MoreThanCanBeKnockedAtAtOnceHaveTheirTurns) {
  constexpr int kRanks = 100;
  Child child;  // before there is a door that it would inherit
  std::unique_ptr<Door> open = std::move(Door::Open("127.0.0.1")).value();
  std::unique_ptr<Door> shut = std::move(Door::Open("127.0.0.1")).value();
  Peers peers(kHere);
  for (int rank = 1; rank <= kRanks; ++rank) {
    peers.Learn(rank, child.Tell(kThere, (rank == kRanks ? shut : open)->address()));
  }
  for (int i = 0; i < 100 && !peers.Untried().empty(); ++i) peers.Knock(peers.elsewhere());
  EXPECT_TRUE(peers.Untried().empty());
  shut.reset();
  for (int i = 0; i < 100 && peers.Dead().empty(); ++i) {
    peers.Knock(peers.elsewhere());
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(peers.Dead(), std::set<int>{kRanks});
}

}  // namespace
}  // namespace ddp::backends::watch
