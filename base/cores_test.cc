#include "base/cores.h"

#include <sched.h>

#include <filesystem>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "gtest/gtest.h"

namespace ddp {
namespace {

TEST(CoresTest, CountsWhatAThreadIsBoundTo) {
  const int all = AvailableCores();
  EXPECT_GE(all, 1);
  int bound = 0;
  std::thread([&bound] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(::sched_getcpu(), &one);
    ASSERT_EQ(::sched_setaffinity(0, sizeof(one), &one), 0);
    bound = AvailableCores();
  }).join();
  EXPECT_EQ(bound, 1);
  EXPECT_EQ(AvailableCores(), all) << "only that thread was bound";
}

// A folder used as the root folder of a machine; the CPU affinity is the real one.
class FakeMachine {
 public:
  FakeMachine() : root_(absl::StrCat(testing::TempDir(), "/machine")) {
    std::filesystem::remove_all(root_);
  }
  void Set(const std::string& path, const std::string& text) {
    EXPECT_TRUE(MakeDirectories(DirectoryOf(root_ + path)).ok());
    EXPECT_TRUE(WriteFileAtomically(root_ + path, text).ok());
  }
  int Cores() const { return AvailableCores(root_); }
  const std::string& root() const { return root_; }

 private:
  const std::string root_;
};

TEST(CoresTest, AQuotaOfVersion2AtAnyLevel) {
  const int all = FakeMachine().Cores();
  FakeMachine machine;
  machine.Set("/proc/self/cgroup", "0::/pod/container\n");
  machine.Set("/proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  machine.Set("/sys/fs/cgroup/pod/container/cpu.max", "max 100000\n");
  machine.Set("/sys/fs/cgroup/pod/cpu.max", absl::StrCat(all * 100000, " 100000\n"));
  EXPECT_EQ(machine.Cores(), all);
  machine.Set("/sys/fs/cgroup/pod/cpu.max", absl::StrCat(all * 100000 - 60000, " 100000\n"));
  EXPECT_EQ(machine.Cores(), all) << "rounded up";
  machine.Set("/sys/fs/cgroup/pod/cpu.max", "50000 100000\n");
  EXPECT_EQ(machine.Cores(), 1);
  EXPECT_EQ(CpuQuota(machine.root()), 0.5);
  EXPECT_EQ(BoundCores(), all) << "a quota binds to no core";
  machine.Set("/sys/fs/cgroup/pod/cpu.max", "no numbers\n");
  EXPECT_EQ(machine.Cores(), all);
}

TEST(CoresTest, AQuotaOfVersion1) {
  const int all = FakeMachine().Cores();
  FakeMachine machine;
  machine.Set("/proc/self/cgroup", "4:cpu,cpuacct:/job\n3:cpuset:/job\n");
  machine.Set("/proc/self/mountinfo",
              "35 31 0:32 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n");
  machine.Set("/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "-1\n");
  machine.Set("/sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(machine.Cores(), all);
  machine.Set("/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "10000\n");
  EXPECT_EQ(machine.Cores(), 1);
}

TEST(CoresTest, AContainersPartOfTheHierarchy) {
  FakeMachine machine;
  machine.Set("/proc/self/cgroup", "0::/docker/abc/job\n");
  machine.Set("/proc/self/mountinfo",
              "30 23 0:27 / /proc rw - proc proc rw\n"
              "31 23 0:28 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  machine.Set("/sys/fs/cgroup/job/cpu.max", "50000 100000\n");
  EXPECT_EQ(machine.Cores(), 1);
}

TEST(CoresTest, WhatIsNotOurGroupsQuotaIsIgnored) {
  const int all = FakeMachine().Cores();
  FakeMachine machine;
  machine.Set("/proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  machine.Set("/proc/self/cgroup", "0::/../sibling\n");  // not visible from this mount
  machine.Set("/sys/fs/cgroup/cpu.max", "max 100000\n");
  machine.Set("/sys/fs/sibling/cpu.max", "50000 100000\n");
  EXPECT_EQ(machine.Cores(), all);
  machine.Set("/proc/self/cgroup", "4:cpuset:/job\n");  // another controller, of version 1
  machine.Set("/sys/fs/cgroup/job/cpu.max", "50000 100000\n");
  EXPECT_EQ(machine.Cores(), all);
  machine.Set("/proc/self/cgroup", "0::/job\n");
  machine.Set("/sys/fs/cgroup/job/cpu.max", "50000 0\n");
  EXPECT_EQ(machine.Cores(), all);
}

TEST(CoresTest, AnotherControllersHierarchyIsPassedOver) {
  FakeMachine machine;
  machine.Set("/proc/self/cgroup", "4:cpu,cpuacct:/job\n");
  machine.Set("/proc/self/mountinfo",
              "34 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
              "35 31 0:32 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n");
  machine.Set("/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "10000\n");
  machine.Set("/sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(machine.Cores(), 1);
}

TEST(CoresTest, MoreThanAQuotaPaysForIsNotCounted) {
  const int all = AvailableCores();
  if (all < 2) GTEST_SKIP() << "there is one core only";
  FakeMachine machine;
  machine.Set("/proc/self/cgroup", "0::/\n");
  machine.Set("/proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  machine.Set("/sys/fs/cgroup/cpu.max", absl::StrCat((all - 1) * 20000, " 20000\n"));
  EXPECT_EQ(machine.Cores(), all - 1);
}

}  // namespace
}  // namespace ddp
