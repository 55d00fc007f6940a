#include "launchers/slurm/stage.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "gtest/gtest.h"

namespace ddp::launchers::slurm {
namespace {

namespace fs = std::filesystem;

// A build as Bazel leaves it: the program, and a tree of links beside it.
class StageTest : public testing::Test {
 protected:
  void SetUp() override {
    root_ = absl::StrCat(testing::TempDir(), "/",
                         testing::UnitTest::GetInstance()->current_test_info()->name());
    ASSERT_TRUE(RemoveTree(root_).ok());
    Write("bin/tools/train", "the program", 0777);
    Write("out/libx.so", "a library");
    Write("out/data.gz", "some data");
    Write("out/folder/inner", "in a linked folder");
    Write("bin/tools/train.runfiles/MANIFEST", "ws/tools/train /somewhere/train");
    Link("bin/tools/train", "bin/tools/train.runfiles/ws/tools/train");
    Link("out/libx.so", "bin/tools/train.runfiles/ws/_solib/libx.so");
    Link("out/data.gz", "bin/tools/train.runfiles/data/data.gz");
    Link("out/folder", "bin/tools/train.runfiles/ws/folder");
    program_ = absl::StrCat(root_, "/bin/tools/train");
    builds_ = absl::StrCat(root_, "/stage/builds");
  }

  // The file's time is long ago, so that a hash can be remembered at once.
  void Write(const std::string& name, const std::string& text, mode_t mode = 0666,
             int64_t seconds = 1'000'000) {
    const std::string path = absl::StrCat(root_, "/", name);
    ASSERT_TRUE(MakeDirectories(DirectoryOf(path)).ok());
    ASSERT_TRUE(RemoveTree(path).ok());
    absl::StatusOr<FileWriter> writer = FileWriter::Create(path, FileSystem::Default(), mode);
    ASSERT_TRUE(writer.ok()) << writer.status();
    ASSERT_TRUE(writer->Append(text).ok());
    ASSERT_TRUE(writer->Finish().ok());
    const timespec times[] = {{seconds, 7}, {seconds, 7}};
    ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
  }

  void Link(const std::string& target, const std::string& name) {
    const std::string path = absl::StrCat(root_, "/", name);
    ASSERT_TRUE(MakeDirectories(DirectoryOf(path)).ok());
    fs::create_symlink(absl::StrCat(root_, "/", target), path);
  }

  std::string Stage(const std::string& program) {
    const absl::StatusOr<StagedProgram> staged = StageProgram(program, builds_);
    return staged.ok() ? staged->path : staged.status().ToString();
  }
  std::string Stage() { return Stage(program_); }

  std::vector<std::string> Builds() {
    std::vector<std::string> names = ListDirectory(builds_).value_or(std::vector<std::string>());
    std::erase(names, "known");
    return names;
  }

