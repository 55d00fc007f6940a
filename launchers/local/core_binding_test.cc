// Machines are recorded as the files of /sys that are read.
#include "launchers/local/core_binding.h"

#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/cpu_topology.h"
#include "base/file.h"
#include "gtest/gtest.h"

namespace ddp::launchers {
namespace {

// One socket with four cores of two threads, numbered as Intel's desktops are.
const std::map<std::string, std::string> kSmt = {
    {"sys/devices/system/cpu/online", "0-7"},
    {"sys/devices/system/node/online", "0"},
    {"sys/devices/system/node/node0/cpulist", "0-7"},
    {"sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "0,4"},
    {"sys/devices/system/cpu/cpu1/topology/thread_siblings_list", "1,5"},
    {"sys/devices/system/cpu/cpu2/topology/thread_siblings_list", "2,6"},
    {"sys/devices/system/cpu/cpu3/topology/thread_siblings_list", "3,7"},
    {"sys/devices/system/cpu/cpu4/topology/thread_siblings_list", "0,4"},
    {"sys/devices/system/cpu/cpu5/topology/thread_siblings_list", "1,5"},
    {"sys/devices/system/cpu/cpu6/topology/thread_siblings_list", "2,6"},
    {"sys/devices/system/cpu/cpu7/topology/thread_siblings_list", "3,7"}};

// Two sockets of four cores, numbered in turns, as some servers are.
const std::map<std::string, std::string> kTwoSockets = {
    {"sys/devices/system/cpu/online", "0-7"},
    {"sys/devices/system/node/online", "0-1"},
    {"sys/devices/system/node/node0/cpulist", "0,2,4,6"},
    {"sys/devices/system/node/node1/cpulist", "1,3,5,7"},
    {"sys/devices/system/cpu/cpu0/topology/physical_package_id", "0"},
    {"sys/devices/system/cpu/cpu1/topology/physical_package_id", "1"},
    {"sys/devices/system/cpu/cpu2/topology/physical_package_id", "0"},
    {"sys/devices/system/cpu/cpu3/topology/physical_package_id", "1"},
    {"sys/devices/system/cpu/cpu4/topology/physical_package_id", "0"},
    {"sys/devices/system/cpu/cpu5/topology/physical_package_id", "1"},
    {"sys/devices/system/cpu/cpu6/topology/physical_package_id", "0"},
    {"sys/devices/system/cpu/cpu7/topology/physical_package_id", "1"}};

// One in a container with --cpuset-cpus=1-2,5-6.
std::map<std::string, std::string> With(std::map<std::string, std::string> machine,
                                        const std::string& file, const std::string& text) {
  machine["cgroup/" + file] = text;
  return machine;
}

// A virtual machine of two cores.
const std::map<std::string, std::string> kTwoCores = {
    {"sys/devices/system/cpu/online", "0-1"},
    {"sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "0"},
    {"sys/devices/system/cpu/cpu1/topology/thread_siblings_list", "1"}};

// "0,4:1 1,5:1": the CPUs and the threads of each rank.
std::string Shares(const std::map<std::string, std::string>& machine, int ranks,
                   const std::optional<std::vector<int>>& allowed = std::nullopt,
                   std::optional<double> quota = std::nullopt) {
  static int machines = 0;
  const std::string root = absl::StrCat(testing::TempDir(), "/machine_", ++machines);
  for (const auto& [file, text] : machine) {
    const std::string path = absl::StrCat(root, "/", file);
    EXPECT_TRUE(MakeDirectories(DirectoryOf(path)).ok());
    EXPECT_TRUE(WriteFileAtomically(path, text + "\n").ok());
  }
  return absl::StrJoin(ShareCores(ranks, allowed, root + "/sys", root + "/cgroup", quota), " ",
                       [](std::string* out, const CoreShare& share) {
                         absl::StrAppend(out, absl::StrJoin(share.cpus, ","), ":", share.threads);
                       });
}

TEST(ShareCoresTest, SiblingsStayTogether) {
  EXPECT_EQ(Shares(kSmt, 1), "0,1,2,3,4,5,6,7:4");
  EXPECT_EQ(Shares(kSmt, 2), "0,1,4,5:2 2,3,6,7:2");
  EXPECT_EQ(Shares(kSmt, 3), "0,4:1 1,5:1 2,3,6,7:2");
  EXPECT_EQ(Shares(kSmt, 4), "0,4:1 1,5:1 2,6:1 3,7:1");
  EXPECT_EQ(Shares(kSmt, 5), ":1 :1 :1 :1 :1");
}

TEST(ShareCoresTest, ARankIsOnOneSocket) {
  EXPECT_EQ(Shares(kTwoSockets, 2), "0,2,4,6:4 1,3,5,7:4");
  EXPECT_EQ(Shares(kTwoSockets, 4), "0,2:2 4,6:2 1,3:2 5,7:2");
}

TEST(ShareCoresTest, AQuotaIsSharedOutAndBindsNobody) {
  EXPECT_EQ(Shares(kSmt, 2, std::nullopt, 3), ":1 :1");
  EXPECT_EQ(Shares(kSmt, 1, std::nullopt, 3), ":3");
  EXPECT_EQ(Shares(kSmt, 2, std::nullopt, 8), "0,1,4,5:2 2,3,6,7:2");
}

TEST(ShareCoresTest, ACpusetAndTheAffinityLimit) {
  EXPECT_EQ(Shares(With(kSmt, "cpuset.cpus.effective", "1-2,5-6"), 2), "1,5:1 2,6:1");
  EXPECT_EQ(Shares(kSmt, 2, {{0, 1, 2, 3}}), "0,1:2 2,3:2");
  EXPECT_EQ(Shares(With(kSmt, "cpuset.cpus.effective", "1-2,5-6"), 1, {{1, 7}}), "1:1");
}

TEST(ShareCoresTest, TwoCoresAreOneForEachOfTwoRanks) {
  EXPECT_EQ(Shares(kTwoCores, 2), "0:1 1:1");
  EXPECT_EQ(Shares(kTwoCores, 1), "0,1:2");
}

TEST(ShareCoresTest, WhatCannotBeReadBindsNobody) {
  EXPECT_EQ(Shares({}, 2), "");
  EXPECT_EQ(Shares({{"sys/devices/system/cpu/online", "some"}}, 2), "");
}

TEST(BindToTest, BindsThisThreadAndNothingForNoCpus) {
  const auto before = AllowedCpus();
  ASSERT_TRUE(before && !before->empty());
  BindTo({});
  EXPECT_EQ(AllowedCpus(), before);
  BindTo({before->front()});
  EXPECT_EQ(AllowedCpus(), std::vector<int>{before->front()});
  BindTo(*before);
  EXPECT_EQ(AllowedCpus(), before);
}

}  // namespace
}  // namespace ddp::launchers
