#include "backends/shm/memory/memory_limit.h"

#include <cstdint>
#include <filesystem>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "gtest/gtest.h"

namespace ddp::backends::shm {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

// A folder that stands in for the root of a machine with 4096 MiB available.
class FakeMachine {
 public:
  FakeMachine() : root_(absl::StrCat(::testing::TempDir(), "/machine")) {
    std::filesystem::remove_all(root_);
    Set("/proc/meminfo", "MemTotal:       8388608 kB\nMemAvailable:    4194304 kB\n");
  }
  void Set(const std::string& path, const std::string& text) {
    EXPECT_TRUE(MakeDirectories(DirectoryOf(root_ + path)).ok());
    EXPECT_TRUE(WriteFileAtomically(root_ + path, text).ok());
  }
  void SetV2(const std::string& group, const std::string& limit, uint64_t used) {
    Set("/sys/fs/cgroup" + group + "/memory.max", limit + "\n");
    Set("/sys/fs/cgroup" + group + "/memory.current", absl::StrCat(used, "\n"));
  }
  MemoryHeadroom Room() const { return AvailableMemory(root_); }

 private:
  std::string root_;
};

constexpr char kV2Mount[] = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n";

TEST(MemoryLimitTest, ThisMachine) {
  const MemoryHeadroom room = AvailableMemory();
  EXPECT_GT(room.bytes, 0u);
  EXPECT_LT(room.bytes, uint64_t{1} << 50);
  EXPECT_FALSE(room.bound.empty());
}

TEST(MemoryLimitTest, NothingKnown) {
  const MemoryHeadroom room = AvailableMemory("/nowhere/at/all");
  EXPECT_EQ(room.bytes, UINT64_MAX);
}

TEST(MemoryLimitTest, TheMachineItself) {
  EXPECT_EQ(FakeMachine().Room().bytes, 4096 * kMiB);
  EXPECT_TRUE(absl::StrContains(FakeMachine().Room().bound, "MemAvailable"));
}

TEST(MemoryLimitTest, Version2PageCacheIsFree) {
  FakeMachine machine;
  machine.Set("/proc/self/cgroup", "0::/job\n");
  machine.Set("/proc/self/mountinfo", kV2Mount);
  machine.SetV2("/job", absl::StrCat(1000 * kMiB), 990 * kMiB);
  EXPECT_EQ(machine.Room().bytes, 10 * kMiB);
  machine.Set("/sys/fs/cgroup/job/memory.stat",
              absl::StrCat("inactive_file ", 300 * kMiB, "\nactive_file ", 200 * kMiB, "\n"));
  EXPECT_EQ(machine.Room().bytes, 510 * kMiB);
  EXPECT_EQ(machine.Room().bound,
            "the memory cgroup /sys/fs/cgroup/job (limit 1000.0 MiB, 490.0 MiB used)");
}

TEST(MemoryLimitTest, Version2AnyGroupAboveMayHoldLess) {
  FakeMachine machine;
  machine.Set("/proc/self/cgroup", "0::/slurm/job_7/step_0\n");
  machine.Set("/proc/self/mountinfo", kV2Mount);
  machine.SetV2("/slurm/job_7/step_0", "max", 100 * kMiB);
  machine.SetV2("/slurm", "max", 700 * kMiB);
  EXPECT_EQ(machine.Room().bytes, 4096 * kMiB);
  machine.SetV2("/slurm/job_7", absl::StrCat(512 * kMiB), 500 * kMiB);
  EXPECT_EQ(machine.Room().bytes, 12 * kMiB);
  EXPECT_TRUE(absl::StrContains(machine.Room().bound, "/slurm/job_7 "));
  machine.SetV2("/slurm/job_7", absl::StrCat(512 * kMiB), 600 * kMiB);
  EXPECT_EQ(machine.Room().bytes, 0u);
}

TEST(MemoryLimitTest, AContainerThatSeesItsOwnPartOnly) {
  for (const char* group : {"0::/docker/abc\n", "0::/\n", "0::/../elsewhere\n"}) {
    FakeMachine machine;
    machine.Set("/proc/self/cgroup", group);
    machine.Set("/proc/self/mountinfo",
                "31 23 0:28 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n");
    machine.SetV2("", absl::StrCat(64 * kMiB), kMiB);
    EXPECT_EQ(machine.Room().bytes, 63 * kMiB) << group;
  }
}

TEST(MemoryLimitTest, AGroupWhoseNameOnlyBeginsLikeTheMountsIsElsewhere) {
  FakeMachine machine;
  machine.Set("/proc/self/cgroup", "0::/slurm/uid_1000/job\n");
  machine.Set("/proc/self/mountinfo",
              "31 23 0:28 /slurm/uid_100 /sys/fs/cgroup ro - cgroup2 cgroup rw\n");
  machine.SetV2("", absl::StrCat(64 * kMiB), kMiB);
  EXPECT_EQ(machine.Room().bytes, 63 * kMiB);
}

TEST(MemoryLimitTest, Version1) {
  FakeMachine machine;
  machine.Set("/proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/slurm/uid_1/job_2\n0::/\n");
  machine.Set("/proc/self/mountinfo",
              "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpuacct\n"
              "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,cpu,memory\n");
  const std::string job = "/sys/fs/cgroup/memory/slurm/uid_1/job_2";
  machine.Set(job + "/memory.limit_in_bytes", "9223372036854771712\n");
  machine.Set(job + "/memory.usage_in_bytes", absl::StrCat(100 * kMiB));
  EXPECT_EQ(machine.Room().bytes, 4096 * kMiB);
  machine.Set(job + "/memory.limit_in_bytes", absl::StrCat(128 * kMiB));
  EXPECT_EQ(machine.Room().bytes, 28 * kMiB);
  machine.Set(job + "/memory.stat",
              absl::StrCat("inactive_file 1\ntotal_inactive_file ", 10 * kMiB, "\n"));
  EXPECT_EQ(machine.Room().bytes, 38 * kMiB);
}

TEST(MemoryLimitTest, Format) {
  EXPECT_EQ(FormatBytes(17), "17 bytes");
  EXPECT_EQ(FormatBytes(1024), "1.0 KiB");
  EXPECT_EQ(FormatBytes(uint64_t{3} << 29), "1.5 GiB");
  EXPECT_EQ(FormatBytes(uint64_t{5000} << 40), "5000.0 TiB");
}

}  // namespace
}  // namespace ddp::backends::shm