  std::string root_, program_, builds_;
};

TEST_F(StageTest, CopiesTheTreeWithItsLayout) {
  const absl::StatusOr<StagedProgram> staged = StageProgram(program_, builds_);
  ASSERT_TRUE(staged.ok()) << staged.status();
  const std::string tree = absl::StrCat(builds_, "/", staged->hash, "/train.runfiles");
  EXPECT_EQ(staged->path, absl::StrCat(tree, "/ws/tools/train"));
  fs::remove_all(absl::StrCat(root_, "/bin"));
  fs::remove_all(absl::StrCat(root_, "/out"));
  EXPECT_EQ(*ReadFile(staged->path), "the program");
  EXPECT_EQ(*ReadFile(absl::StrCat(tree, "/ws/_solib/libx.so")), "a library");
  EXPECT_EQ(*ReadFile(absl::StrCat(tree, "/data/data.gz")), "some data");
  EXPECT_EQ(*ReadFile(absl::StrCat(tree, "/ws/folder/inner")), "in a linked folder");
  EXPECT_FALSE(fs::exists(absl::StrCat(tree, "/MANIFEST")));
  struct stat info;
  ASSERT_EQ(lstat(staged->path.c_str(), &info), 0);
  EXPECT_TRUE(S_ISREG(info.st_mode) && (info.st_mode & S_IXUSR));
  EXPECT_EQ(Builds(), std::vector<std::string>({staged->hash}));
}

TEST_F(StageTest, ProgramWithoutRunfilesIsCopied) {
  Write("alone", "no runfiles", 0777);
  const std::string path = Stage(absl::StrCat(root_, "/alone"));
  EXPECT_EQ(fs::path(path).filename(), "alone");
  EXPECT_EQ(*ReadFile(path), "no runfiles");
}

TEST_F(StageTest, ProgramOutsideItsTreeIsCopiedBesideIt) {
  fs::remove(absl::StrCat(program_, ".runfiles/ws/tools/train"));
  const std::string path = Stage();
  EXPECT_EQ(*ReadFile(path), "the program");
  EXPECT_EQ(*ReadFile(absl::StrCat(path, ".runfiles/data/data.gz")), "some data");
}

TEST_F(StageTest, StagedProgramCanBeStaged) {
  const std::string first = Stage();
  EXPECT_EQ(Stage(first), first);
}

TEST_F(StageTest, RebuildGetsAnotherFolderAndLeavesTheFirst) {
  const std::string first = Stage();
  Write("bin/tools/train", "the PROGRAM", 0777, 1'000'001);  // same size
  const std::string second = Stage();
  EXPECT_NE(first, second);
  EXPECT_EQ(*ReadFile(first), "the program");
  EXPECT_EQ(*ReadFile(second), "the PROGRAM");
  Write("out/libx.so", "a Library", 0666, 1'000'001);
  EXPECT_NE(Stage(), second);
  EXPECT_EQ(Builds().size(), 3u);
  Write("out/libx.so", "a library", 0666, 2'000'000);
  EXPECT_EQ(Stage(), second);  // contents count, not times
}

TEST_F(StageTest, UnchangedBuildIsNotReadAgain) {
  const std::string path = Stage();
  // Only a read would find this change: other contents with the same size, time and inode.
  const std::string library = absl::StrCat(root_, "/out/libx.so");
  struct stat before;
  ASSERT_EQ(stat(library.c_str(), &before), 0);
  FILE* file = fopen(library.c_str(), "r+");
  fputs("A", file);
  fclose(file);
  const timespec times[] = {before.st_atim, before.st_mtim};
  ASSERT_EQ(utimensat(AT_FDCWD, library.c_str(), times, 0), 0);
  EXPECT_EQ(Stage(), path);
  EXPECT_EQ(FindStaged(program_, builds_)->path, path);
  // What is there counts, not what is remembered.
  ASSERT_TRUE(RemoveTree(fs::path(builds_) / Builds()[0]).ok());
  EXPECT_NE(Stage(), path);
}

TEST_F(StageTest, FilesOfThisMomentAreReadAgain) {
  const auto now = static_cast<int64_t>(time(nullptr));
  Write("out/data.gz", "old data!", 0666, now);
  const std::string first = Stage();
  EXPECT_FALSE(fs::exists(absl::StrCat(builds_, "/known")));
  const int fd = open(absl::StrCat(root_, "/out/data.gz").c_str(), O_WRONLY);
  ASSERT_EQ(write(fd, "new", 3), 3);
  close(fd);
  const timespec times[] = {{now, 7}, {now, 7}};
  utimensat(AT_FDCWD, absl::StrCat(root_, "/out/data.gz").c_str(), times, 0);
  EXPECT_NE(Stage(), first);
}

TEST_F(StageTest, FindWritesNothing) {
  const absl::StatusOr<StagedProgram> found = FindStaged(program_, builds_);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_FALSE(fs::exists(absl::StrCat(root_, "/stage")));
  EXPECT_EQ(Stage(), found->path);
}

TEST_F(StageTest, SeveralAtOnceMakeOneBuild) {
  std::vector<std::string> paths(8);
  std::vector<std::thread> threads;
  for (std::string& path : paths) threads.emplace_back([&] { path = Stage(); });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& path : paths) EXPECT_EQ(path, paths[0]);
  EXPECT_EQ(*ReadFile(paths[0]), "the program");
  EXPECT_EQ(Builds().size(), 1u);
}

TEST_F(StageTest, RemaindersOfKilledProcessesGo) {
  Write("stage/builds/.0f.tmp-0123456789abcdef", "old");
  Write("stage/builds/.0f.tmp-0123456789abcdee", "young", 0666, time(nullptr));
  Stage();
  EXPECT_FALSE(fs::exists(absl::StrCat(builds_, "/.0f.tmp-0123456789abcdef")));
  EXPECT_TRUE(fs::exists(absl::StrCat(builds_, "/.0f.tmp-0123456789abcdee")));
}

TEST_F(StageTest, DanglingLinkIsAnErrorThatNamesIt) {
  fs::remove(absl::StrCat(root_, "/out/libx.so"));
  const absl::Status status = StageProgram(program_, builds_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(absl::StrContains(status.message(), "_solib/libx.so")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "build the program again")) << status;
  EXPECT_TRUE(Builds().empty());
}

TEST_F(StageTest, FileInPlaceOfTheFolderIsAnError) {
  Write("stage", "a file");
  const absl::Status status = StageProgram(program_, builds_).status();
  EXPECT_TRUE(absl::StrContains(status.message(), "Not a directory")) << status;
}

}  // namespace
}  // namespace ddp::launchers::slurm
