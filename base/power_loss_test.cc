// The model itself, and base/file.h under it.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/power_loss_testing.h"

namespace ddp {
namespace {

std::string Folder(const std::string& name) {
  const std::string path = absl::StrCat(testing::TempDir(), "/power_loss_test_", name);
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path);
  return path;
}

// All that may be left after the whole trace.
std::set<Tree> AfterAll(const Tree& before, const std::vector<TracedCall>& trace) {
  std::set<Tree> trees;
  trees.insert(AfterPowerLoss(before, trace, trace.size(), {.kept = Kept::kNothing}));
  trees.insert(AfterPowerLoss(before, trace, trace.size(), {.kept = Kept::kEverything}));
  for (uint32_t seed = 0; seed < 100; ++seed) {
    trees.insert(AfterPowerLoss(before, trace, trace.size(), {.kept = Kept::kSome, .seed = seed}));
  }
  return trees;
}

TEST(PowerLossTest, ContentsAndNamesAreDurableSeparately) {
  const std::string folder = Folder("separately");
  RecordingFileSystem files(folder);
  const std::string path = folder + "/a";
  const int fd = files.Open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL, 0666);
  ASSERT_EQ(files.Write(fd, "x", 1), 1);
  const Tree none;
  EXPECT_EQ(AfterAll({}, files.trace()), (std::set<Tree>{none, {{"a", ""}}, {{"a", "x"}}}));
  ASSERT_EQ(files.Fsync(fd), 0);
  EXPECT_EQ(AfterAll({}, files.trace()), (std::set<Tree>{none, {{"a", "x"}}}));
  files.Close(fd);
  ASSERT_TRUE(SyncDirectory(folder, &files).ok());
  EXPECT_EQ(AfterAll({}, files.trace()), (std::set<Tree>{{{"a", "x"}}}));
  EXPECT_EQ(files.fsyncs(), 2);
}

TEST(PowerLossTest, WritesReachTheDiskInAnyOrderAndInPart) {
  const std::string folder = Folder("writes");
  RecordingFileSystem files(folder);
  const int fd = files.Open((folder + "/a").c_str(), O_WRONLY | O_CREAT | O_EXCL, 0666);
  ASSERT_TRUE(SyncDirectory(folder, &files).ok());
  ASSERT_EQ(files.Write(fd, "ab", 2), 2);
  ASSERT_EQ(files.Write(fd, "cd", 2), 2);
  std::set<std::string> found;
  for (const Tree& tree : AfterAll({}, files.trace())) found.insert(tree.at("a").value());
  files.Close(fd);
  bool is_torn = false;
  for (const std::string& contents : found) is_torn = is_torn || contents.size() % 2 == 1;
  EXPECT_TRUE(is_torn);
  for (const std::string& contents :
       {std::string(), std::string("ab"), std::string("abcd"), std::string("\0\0cd", 4)}) {
    EXPECT_EQ(found.count(contents), 1u) << contents;
  }
}

TEST(PowerLossTest, FoldersExchangeAtOnce) {
  const std::string folder = Folder("exchange");
  std::filesystem::create_directories(folder + "/a");
  std::filesystem::create_directories(folder + "/b");
  ASSERT_TRUE(WriteFileAtomically(folder + "/b/new", "n").ok());
  const Tree before = ReadTree(folder);
  RecordingFileSystem files(folder);
  ASSERT_EQ(files.Exchange((folder + "/a").c_str(), (folder + "/b").c_str()), 0);
  const Tree after = {{"a", std::nullopt}, {"a/new", "n"}, {"b", std::nullopt}};
  EXPECT_EQ(AfterAll(before, files.trace()), (std::set<Tree>{before, after}));
  EXPECT_EQ(ReadTree(folder), after);
  ASSERT_TRUE(RemoveTree(folder + "/a", &files).ok());
  ASSERT_TRUE(SyncDirectory(folder, &files).ok());
  EXPECT_EQ(AfterAll(before, files.trace()), (std::set<Tree>{{{"b", std::nullopt}}}));
  const std::string copy = Folder("copy");
  WriteTree(before, copy);
  EXPECT_EQ(ReadTree(copy), before);
}

// Whether WriteFileAtomically leaves something else than the old or the new file.
bool Fails(int64_t ignored_fsync) {
  const std::string folder = Folder("atomically");
  EXPECT_TRUE(WriteFileAtomically(folder + "/a", "old").ok());
  const Tree before = ReadTree(folder);
  RecordingFileSystem files(folder, ignored_fsync);
  EXPECT_TRUE(WriteFileAtomically(folder + "/a", "new", &files).ok());
  EXPECT_EQ(files.fsyncs(), 2);
  for (size_t calls = 0; calls <= files.trace().size(); ++calls) {
    for (uint32_t seed = 0; seed < 22; ++seed) {
      const Kept kept = seed == 0 ? Kept::kNothing : seed == 1 ? Kept::kEverything : Kept::kSome;
      const Tree tree = AfterPowerLoss(before, files.trace(), calls, {.kept = kept, .seed = seed});
      const auto file = tree.find("a");
      const bool is_new = file != tree.end() && file->second == "new";
      const bool is_old = file != tree.end() && file->second == "old";
      if (!is_new && (!is_old || calls == files.trace().size())) return true;
    }
  }
  return false;
}

TEST(PowerLossTest, AFileIsReplacedAtomically) {
  EXPECT_FALSE(Fails(0));
  EXPECT_TRUE(Fails(1));
  EXPECT_TRUE(Fails(2));
}

}  // namespace
}  // namespace ddp
