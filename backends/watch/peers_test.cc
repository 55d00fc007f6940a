#include "backends/watch/peers.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gtest/gtest.h"

namespace ddp::backends::watch {
namespace {

// A child that does nothing until it is killed.
class Child {
 public:
  Child() : pid_(fork()) {
    if (pid_ == 0) {
      while (true) pause();
    }
  }
  ~Child() { Kill(); }

  std::string process() const {
    return shm::ToString(shm::ProcessIdentity{.pid = pid_, .start_ticks = 0});
  }
  // Returns when it is dead, not reaped.
  void KillUnreaped() {
    kill(pid_, SIGKILL);
    siginfo_t info;
    waitid(P_PID, pid_, &info, WEXITED | WNOWAIT);
  }
  void Kill() {
    if (pid_ <= 0) return;
    KillUnreaped();
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }

 private:
  pid_t pid_;
};

TEST(PeersTest, SeesAProcessOfThisHostDie) {
  Child child;
  Peers peers;
  peers.Learn(1, peers.host(), child.process());
  EXPECT_TRUE(peers.Dead().empty());
  child.KillUnreaped();
  EXPECT_EQ(peers.Dead(), std::set<int>{1});
  child.Kill();
  EXPECT_EQ(peers.Dead(), std::set<int>{1});
}

TEST(PeersTest, WhoWasDeadBeforeIsDead) {
  Child child;
  const std::string process = child.process();
  child.Kill();
  Peers peers;
  peers.Learn(3, peers.host(), process);
  EXPECT_EQ(peers.Dead(), std::set<int>{3});
}

TEST(PeersTest, OtherHostsAndThisProcessAreNeverSeenDead) {
  Child child;
  const std::string process = child.process();
  child.Kill();
  Peers peers;
  peers.Learn(0, peers.host(), peers.process());
  peers.Learn(1, "another host", process);
  peers.Learn(2, peers.host(), "no process");
  EXPECT_TRUE(peers.Dead().empty());
}

}  // namespace
}  // namespace ddp::backends::watch
