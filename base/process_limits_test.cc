#include "base/process_limits.h"

#include <sys/resource.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <ios>
#include <string>
#include <system_error>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/threads_testing.h"
#include "gtest/gtest.h"

namespace ddp {
namespace {

TEST(ProcessLimitsTest, NamesEachLimitThatApplies) {
  const std::string root = absl::StrCat(testing::TempDir(), "/machine");
  const auto set = [&](const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root + path).parent_path());
    std::ofstream(root + path) << text;
  };
  set("/proc/self/cgroup", "0::/pod/container\n");
  set("/proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  set("/proc/sys/kernel/threads-max", "4711\n");
  set("/sys/fs/cgroup/pod/container/pids.max", "max\n");
  set("/sys/fs/cgroup/pod/pids.max", "64\n");
  set("/sys/fs/cgroup/pod/pids.current", "63\n");
  rlimit limit = {};
  ASSERT_EQ(getrlimit(RLIMIT_NPROC, &limit), 0);
  limit.rlim_cur = 12345;
  if (limit.rlim_max < limit.rlim_cur) GTEST_SKIP() << "the hard limit is below that of this test";
  ASSERT_EQ(setrlimit(RLIMIT_NPROC, &limit), 0);
  const absl::Status status = NoMoreThreads("threads", root);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  for (const char* words :
       {"no more threads", "12345 processes and threads of this user",
        "64 in this container or job, with 63 in use (/sys/fs/cgroup/pod/pids.max)",
        "4711 on the machine"}) {
    EXPECT_TRUE(absl::StrContains(status.message(), words)) << words << "\n" << status;
  }
}

TEST(ProcessLimitsTest, ATrialStartsThemAll) {
  EXPECT_TRUE(TryThreads(0).ok());
  EXPECT_TRUE(TryThreads(20).ok());
  const NoThreads none;
  EXPECT_EQ(TryThreads(2).code(), absl::StatusCode::kResourceExhausted);
}

TEST(ProcessLimitsTest, AnExceptionOfAThreadIsExplained) {
  const NoThreads none;
  const absl::Status status =
      ExplainThreadLimits(CatchStatus("watching it", [] { std::thread([] {}).join(); }));
  EXPECT_TRUE(
      absl::StartsWith(status.message(),
                       "watching it: Resource temporarily unavailable: the system lets this "
                       "process start no more threads; limits: "))
      << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "lower OMP_NUM_THREADS")) << status;
  EXPECT_EQ(ExplainThreadLimits(status), status) << "it is explained once";
  // What the error is counts, and not its words, nor what stands around them.
  const absl::Status within =
      Annotate(CatchStatus("the loader", [] { std::thread([] {}).join(); }), "epoch 3");
  EXPECT_TRUE(absl::StrContains(ExplainThreadLimits(within).message(), "; limits: ")) << within;
  const auto thrown = [](int number, const std::error_category& category) {
    return CatchStatus("", [&] { throw std::system_error(number, category, "no luck"); });
  };
  EXPECT_NE(ExplainThreadLimits(thrown(EAGAIN, std::system_category())),
            thrown(EAGAIN, std::system_category()));
  for (const absl::Status& other :
       {absl::NotFoundError("x"), absl::InternalError("reading: Resource temporarily unavailable"),
        thrown(ENOMEM, std::generic_category()), thrown(EAGAIN, std::iostream_category())}) {
    EXPECT_EQ(ExplainThreadLimits(other), other);
  }
  EXPECT_TRUE(ExplainThreadLimits(absl::OkStatus()).ok());
}

TEST(ProcessLimitsTest, FilesAreReservedAsFarAsTheHardLimitGoes) {
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const auto soft_limit = [] {
    rlimit limit = {};
    getrlimit(RLIMIT_NOFILE, &limit);
    return limit.rlim_cur;
  };
  const rlimit low = {.rlim_cur = 40, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  EXPECT_TRUE(ReserveFiles(1, "as rank 0 of 2").ok());
  EXPECT_EQ(soft_limit(), 40U) << "there was room";
  EXPECT_TRUE(ReserveFiles(100, "as rank 0 of 2").ok());
  EXPECT_GE(soft_limit(), 100U);
  EXPECT_LT(soft_limit(), 140U);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  // More than any hard limit: 2^30, of fs.nr_open.
  const absl::Status none = ReserveFiles(2'000'000'000, "as rank 0 of 2");
  EXPECT_EQ(none.code(), absl::StatusCode::kResourceExhausted);
  for (const char* words : {"may have 40 files", "`ulimit -n`", " as rank 0 of 2, with "}) {
    EXPECT_TRUE(absl::StrContains(none.message(), words)) << words << "\n" << none;
  }
  EXPECT_EQ(soft_limit(), 40U);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

}  // namespace
}  // namespace ddp
