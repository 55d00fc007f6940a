#include "ddp/config/shares.h"

#include <sched.h>

#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "gtest/gtest.h"

namespace ddp::config {
namespace {

using Cores = std::vector<std::vector<int>>;
using Threads = std::vector<int>;

std::vector<Threads> CoresOf(const Machine& machine, int slots) {
  std::vector<Threads> cores;
  for (int slot = 0; slot < slots; ++slot) cores.push_back(ShareOf(machine, slot, slots).cores);
  return cores;
}

TEST(SharesTest, SiblingsStayTogether) {
  const Machine machine = {.cores = {{0, 4}, {1, 5}, {2, 6}, {3, 7}}, .available = 8, .gpus = {}};
  EXPECT_EQ(CoresOf(machine, 2), (std::vector<Threads>{{0, 4, 1, 5}, {2, 6, 3, 7}}));
  EXPECT_EQ(CoresOf(machine, 3), (std::vector<Threads>{{0, 4}, {1, 5}, {2, 6, 3, 7}}));
  // More jobs than cores: threads, and then shared ones.
  EXPECT_EQ(CoresOf({.cores = {{0, 2}, {1, 3}}, .available = 4, .gpus = {}}, 4),
            (std::vector<Threads>{{0}, {2}, {1}, {3}}));
  EXPECT_EQ(CoresOf({.cores = {{0}, {1}}, .available = 2, .gpus = {}}, 3),
            (std::vector<Threads>{{0}, {1}, {0}}));
}

TEST(SharesTest, AQuotaIsSharedOut) {
  const Cores cores = {{0, 4}, {1, 5}, {2, 6}, {3, 7}};
  EXPECT_EQ(CoresOf({.cores = cores, .available = 4, .gpus = {}}, 2),
            (std::vector<Threads>{{0, 1}, {2, 3}}));
  EXPECT_EQ(CoresOf({.cores = cores, .available = 5, .gpus = {}}, 2),
            (std::vector<Threads>{{0, 4, 1}, {2, 3}}));
  EXPECT_EQ(CoresOf({.cores = cores, .available = 1, .gpus = {}}, 2),
            (std::vector<Threads>{{0}, {0}}));
}

TEST(SharesTest, GpusAreSharedOut) {
  const auto gpus = [](int slot, int slots) {
    return ShareOf({.cores = {{0}}, .available = 1, .gpus = {"4", "5", "6"}}, slot, slots).gpus;
  };
  EXPECT_EQ(gpus(0, 1), (std::vector<std::string>{"4", "5", "6"}));
  EXPECT_EQ(gpus(0, 2), (std::vector<std::string>{"4"}));
  EXPECT_EQ(gpus(1, 2), (std::vector<std::string>{"5", "6"}));
  EXPECT_EQ(gpus(3, 4), (std::vector<std::string>{"4"}));
  EXPECT_EQ(ShareOf({.cores = {{0}}, .available = 1, .gpus = {}}, 0, 2).gpus.size(), 0);
}

TEST(SharesTest, TheMachineIsThatOfThisProcess) {
  cpu_set_t set;
  ASSERT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
  std::vector<int> allowed;
  for (int thread = 0; thread < CPU_SETSIZE; ++thread) {
    if (CPU_ISSET(thread, &set)) allowed.push_back(thread);
  }
  // All threads of one core, as its /sys says.
  const std::string root = absl::StrCat(std::getenv("TEST_TMPDIR"), "/machine");
  for (const int thread : allowed) {
    const std::string folder =
        absl::StrCat(root, "/sys/devices/system/cpu/cpu", thread, "/topology");
    ASSERT_TRUE(MakeDirectories(folder).ok());
    ASSERT_TRUE(WriteFileAtomically(folder + "/thread_siblings_list",
                                    absl::StrCat(allowed.front(), "-", allowed.back(), "\n"))
                    .ok());
  }
  for (const char* const gpu : {"0000:01:00.0", "0000:02:00.0"}) {
    ASSERT_TRUE(MakeDirectories(absl::StrCat(root, "/proc/driver/nvidia/gpus/", gpu)).ok());
  }
  const Machine machine = ThisMachine(Environment(), root);
  EXPECT_EQ(machine.cores, Cores{allowed});
  EXPECT_EQ(machine.available, static_cast<int>(allowed.size()));
  EXPECT_EQ(machine.gpus, (std::vector<std::string>{"0", "1"}));
  EXPECT_EQ(ThisMachine({{"CUDA_VISIBLE_DEVICES", "3, 1,-1,2"}}, root).gpus,
            (std::vector<std::string>{"3", "1"}));
  EXPECT_EQ(ThisMachine({{"SLURM_CPUS_PER_TASK", "1"}}, root).available, 1);
  EXPECT_TRUE(ThisMachine({{"CUDA_VISIBLE_DEVICES", ""}}, root).gpus.empty());
}

}  // namespace
}  // namespace ddp::config
