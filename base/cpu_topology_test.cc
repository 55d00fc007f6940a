#include "base/cpu_topology.h"

#include <sched.h>

#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "gtest/gtest.h"

namespace ddp {
namespace {

TEST(CpuTopologyTest, AllowedCpusAreThoseOfTheThread) {
  const int one = ::sched_getcpu();
  std::optional<std::vector<int>> bound;
  std::thread([&] {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(one, &set);
    ASSERT_EQ(::sched_setaffinity(0, sizeof(set), &set), 0);
    bound = AllowedCpus();
  }).join();
  EXPECT_EQ(bound, std::vector<int>{one});
}

TEST(CpuTopologyTest, TheFirstSiblingIsThatOfTheSystem) {
  const std::string sysfs = absl::StrCat(testing::TempDir(), "/siblings");
  const auto set = [&](int cpu, const std::string& text) {
    const std::string file =
        absl::StrCat(sysfs, "/devices/system/cpu/cpu", cpu, "/topology/thread_siblings_list");
    EXPECT_TRUE(MakeDirectories(DirectoryOf(file)).ok());
    EXPECT_TRUE(WriteFileAtomically(file, text).ok());
  };
  set(4, "0,4\n");
  set(3, "2-3\n");
  set(5, "5\n");
  set(6, "\n");
  EXPECT_EQ(FirstSibling(4, sysfs), 0);
  EXPECT_EQ(FirstSibling(3, sysfs), 2);
  EXPECT_EQ(FirstSibling(5, sysfs), 5);
  EXPECT_EQ(FirstSibling(6, sysfs), 6);
  EXPECT_EQ(FirstSibling(7, sysfs), 7);
}

}  // namespace
}  // namespace ddp
