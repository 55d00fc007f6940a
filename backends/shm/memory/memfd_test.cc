#include "backends/shm/memory/memfd.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <utility>

#include "absl/log/absl_check.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "backends/common/child_process.h"
#include "backends/common/deny_syscall.h"
#include "backends/shm/memory/memory_limit.h"
#include "gtest/gtest.h"

namespace ddp::backends::shm {
namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kGiB = size_t{1} << 30;

SharedMemory MustCreate(size_t bytes) {
  absl::StatusOr<SharedMemory> memory = SharedMemory::Create(bytes);
  EXPECT_TRUE(memory.ok()) << memory.status();
  return memory.ok() ? *std::move(memory) : SharedMemory();
}

// Memory that the segment holds, whoever has mapped it, bytes.
size_t Held(const SharedMemory& memory) {
  struct stat status = {};
  EXPECT_EQ(::fstat(memory.fd(), &status), 0);
  return static_cast<size_t>(status.st_blocks) * 512;
}

bool IsOpen(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

void LimitTo(int resource, rlim_t value) {
  rlimit limit = {};
  ABSL_CHECK_EQ(::getrlimit(static_cast<__rlimit_resource_t>(resource), &limit), 0);
  limit.rlim_cur = value;
  ABSL_CHECK_EQ(::setrlimit(static_cast<__rlimit_resource_t>(resource), &limit), 0);
}

// What Create says in a process that has run `prepare`.
std::string CreateInChild(const std::function<void()>& prepare, size_t bytes) {
  return ChildProcess([&] {
           prepare();
           return SharedMemory::Create(bytes).status().ToString();
         })
      .Result();
}

TEST(SharedMemoryTest, LargeAndSparse) {
  SharedMemory memory = MustCreate(16 * kGiB);
  ASSERT_EQ(memory.size(), 16 * kGiB);
  EXPECT_EQ(Held(memory), 0u);
  EXPECT_EQ(memory.data()[16 * kGiB - 1], std::byte{0});
  memory.data()[16 * kGiB - 1] = std::byte{7};
  EXPECT_LE(Held(memory), 2 * kMiB);  // a page, be it a huge one
}

TEST(SharedMemoryTest, WholePages) {
  const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  EXPECT_EQ(MustCreate(1).size(), page);
  EXPECT_EQ(MustCreate(page).size(), page);
  EXPECT_EQ(MustCreate(page + 1).size(), 2 * page);
  EXPECT_TRUE(absl::IsInvalidArgument(SharedMemory::Create(0).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(SharedMemory::Create(SIZE_MAX).status()));
}

TEST(SharedMemoryTest, MovesAndCloses) {
  SharedMemory memory = MustCreate(kMiB);
  const int fd = memory.fd();
  std::byte* const data = memory.data();
  SharedMemory moved = std::move(memory);
  EXPECT_EQ(moved.fd(), fd);
  EXPECT_EQ(moved.data(), data);
  EXPECT_EQ(memory.data(), nullptr);  // NOLINT: what a move leaves is documented
  EXPECT_EQ(memory.size(), 0u);
  SharedMemory other = MustCreate(kMiB);
  const int other_fd = other.fd();
  other = std::move(moved);
  EXPECT_FALSE(IsOpen(other_fd));
  EXPECT_EQ(other.fd(), fd);
  other = SharedMemory();
  EXPECT_FALSE(IsOpen(fd));
  EXPECT_NE(::msync(data, 1, MS_ASYNC), 0);  // not mapped any more
}

TEST(SharedMemoryTest, AnotherProcessSharesIt) {
  SharedMemory memory = MustCreate(kMiB);
  const std::string path = absl::StrCat("/proc/", ::getpid(), "/fd/", memory.fd());
  ChildProcess child([&](Messages& channel) {
    absl::StatusOr<SharedMemory> same = SharedMemory::Map(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (!same.ok()) return same.status().ToString();
    std::memcpy(same->data(), "from the child", 15);
    channel.Send("written");
    channel.Receive();
    return std::string(reinterpret_cast<const char*>(same->data()));
  });
  ASSERT_EQ(child.channel().Receive(), "written");
  EXPECT_STREQ(reinterpret_cast<const char*>(memory.data()), "from the child");
  std::memcpy(memory.data(), "from the parent", 16);
  child.channel().Send("go on");
  EXPECT_EQ(child.Result(), "from the parent");
}

TEST(SharedMemoryTest, NobodyCanResizeOrUnseal) {
  SharedMemory memory = MustCreate(kMiB);
  EXPECT_NE(::ftruncate(memory.fd(), 4096), 0);
  EXPECT_EQ(errno, EPERM);
  EXPECT_NE(::ftruncate(memory.fd(), 2 * kMiB), 0);
  EXPECT_NE(::fallocate(memory.fd(), 0, 0, 2 * kMiB), 0);
  EXPECT_NE(::fcntl(memory.fd(), F_ADD_SEALS, F_SEAL_WRITE), 0);
  EXPECT_EQ(::fcntl(memory.fd(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
}

TEST(SharedMemoryTest, MapRefusesWhatCouldShrink) {
  EXPECT_TRUE(absl::IsInvalidArgument(SharedMemory::Map(-1).status()));
  const int unsealed = ::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ASSERT_EQ(::ftruncate(unsealed, 4096), 0);
  const absl::Status status = SharedMemory::Map(unsealed).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_FALSE(IsOpen(unsealed));
  const int empty = ::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ASSERT_EQ(::fcntl(empty, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
  EXPECT_TRUE(absl::IsInvalidArgument(SharedMemory::Map(empty).status()));
  const std::string path = absl::StrCat(::testing::TempDir(), "/file");
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  ASSERT_EQ(::ftruncate(file, 4096), 0);
  EXPECT_TRUE(absl::IsInvalidArgument(SharedMemory::Map(file).status()));
  EXPECT_FALSE(IsOpen(file));
}

TEST(SharedMemoryTest, ReserveTakesMemoryAndKeepsContents) {
  SharedMemory memory = MustCreate(kGiB);
  std::memset(memory.data() + 5 * kMiB, 9, 100);
  ASSERT_TRUE(memory.Reserve(4 * kMiB + 17, 80 * kMiB).ok());
  EXPECT_GE(Held(memory), 80 * kMiB);
  EXPECT_LE(Held(memory), 84 * kMiB);
  EXPECT_EQ(memory.data()[5 * kMiB + 99], std::byte{9});
  EXPECT_EQ(memory.data()[5 * kMiB + 100], std::byte{0});
  const size_t before = Held(memory);
  ASSERT_TRUE(memory.Reserve(4 * kMiB + 17, 80 * kMiB).ok());
  EXPECT_EQ(Held(memory), before);
}

TEST(SharedMemoryTest, RangesOutsideAreRefused) {
  SharedMemory memory = MustCreate(kMiB);
  const std::pair<size_t, size_t> kOutside[] = {
      {0, kMiB + 1}, {kMiB, 1}, {kMiB + 1, 0}, {1, SIZE_MAX}, {SIZE_MAX, 2}};
  for (const auto& [offset, bytes] : kOutside) {
    EXPECT_TRUE(absl::IsOutOfRange(memory.Reserve(offset, bytes))) << offset << " " << bytes;
  }
  EXPECT_TRUE(memory.Reserve(kMiB, 0).ok());
  EXPECT_EQ(Held(memory), 0u);
}

TEST(SharedMemoryTest, ReserveMoreThanThereIs) {
  const MemoryHeadroom room = AvailableMemory();
  if (room.bytes > (size_t{1} << 44)) GTEST_SKIP() << "no limit is known here";
  SharedMemory memory = MustCreate(2 * room.bytes + kGiB);
  const absl::Status status = memory.Reserve(0, memory.size());
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_EQ(Held(memory), 0u);
  for (const std::string& part :
       {FormatBytes(memory.size()), std::string("--mem"), std::string("shm.segment_mb"),
        std::string("memory limit of the container"), std::string("available")}) {
    EXPECT_TRUE(absl::StrContains(status.message(), part)) << part << " in " << status;
  }
}

// A signal undoes a running fallocate as a whole: without ever smaller steps, a profiler's timer
// would keep it from ending.
TEST(SharedMemoryTest, ReserveEndsInSpiteOfSignals) {
  ChildProcess child([] {
    struct sigaction action = {};
    action.sa_handler = [](int) {};
    ::sigaction(SIGALRM, &action, nullptr);
    const itimerval every = {{0, 5000}, {0, 5000}};
    ::setitimer(ITIMER_REAL, &every, nullptr);
    absl::StatusOr<SharedMemory> memory = SharedMemory::Create(256 * kMiB);
    if (!memory.ok()) return memory.status().ToString();
    const absl::Status status = memory->Reserve(0, memory->size());
    if (!status.ok()) return status.ToString();
    return Held(*memory) == 256 * kMiB ? std::string("whole") : std::string("in part");
  });
  EXPECT_EQ(child.Result(), "whole");
}

TEST(SharedMemoryLimitsTest, FileSize) {
  const std::string result = CreateInChild([] { LimitTo(RLIMIT_FSIZE, kMiB); }, 2 * kMiB);
  EXPECT_TRUE(absl::StartsWith(result, "RESOURCE_EXHAUSTED")) << result;
  EXPECT_TRUE(
      absl::StrContains(result, "limited to 1.0 MiB: raise `ulimit -f`, or do without the arena"))
      << result;
  EXPECT_EQ(CreateInChild([] { LimitTo(RLIMIT_FSIZE, kMiB); }, kMiB), "OK");
}

TEST(SharedMemoryLimitsTest, AddressSpace) {
  const std::string result = CreateInChild([] { LimitTo(RLIMIT_AS, kGiB); }, 4 * kGiB);
  EXPECT_TRUE(absl::StartsWith(result, "RESOURCE_EXHAUSTED")) << result;
  EXPECT_TRUE(
      absl::StrContains(result, "limited to 1.0 GiB: raise `ulimit -v`, or do without the arena"))
      << result;
}

TEST(SharedMemoryLimitsTest, Descriptors) {
  const std::string result = CreateInChild([] { LimitTo(RLIMIT_NOFILE, 0); }, kMiB);
  EXPECT_TRUE(absl::StartsWith(result, "RESOURCE_EXHAUSTED")) << result;
  EXPECT_TRUE(absl::StrContains(result, "ulimit -n")) << result;
}

TEST(SharedMemoryLimitsTest, DeniedByTheContainer) {
  for (int call : {SYS_memfd_create, SYS_ftruncate}) {
    const std::string result = ChildProcess([call] {
                                 if (!DenySyscall(call, EPERM)) return std::string("no seccomp");
                                 return SharedMemory::Create(kMiB).status().ToString();
                               }).Result();
    if (result == "no seccomp") GTEST_SKIP() << "this kernel has no seccomp filters";
    EXPECT_TRUE(absl::StartsWith(result, "FAILED_PRECONDITION")) << result;
    EXPECT_TRUE(absl::StrContains(result, "seccomp")) << result;
  }
}

// What fallocate answers where the machine itself is full.
TEST(SharedMemoryLimitsTest, NothingLeftToReserve) {
  for (int error : {ENOSPC, ENOMEM}) {
    const std::string result = ChildProcess([error] {
                                 SharedMemory memory = MustCreate(kMiB);
                                 if (!DenySyscall(SYS_fallocate, error))
                                   return std::string("no seccomp");
                                 return memory.Reserve(0, kMiB).ToString();
                               }).Result();
    if (result == "no seccomp") GTEST_SKIP() << "this kernel has no seccomp filters";
    EXPECT_TRUE(absl::StartsWith(result, "RESOURCE_EXHAUSTED")) << result;
    EXPECT_TRUE(absl::StrContains(result, "cannot reserve 1.0 MiB")) << result;
    EXPECT_TRUE(absl::StrContains(result, "--mem")) << result;
  }
}

}  // namespace
}  // namespace ddp::backends::shm
