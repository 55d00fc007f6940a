#include "backends/shm/engine/peer_memory.h"

#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "backends/common/child_process.h"
#include "gtest/gtest.h"

namespace ddp::backends::shm {
namespace {

template <typename T>
Buffer ToBuffer(T& value) {
  return {reinterpret_cast<std::byte*>(&value), sizeof(value)};
}

uint64_t Address(const void* data) { return reinterpret_cast<uint64_t>(data); }

TEST(PeerMemoryTest, ReadsAndWritesAnotherProcess) {
  PeerMemory memory;
  int number = 1;
  // Both have the same addresses in the child.
  ChildProcess child([&](Messages& channel) {
    number = 2;
    channel.Send("ready");
    channel.Receive();
    return std::to_string(number);
  });
  ASSERT_EQ(child.channel().Receive(), "ready");
  PeerMemory::Identity identity = memory.Self();
  identity.pid = child.pid();
  ASSERT_TRUE(memory.Attach(1, identity));

  int read = 0;
  EXPECT_EQ(memory.Read(1, Address(&number), ToBuffer(read)), absl::OkStatus());
  EXPECT_EQ(read, 2);
  int written = 3;
  EXPECT_EQ(memory.Write(1, Address(&number), ToBuffer(written)), absl::OkStatus());
  child.channel().Send("go on");
  EXPECT_EQ(child.Result(), "3");
  EXPECT_EQ(number, 1);
}

TEST(PeerMemoryTest, AnotherProcessThanMeantIsNotTrusted) {
  PeerMemory memory;
  PeerMemory::Identity identity = memory.Self();
  ++identity.proof;
  EXPECT_FALSE(memory.Attach(1, identity));
  identity = memory.Self();
  identity.proof_address = 0;
  EXPECT_FALSE(memory.Attach(1, identity));
}

TEST(PeerMemoryTest, TheDeadAreNamed) {
  PeerMemory memory;
  PeerMemory::Identity identity = memory.Self();
  {
    ChildProcess child([](Messages& channel) { return channel.Receive(); });
    identity.pid = child.pid();
    ASSERT_TRUE(memory.Attach(3, identity));
  }
  int read = 0;
  const absl::Status status = memory.Read(3, Address(&read), ToBuffer(read));
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_NE(status.message().find("rank 3 (pid "), std::string::npos) << status;
  EXPECT_NE(status.message().find("has died"), std::string::npos) << status;
}

TEST(PeerMemoryTest, MemoryOfADeviceIsNotExposed) {
  PeerMemory memory;
  std::vector<std::byte> mine(100'000);
  EXPECT_TRUE(memory.IsReadableByPeers({mine.data(), mine.size()}));
  EXPECT_TRUE(memory.IsReadableByPeers({mine.data(), mine.size()}));
  EXPECT_TRUE(memory.IsReadableByPeers({}));
  // The kernel's clock: mapped like a device's memory, and readable.
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    uint64_t begin, end;
    if (line.find("[vvar]") == std::string::npos) continue;
    ASSERT_EQ(std::sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64, &begin, &end), 2);
    EXPECT_FALSE(memory.IsReadableByPeers({reinterpret_cast<std::byte*>(begin), 100}));
    return;
  }
  GTEST_SKIP() << "no [vvar] here";
}

TEST(PeerMemoryTest, MemoryThatIsNotThereIsAnError) {
  PeerMemory memory;
  ASSERT_TRUE(memory.Attach(0, memory.Self()));
  int read = 0;
  EXPECT_TRUE(absl::IsInternal(memory.Read(0, 64, ToBuffer(read))));
  EXPECT_EQ(memory.Read(0, 64, Buffer{}), absl::OkStatus());
}

}  // namespace
}  // namespace ddp::backends::shm
