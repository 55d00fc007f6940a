#include "base/mapped_file.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>

#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace ddp {
namespace {

std::string Write(const std::string& name, const std::string& text) {
  const std::string path = testing::TempDir() + "/" + name;
  std::ofstream(path) << text;
  return path;
}

TEST(MappedFileTest, HasTheBytesOfTheFile) {
  const auto file = MappedFile::Open(Write("text", "abc"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(std::string((*file)->bytes().begin(), (*file)->bytes().end()), "abc");
  const auto empty = MappedFile::Open(Write("empty", ""));
  ASSERT_TRUE(empty.ok()) << empty.status();
  EXPECT_TRUE((*empty)->bytes().empty());
}

// A private copy would not see what another process writes.
TEST(MappedFileTest, IsTheKernelsCopy) {
  const std::string path = Write("shared", "before");
  const auto file = MappedFile::Open(path).value();
  EXPECT_EQ(file->bytes()[0], 'b');
  std::fstream(path, std::ios::in | std::ios::out) << "B";
  EXPECT_EQ(file->bytes()[0], 'B');
}

TEST(MappedFileTest, TooManyMappingsAreNoLackOfMemory) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer needs address space of its own";
#endif
  const std::string path = Write("large", "");
  std::filesystem::resize_file(path, 1 << 28);
  const auto open_in_little_space = [&] {
    const rlimit limit = {.rlim_cur = 1 << 20, .rlim_max = 1 << 20};
    if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(2);
    const auto file = MappedFile::Open(path);
    std::cerr << file.status().message() << std::endl;
    _exit(file.ok() ? 3 : 0);
  };
  EXPECT_EXIT(open_in_little_space(), testing::ExitedWithCode(0), "large: .*vm.max_map_count");
}

TEST(MappedFileTest, ErrorsNameThePath) {
  const auto missing = MappedFile::Open("/nowhere/file");
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_NE(missing.status().message().find("/nowhere/file"), std::string::npos);
  const auto folder = MappedFile::Open(testing::TempDir());
  EXPECT_EQ(folder.status().code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace ddp
