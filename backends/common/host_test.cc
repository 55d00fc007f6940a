#include "backends/common/host.h"

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "gtest/gtest.h"

namespace ddp::backends {
namespace {

namespace fs = std::filesystem;

// What HostId() says in a child process that has run `prepare`; errno in words if that fails.
std::string HostIdInChild(const std::function<int()>& prepare) {
  int ends[2];
  if (::pipe(ends) != 0) return "no pipe";
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string text = prepare() == 0 ? HostId() : absl::StrCat("errno ", errno);
    const ssize_t written = ::write(ends[1], text.data(), text.size());
    ::_exit(written == static_cast<ssize_t>(text.size()) ? 0 : 1);
  }
  ::close(ends[1]);
  std::string text(4096, '\0');
  const ssize_t n = ::read(ends[0], text.data(), text.size());
  text.resize(n > 0 ? n : 0);
  ::close(ends[0]);
  ::waitpid(child, nullptr, 0);
  return text;
}

// Folders that stand in for /proc and /etc of a machine.
class FakeMachine {
 public:
  explicit FakeMachine(const std::string& name)
      : root_(absl::StrCat(::testing::TempDir(), "/", name)) {
    fs::remove_all(root_);
    fs::create_directories(root_ + "/proc/self/ns");
    fs::create_directories(root_ + "/proc/sys/kernel/random");
    fs::create_directories(root_ + "/etc");
  }
  void SetFile(const std::string& path, const std::string& text) {
    EXPECT_TRUE(WriteFileAtomically(root_ + path, text).ok());
  }
  void SetNamespace(const std::string& kind, const std::string& target) {
    const std::string link = root_ + "/proc/self/ns/" + kind;
    fs::remove(link);
    fs::create_symlink(target, link);
  }
  std::string Id() const { return internal::HostIdFrom(root_ + "/proc", root_ + "/etc"); }

 private:
  std::string root_;
};

FakeMachine Typical(const std::string& name) {
  FakeMachine machine(name);
  machine.SetFile("/proc/sys/kernel/random/boot_id", "c1148193-9d4e\n");
  machine.SetNamespace("net", "net:[11]");
  machine.SetNamespace("pid", "pid:[12]");
  machine.SetNamespace("time", "time:[13]");
  return machine;
}

TEST(HostIdTest, SameInAnotherProcess) {
  EXPECT_EQ(HostIdInChild([] { return 0; }), HostId());
  EXPECT_FALSE(absl::StrContains(HostId(), ' '));
  EXPECT_FALSE(absl::StrContains(HostId(), '\n'));
}

TEST(HostIdTest, AnotherNetworkNamespaceIsAnotherHost) {
  const std::string id = HostIdInChild([] { return ::unshare(CLONE_NEWUSER | CLONE_NEWNET); });
  if (absl::StartsWith(id, "errno ")) {
    GTEST_SKIP() << "this machine lets nobody make namespaces: " << id;
  }
  EXPECT_NE(id, HostId());
}

TEST(HostIdTest, EveryPartTells) {
  FakeMachine machine = Typical("parts");
  const std::string id = machine.Id();
  EXPECT_EQ(id, absl::StrCat("c1148193-9d4e/net:[11]/pid:[12]/time:[13]/uid:", ::geteuid()));
  for (const char* kind : {"net", "pid", "time"}) {
    FakeMachine other = Typical("parts_other");
    other.SetNamespace(kind, absl::StrCat(kind, ":[99]"));
    EXPECT_NE(other.Id(), id) << kind;
  }
  FakeMachine rebooted = Typical("parts_rebooted");
  rebooted.SetFile("/proc/sys/kernel/random/boot_id", "77777777-9d4e\n");
  EXPECT_NE(rebooted.Id(), id);
}

TEST(HostIdTest, WithoutBootIdTheMachineIdAndNameStandIn) {
  FakeMachine machine("no_boot_id");
  machine.SetFile("/etc/machine-id", "abc\n");
  char name[256] = {};
  ASSERT_EQ(::gethostname(name, sizeof(name) - 1), 0);
  EXPECT_EQ(machine.Id(), absl::StrCat("abc@", name, "/net:-/pid:-/time:-/uid:", ::geteuid()));
  machine.SetFile("/etc/machine-id", "");
  EXPECT_TRUE(absl::StartsWith(machine.Id(), absl::StrCat("-@", name, "/")));
}

TEST(HostIdTest, ContainersOfOneNetworkShareIt) {
  EXPECT_TRUE(ShareNetwork("boot/net:[1]/pid:[1]", "boot/net:[1]/pid:[2]"));
  EXPECT_FALSE(ShareNetwork("boot/net:[1]/pid:[1]", "boot/net:[2]/pid:[1]"));
  EXPECT_FALSE(ShareNetwork("boot/net:[1]/pid:[1]", "other/net:[1]/pid:[1]"));
  EXPECT_TRUE(ShareNetwork(HostId(), HostId()));
}

}  // namespace
}  // namespace ddp::backends
