#include "base/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/file_faults.h"
#include "base/populate_pages.h"

namespace {

int fsyncs = 0;

}  // namespace

// In the place of the C library's.
extern "C" int fsync(int fd) {
  ++fsyncs;
  return static_cast<int>(::syscall(SYS_fsync, fd));
}

namespace ddp {
namespace {

// A fresh folder for each test.
class FileTest : public testing::Test {
 protected:
  FileTest() {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    directory_ = absl::StrCat(testing::TempDir(), "/file_test_", info->name());
    std::filesystem::remove_all(directory_);
    std::filesystem::create_directories(directory_);
  }
  std::string Path(absl::string_view name) const { return absl::StrCat(directory_, "/", name); }
  std::vector<std::string> Names() const { return ListDirectory(directory_).value(); }

  std::string directory_;
};

TEST_F(FileTest, WritesAndReadsBack) {
  const std::string contents("a\0b\n", 4);
  ASSERT_TRUE(WriteFileAtomically(Path("f"), contents).ok());
  EXPECT_EQ(ReadFile(Path("f")).value(), contents);
  EXPECT_EQ(Names(), std::vector<std::string>{"f"});
}

TEST_F(FileTest, EachFaultLeavesTheOldFileAndNoTemporary) {
  FaultyFileSystem counted;
  ASSERT_TRUE(WriteFileAtomically(Path("f"), "old", &counted).ok());
  const std::vector<std::string> expected = {"open",   "write", "fsync", "close",
                                             "rename", "open",  "fsync", "close"};
  ASSERT_EQ(counted.calls(), expected);
  for (size_t nth = 1; nth <= 5; ++nth) {
    FaultyFileSystem files({.nth = static_cast<int64_t>(nth), .error = EIO});
    const absl::Status status = WriteFileAtomically(Path("f"), "new", &files);
    EXPECT_FALSE(status.ok()) << expected[nth - 1];
    EXPECT_NE(status.message().find(Path("")), absl::string_view::npos) << status;
    EXPECT_EQ(ReadFile(Path("f")).value(), "old") << expected[nth - 1];
    EXPECT_EQ(Names(), std::vector<std::string>{"f"}) << expected[nth - 1];
  }
}

// The other tests replace or record the calls of FileSystem, and would not miss the system's.
TEST_F(FileTest, TheSystemIsAskedToSync) {
  const int before = fsyncs;
  ASSERT_TRUE(WriteFileAtomically(Path("f"), "new").ok());
  EXPECT_EQ(fsyncs, before + 2);  // the file, then its folder
}

TEST_F(FileTest, AFailedFolderSyncIsReportedAndTheNewFileIsWhole) {
  ASSERT_TRUE(WriteFileAtomically(Path("f"), "old").ok());
  FaultyFileSystem files({.call = "fsync", .nth = 2, .error = EIO});
  EXPECT_FALSE(WriteFileAtomically(Path("f"), "new", &files).ok());
  EXPECT_EQ(ReadFile(Path("f")).value(), "new");
}

TEST_F(FileTest, GoesOnAfterShortWritesAndInterrupts) {
  FaultyFileSystem files({.call = "write", .nth = 2, .error = EINTR});
  files.set_max_write(3);
  ASSERT_TRUE(WriteFileAtomically(Path("f"), "0123456789", &files).ok());
  EXPECT_EQ(ReadFile(Path("f")).value(), "0123456789");
}

TEST_F(FileTest, KilledAtAnyCallLeavesOldOrNew) {
  ASSERT_TRUE(WriteFileAtomically(Path("f"), "old").ok());
  for (int nth = 1; nth <= 8; ++nth) {
    const pid_t child = fork();
    if (child == 0) {
      FaultyFileSystem files({.nth = nth});
      WriteFileAtomically(Path("f"), "new", &files).IgnoreError();
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "call " << nth;
    EXPECT_EQ(ReadFile(Path("f")).value(), nth <= 5 ? "old" : "new") << "call " << nth;
    for (const std::string& name : Names()) {
      EXPECT_TRUE(name == "f" || IsTemporaryName(name)) << name;
    }
  }
}

// A real full disk, as the kernel reports it.
class FullDisk : public FileSystem {
  int Open(const char*, int, mode_t) override { return ::open("/dev/full", O_WRONLY | O_CLOEXEC); }
};

TEST_F(FileTest, NamesAFullDisk) {
  FullDisk files;
  const absl::Status status = WriteFileAtomically(Path("f"), "new", &files);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_NE(status.message().find(absl::StrCat("disk full writing ", Path(""))),
            absl::string_view::npos)
      << status;
}

TEST_F(FileTest, CodesAndPathsOfErrors) {
  const absl::Status missing = ReadFile(Path("none")).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_NE(missing.message().find(Path("none")), absl::string_view::npos) << missing;
  EXPECT_EQ(FileError(EACCES, "opening", "x").code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(FileError(EDQUOT, "writing", "x").code(), absl::StatusCode::kResourceExhausted);
  ASSERT_TRUE(WriteFileAtomically(Path("f"), "1").ok());
  EXPECT_EQ(FileWriter::Create(Path("f")).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(FileReader::Open(directory_).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(FileTest, MakesFoldersOnceOrTwice) {
  EXPECT_TRUE(MakeDirectories(Path("a/b/c")).ok());
  EXPECT_TRUE(MakeDirectories(Path("a/b/c/")).ok());
  EXPECT_TRUE(ProveWritable(Path("a/b/c")).ok());
  EXPECT_TRUE(ListDirectory(Path("a/b/c")).value().empty());
  ASSERT_TRUE(WriteFileAtomically(Path("f"), "1").ok());
  const absl::Status below_a_file = MakeDirectories(Path("f/g"));
  EXPECT_FALSE(below_a_file.ok());
  EXPECT_NE(below_a_file.message().find(Path("f")), absl::string_view::npos) << below_a_file;
  EXPECT_FALSE(ProveWritable(Path("f")).ok());
}

// Another process removes temporary files just before this one does.
class Cleaned : public FileSystem {
 public:
  int Unlink(const char* path) override {
    FileSystem::Unlink(path);
    return FileSystem::Unlink(path);
  }
};

TEST_F(FileTest, AFolderIsWritableWhereAnotherProcessCleansUp) {
  Cleaned files;
  EXPECT_TRUE(ProveWritable(directory_, &files).ok());
  EXPECT_TRUE(ListDirectory(directory_).value().empty());
}

TEST(PopulatePagesTest, GivesPagesAndKeepsBytes) {
  constexpr size_t kPage = 4096, kPages = 512;
  void* const memory =
      ::mmap(nullptr, kPages * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  char* const bytes = static_cast<char*>(memory);
  bytes[3 * kPage] = 'x';
  PopulatePages(bytes + 1, kPages * kPage - 1 - kPage);  // pages 1 to 510 lie within
  std::vector<unsigned char> has(kPages);
  ASSERT_EQ(::mincore(memory, kPages * kPage, has.data()), 0);
  EXPECT_EQ(has[kPages - 1] & 1, 0);
  EXPECT_EQ(bytes[3 * kPage], 'x');
  if (::madvise(memory, kPage, 23) != 0) GTEST_SKIP() << "Linux before 5.14";
  EXPECT_EQ(std::count_if(has.begin(), has.end(), [](unsigned char page) { return page & 1; }),
            kPages - 2);
  ::munmap(memory, kPages * kPage);
}

TEST_F(FileTest, ReadsAtAnyPlaceAndNotBeyondTheEnd) {
  ASSERT_TRUE(WriteFileAtomically(Path("f"), "0123456789").ok());
  FileReader reader = FileReader::Open(Path("f")).value();
  EXPECT_EQ(reader.size(), 10u);
  char two[2];
  ASSERT_TRUE(reader.ReadAt(8, two, 2).ok());
  EXPECT_EQ(absl::string_view(two, 2), "89");
  EXPECT_EQ(reader.ReadAt(9, two, 2).code(), absl::StatusCode::kOutOfRange);
}

TEST_F(FileTest, RemovesFilesAndFolders) {
  ASSERT_TRUE(MakeDirectories(Path("a/b")).ok());
  ASSERT_TRUE(WriteFileAtomically(Path("a/b/f"), "1").ok());
  EXPECT_TRUE(RemoveTree(Path("a")).ok());
  EXPECT_TRUE(RemoveTree(Path("a")).ok());
  EXPECT_TRUE(Names().empty());
}

TEST_F(FileTest, TemporaryNamesAreHiddenUniqueAndRecognised) {
  const std::string one = TemporaryName("/x/epoch_3.pt");
  EXPECT_EQ(DirectoryOf(one), "/x");
  EXPECT_NE(one, TemporaryName("/x/epoch_3.pt"));
  EXPECT_TRUE(IsTemporaryName(one.substr(3)));
  for (absl::string_view name :
       {"epoch_3.pt", ".epoch_3.pt", ".epoch_3.pt.tmp-12", "", "epoch_3.pt.tmp-0123456789abcdef",
        ".x.tmp-0123456789abcdeg", ".x.tmp-0123456789ABCDEF", ".tmp-0123456789abcdef"}) {
    EXPECT_FALSE(IsTemporaryName(name)) << name;
  }
}

TEST_F(FileTest, FoldersOfPaths) {
  EXPECT_EQ(DirectoryOf("/a/b"), "/a");
  EXPECT_EQ(DirectoryOf("/a"), "/");
  EXPECT_EQ(DirectoryOf("a"), ".");
}

TEST_F(FileTest, ListsInOrderAndReportsAMissingFolder) {
  std::vector<std::string> names;
  for (char name = 'a'; name <= 'z'; ++name) names.emplace_back(1, name);
  for (auto it = names.rbegin(); it != names.rend(); ++it) {
    ASSERT_TRUE(WriteFileAtomically(Path(*it), "").ok());
  }
  EXPECT_EQ(Names(), names);
  EXPECT_EQ(ListDirectory(Path("none")).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(FileTest, ANamedPipeIsRefusedWithoutWaitingForItsWriter) {
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  EXPECT_EQ(FileReader::Open(Path("pipe")).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(FileTest, AWriterThatIsDroppedClosesItsFile) {
  FaultyFileSystem files;
  { ASSERT_TRUE(FileWriter::Create(Path("f"), &files).ok()); }
  EXPECT_EQ(files.calls(), (std::vector<std::string>{"open", "close"}));
}

// A device that takes nothing and reports no error.
class Stuck : public FileSystem {
  ssize_t Write(int, const void*, size_t) override { return 0; }
};

TEST_F(FileTest, AWriteOfNothingIsAnErrorAndNoEndlessLoop) {
  Stuck files;
  EXPECT_FALSE(WriteFileAtomically(Path("f"), "new", &files).ok());
}

TEST_F(FileTest, LocksAreSharedOrAlone) {
  {
    auto one = DirectoryLock::Shared(directory_);
    auto two = DirectoryLock::Shared(directory_);
    ASSERT_TRUE(one.ok() && two.ok());
    EXPECT_EQ(DirectoryLock::TryExclusive(directory_).status().code(),
              absl::StatusCode::kUnavailable);
  }
  EXPECT_TRUE(DirectoryLock::TryExclusive(directory_).ok());
}

}  // namespace
}  // namespace ddp
