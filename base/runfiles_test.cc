#include "base/runfiles.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "gtest/gtest.h"

namespace ddp {
namespace {

using internal::FindRunfile;
using internal::RunfilesRoots;

TEST(RunfilesTest, FindsThisTestsData) {
  auto found = Runfile("libtorch_ddp/base/runfiles_test.cc");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_TRUE(std::ifstream(*found).good());
}

TEST(RunfilesTest, FindsItWithoutTheTestsEnvironment) {
  for (const char* variable : {"TEST_SRCDIR", "RUNFILES_DIR"}) unsetenv(variable);
  auto found = Runfile("libtorch_ddp/base/runfiles_test.cc");
  ASSERT_TRUE(found.ok()) << found.status();
}

TEST(RunfilesTest, SearchesTheEnvironmentThenBesideTheProgramThenAroundIt) {
  const Environment env = {{"RUNFILES_DIR", "/r"}, {"TEST_SRCDIR", "/t"}};
  EXPECT_EQ(RunfilesRoots(env, "/bin/train"),
            std::vector<std::string>({"/r", "/t", "/bin/train.runfiles"}));
  EXPECT_EQ(RunfilesRoots({}, "/bin/a.runfiles/ws/train"),
            std::vector<std::string>({"/bin/a.runfiles/ws/train.runfiles", "/bin/a.runfiles"}));
  EXPECT_EQ(RunfilesRoots({}, ""), std::vector<std::string>());
}

TEST(RunfilesTest, TakesTheFirstPlaceThatHasTheFile) {
  const std::filesystem::path scratch = std::filesystem::path(testing::TempDir()) / "runfiles";
  for (const char* root : {"a", "b", "c"}) std::filesystem::create_directories(scratch / root);
  for (const char* root : {"b", "c"}) std::ofstream(scratch / root / "x") << root;
  EXPECT_EQ(*FindRunfile("x", {scratch / "a", scratch / "b", scratch / "c"}), scratch / "b" / "x");
}

TEST(RunfilesTest, RepositoriesOfModulesHaveOtherNames) {
  const std::filesystem::path root = std::filesystem::path(testing::TempDir()) / "mapped";
  for (const char* folder : {"ours~data", "theirs~data", "data"}) {
    std::filesystem::create_directories(root / folder);
    std::ofstream(root / folder / "x") << folder;
  }
  std::ofstream(root / "theirs~data" / "y") << "only theirs";
  std::ofstream(root / "_repo_mapping")
      << ",data,theirs~data\n,other,theirs~data\nddp~,data,ours~data\n";
  EXPECT_EQ(*FindRunfile("data/x", {root}, "ddp~"), root / "ours~data" / "x");
  EXPECT_EQ(*FindRunfile("data/y", {root}, "ddp~"), root / "theirs~data" / "y");
  EXPECT_EQ(*FindRunfile("data/x", {root}), root / "theirs~data" / "x");
  EXPECT_EQ(*FindRunfile("other/x", {root}, "ddp~"), root / "theirs~data" / "x");
  EXPECT_FALSE(FindRunfile("none/x", {root}, "ddp~").ok());
  std::filesystem::remove(root / "_repo_mapping");
  EXPECT_EQ(*FindRunfile("data/x", {root}, "ddp~"), root / "data" / "x");
}

TEST(RunfilesTest, SaysWhereItSearched) {
  EXPECT_EQ(FindRunfile("ws/x", {"/nowhere", "/void"}).status().message(),
            "'ws/x' is not among this program's runfiles; searched: /nowhere, /void");
}

}  // namespace
}  // namespace ddp
