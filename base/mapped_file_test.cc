#include "base/mapped_file.h"

#include <cstdlib>
#include <fstream>
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

TEST(MappedFileTest, ErrorsNameThePath) {
  const auto missing = MappedFile::Open("/nowhere/file");
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_NE(missing.status().message().find("/nowhere/file"), std::string::npos);
  const auto folder = MappedFile::Open(testing::TempDir());
  EXPECT_EQ(folder.status().code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace ddp
