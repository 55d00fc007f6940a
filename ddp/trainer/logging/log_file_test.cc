#include "ddp/trainer/logging/log_file.h"

#include <fcntl.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "base/file.h"
#include "gtest/gtest.h"

namespace ddp::trainer::logging {
namespace {

std::string FreshPath() {
  const std::string folder =
      testing::TempDir() + "/" + testing::UnitTest::GetInstance()->current_test_info()->name();
  std::filesystem::remove_all(folder);
  return folder + "/sub/log";
}

LogFile Open(const std::string& path) {
  auto file = LogFile::Open(path);
  EXPECT_TRUE(file.ok()) << file.status();
  return *std::move(file);
}

TEST(LogFileTest, MakesFoldersAndWritesOnFlush) {
  const std::string path = FreshPath();
  LogFile file = Open(path);
  file.Append("one\n");
  file.Append("two\n");
  EXPECT_EQ(*ReadFile(path), "");
  EXPECT_EQ(file.pending(), 8);
  ASSERT_TRUE(file.Flush().ok());
  EXPECT_EQ(*ReadFile(path), "one\ntwo\n");
  EXPECT_EQ(file.pending(), 0);
}

TEST(LogFileTest, DestructorFlushesOnceEvenAfterAMove) {
  const std::string path = FreshPath();
  {
    LogFile file = Open(path);
    file.Append("one\n");
    LogFile moved = std::move(file);
    moved.Append("two\n");
  }
  EXPECT_EQ(*ReadFile(path), "one\ntwo\n");
}

TEST(LogFileTest, OpenContinuesCreateRefuses) {
  const std::string path = FreshPath();
  { Open(path).Append("one\n"); }
  { Open(path).Append("two\n"); }
  EXPECT_EQ(*ReadFile(path), "one\ntwo\n");
  EXPECT_EQ(LogFile::Create(path).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(LogFile::Create(path + "2").ok());
}

TEST(LogFileTest, TornLinesAreDropped) {
  const std::string long_line(10'000, 'x');
  for (const std::string& whole : {std::string(), std::string("a\n"), long_line + "\n"}) {
    for (const std::string& torn : {std::string(), std::string("b"), long_line}) {
      const std::string path = FreshPath();
      LogFile file = Open(path);
      file.Append(whole + torn);
      ASSERT_TRUE(file.Flush().ok());
      ASSERT_TRUE(file.DropTornLine().ok());
      file.Append("next\n");
      ASSERT_TRUE(file.Flush().ok());
      EXPECT_EQ(*ReadFile(path), whole + "next\n");
    }
  }
}

TEST(LogFileTest, ErrorsNameThePath) {
  const std::string path = FreshPath();
  std::filesystem::create_directories(path);  // a folder is in the way
  EXPECT_NE(LogFile::Open(path).status().message().find(path), absl::string_view::npos);
  const absl::Status full = [] {
    LogFile device = Open("/dev/full");
    device.Append("x");
    return device.Flush();
  }();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(full.message().find("/dev/full"), absl::string_view::npos) << full;
}

// A limit on the file's size simulates a disk that is temporarily full.
TEST(LogFileTest, WhatDidNotFitIsWrittenLaterAndOnlyOnce) {
  const std::string path = FreshPath();
  signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  LogFile file = Open(path);
  file.Append("0123456789");
  rlimit small = before;
  small.rlim_cur = 4;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status failed = file.Flush();
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_FALSE(failed.ok());
  EXPECT_EQ(*ReadFile(path), "0123");
  EXPECT_EQ(file.pending(), 6);
  ASSERT_TRUE(file.Flush().ok());
  EXPECT_EQ(*ReadFile(path), "0123456789");
}

}  // namespace
}  // namespace ddp::trainer::logging
