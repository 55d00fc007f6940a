#include "backends/common/peer.h"

#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "backends/common/child_process.h"
#include "backends/common/deny_syscall.h"
#include "gtest/gtest.h"

namespace ddp::backends {
namespace {

// A child that tells who it is, then waits to be killed.
std::string TellAndWait(Messages& channel) {
  channel.Send(ToString(Peer::Self()));
  channel.Receive();
  return "";
}

ProcessIdentity IdentityOf(ChildProcess& child) {
  absl::StatusOr<ProcessIdentity> process = ParseProcessIdentity(child.channel().Receive());
  EXPECT_TRUE(process.ok()) << process.status();
  EXPECT_EQ(process->pid, child.pid());
  return *process;
}

TEST(ProcessIdentityTest, ThroughText) {
  const ProcessIdentity self = Peer::Self();
  EXPECT_EQ(self.pid, ::getpid());
  EXPECT_GT(self.start_ticks, 0u);
  EXPECT_EQ(*ParseProcessIdentity(ToString(self)), self);
  EXPECT_EQ(ToString({12, 345}), "12@345");
}

TEST(ProcessIdentityTest, RefusesOtherText) {
  for (const char* text :
       {"", "12", "12@", "@345", "0@345", "-1@345", "12@-1", "12@345@6", "x@y"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseProcessIdentity(text).status())) << text;
  }
  EXPECT_TRUE(absl::IsInvalidArgument(Peer::Open({}).status()));
}

TEST(PeerTest, ItselfSeenFromAnotherThread) {
  const ProcessIdentity self = Peer::Self();
  std::thread([&] {
    absl::StatusOr<Peer> peer = Peer::Open(self);
    ASSERT_TRUE(peer.ok()) << peer.status();
    EXPECT_TRUE(peer->Alive());
  }).join();
}

TEST(PeerTest, DeadFromTheMomentItIsKilled) {
  ChildProcess child(&TellAndWait);
  absl::StatusOr<Peer> peer = Peer::Open(IdentityOf(child));
  ASSERT_TRUE(peer.ok()) << peer.status();
  EXPECT_TRUE(peer->Alive());
  const Peer moved = *std::move(peer);
  EXPECT_TRUE(moved.Alive());
  child.Kill();
  EXPECT_FALSE(moved.Alive());  // a zombie
  child.Reap();
  EXPECT_FALSE(moved.Alive());
}

TEST(PeerTest, NeitherZombieNorVanishedCanBeOpened) {
  ChildProcess child(&TellAndWait);
  const ProcessIdentity process = IdentityOf(child);
  child.Kill();
  absl::Status zombie = Peer::Open(process).status();
  EXPECT_TRUE(absl::IsUnavailable(zombie)) << zombie;
  EXPECT_TRUE(absl::StrContains(zombie.message(), absl::StrCat(process.pid))) << zombie;
  child.Reap();
  absl::Status vanished = Peer::Open(process).status();
  EXPECT_TRUE(absl::IsUnavailable(vanished)) << vanished;
}

TEST(PeerTest, ALaterProcessOfTheSameIdIsAnother) {
  ChildProcess child(&TellAndWait);
  ProcessIdentity process = IdentityOf(child);
  --process.start_ticks;
  const absl::Status status = Peer::Open(process).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "another")) << status;
}

TEST(PeerTest, NamesThatLookLikeFields) {
  ChildProcess child([](Messages& channel) {
    ::prctl(PR_SET_NAME, "a) Z 1 2 (b) X");
    return TellAndWait(channel);
  });
  const ProcessIdentity process = IdentityOf(child);
  EXPECT_NE(process.start_ticks, 0u);
  absl::StatusOr<Peer> peer = Peer::Open(process);
  ASSERT_TRUE(peer.ok()) << peer.status();
  EXPECT_TRUE(peer->Alive());
}

// What a rank sees where pidfd_open is denied with `error`.
std::string WithoutPidfd(int error) {
  if (!DenySyscall(SYS_pidfd_open, error)) return "no seccomp";
  ChildProcess child([](Messages& channel) {
    ::prctl(PR_SET_NAME, "a) Z 1 2 (b) X");
    return TellAndWait(channel);
  });
  ProcessIdentity process = *ParseProcessIdentity(child.channel().Receive());
  absl::StatusOr<Peer> peer = Peer::Open(process);
  if (!peer.ok()) return peer.status().ToString();
  if (!peer->Alive()) return "a living process counts as dead";
  if (!absl::IsUnavailable(Peer::Open({process.pid, process.start_ticks - 1}).status())) {
    return "another process of that id counts as alive";
  }
  child.Kill();
  if (peer->Alive()) return "a zombie counts as alive";
  child.Reap();
  if (peer->Alive()) return "a vanished process counts as alive";
  if (!absl::IsUnavailable(Peer::Open(process).status())) return "a vanished process was opened";
  return "as expected";
}

TEST(PeerTest, WithoutPidfd) {
  for (int error : {ENOSYS, EPERM}) {
    const std::string result = ChildProcess([error] { return WithoutPidfd(error); }).Result();
    if (result == "no seccomp") GTEST_SKIP() << "this kernel has no seccomp filters";
    EXPECT_EQ(result, "as expected") << "errno " << error;
  }
}

}  // namespace
}  // namespace ddp::backends
