#include "backends/shm/memory/fd_passing.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/log/absl_check.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "backends/common/child_process.h"
#include "backends/shm/memory/memfd.h"
#include "base/file.h"
#include "base/unique_fd.h"
#include "gtest/gtest.h"

namespace ddp::backends::shm {

namespace {

constexpr size_t kMiB = size_t{1} << 20;

absl::Time In(absl::Duration duration) { return absl::Now() + duration; }
absl::Time Patiently() { return In(absl::Seconds(60)); }

FdServer MustListen() {
  absl::StatusOr<FdServer> server = FdServer::Listen();
  ABSL_CHECK(server.ok()) << server.status();
  return *std::move(server);
}

// Receives the segment and writes the index to its place in it.
std::string ReceiveAndWrite(const std::string& address, int index) {
  absl::StatusOr<int> fd = ReceiveFd(address, index, Patiently());
  if (!fd.ok()) return fd.status().ToString();
  if ((::fcntl(*fd, F_GETFD) & FD_CLOEXEC) == 0) return "stays open over exec";
  absl::StatusOr<SharedMemory> memory = SharedMemory::Map(*fd);
  if (!memory.ok()) return memory.status().ToString();
  memory->data()[index] = static_cast<std::byte>(100 + index);
  return "OK";
}

// A connection to a server, without a request.
UniqueFd RawConnect(const std::string& address) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  const std::string name = "ddp-shm-" + address;
  sockaddr_un to = {};
  to.sun_family = AF_UNIX;
  std::memcpy(to.sun_path + 1, name.data(), name.size());
  const socklen_t size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  ABSL_CHECK_EQ(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&to), size), 0);
  return socket;
}

// A request as ReceiveFd sends it.
void RawAsk(const UniqueFd& socket, int32_t index) {
  ::send(socket.get(), &index, sizeof(index), MSG_NOSIGNAL);
}

// Whether the kernel lists an abstract socket of this server.
bool IsListed(const std::string& address) {
  const absl::StatusOr<std::string> sockets = ReadFile("/proc/net/unix");
  return sockets.ok() && absl::StrContains(*sockets, address);
}

TEST(FdPassingTest, EveryClientSharesTheMemory) {
  for (int clients : {0, 1, 7}) {
    absl::StatusOr<SharedMemory> memory = SharedMemory::Create(kMiB);
    ASSERT_TRUE(memory.ok()) << memory.status();
    FdServer server = MustListen();
    const std::string address = server.address();
    std::vector<std::unique_ptr<ChildProcess>> children;
    for (int i = 0; i < clients; ++i) {
      children.push_back(
          std::make_unique<ChildProcess>([&address, i] { return ReceiveAndWrite(address, i); }));
    }
    const absl::Status status = server.Serve(memory->fd(), clients, Patiently());
    ASSERT_TRUE(status.ok()) << status;
    for (int i = 0; i < clients; ++i) {
      EXPECT_EQ(children[i]->Result(), "OK");
      EXPECT_EQ(memory->data()[i], static_cast<std::byte>(100 + i));
    }
    EXPECT_GE(::fcntl(memory->fd(), F_GETFD), 0);
  }
}

// Another program altogether: this one, started anew; see main().
TEST(FdPassingTest, AcrossExec) {
  absl::StatusOr<SharedMemory> memory = SharedMemory::Create(kMiB);
  ASSERT_TRUE(memory.ok()) << memory.status();
  FdServer server = MustListen();
  const std::string address = server.address();
  ChildProcess child([&address] {
    ::execl("/proc/self/exe", "client", "--receive", address.c_str(), nullptr);
    return std::string("exec failed");
  });
  ASSERT_TRUE(server.Serve(memory->fd(), 1, Patiently()).ok());
  EXPECT_EQ(child.Reap(), 0);
  EXPECT_EQ(memory->data()[0], std::byte{100});
}

TEST(FdPassingTest, RanksAsThreads) {
  absl::StatusOr<SharedMemory> memory = SharedMemory::Create(kMiB);
  ASSERT_TRUE(memory.ok()) << memory.status();
  FdServer server = MustListen();
  std::thread client(
      [address = server.address()] { EXPECT_EQ(ReceiveAndWrite(address, 0), "OK"); });
  EXPECT_TRUE(server.Serve(memory->fd(), 1, Patiently()).ok());
  client.join();
  EXPECT_EQ(memory->data()[0], std::byte{100});
}

TEST(FdPassingTest, AddressesDiffer) {
  FdServer a = MustListen();
  FdServer b = MustListen();
  EXPECT_NE(a.address(), b.address());
  EXPECT_FALSE(absl::StrContains(a.address(), ' '));
}

TEST(FdPassingTest, EveryIndexOnce) {
  FdServer server = MustListen();
  const std::string address = server.address();
  std::thread clients([&] {
    absl::StatusOr<int> fd = ReceiveFd(address, 0, Patiently());
    EXPECT_TRUE(fd.ok()) << fd.status();
    ::close(*fd);
    EXPECT_TRUE(absl::IsAlreadyExists(ReceiveFd(address, 0, Patiently()).status()));
    EXPECT_TRUE(absl::IsInvalidArgument(ReceiveFd(address, 2, Patiently()).status()));
    EXPECT_TRUE(absl::IsInvalidArgument(ReceiveFd(address, -1, Patiently()).status()));
    fd = ReceiveFd(address, 1, Patiently());
    EXPECT_TRUE(fd.ok()) << fd.status();
    ::close(*fd);
  });
  EXPECT_TRUE(server.Serve(STDIN_FILENO, 2, Patiently()).ok());
  clients.join();
}

// The connections are of the same user: of a program with a defect, or of a debugger.
TEST(FdPassingTest, ConnectionsWithoutAProperRequestDoNoHarm) {
  absl::StatusOr<SharedMemory> memory = SharedMemory::Create(kMiB);
  ASSERT_TRUE(memory.ok()) << memory.status();
  FdServer server = MustListen();
  const std::string address = server.address();
  // They have a process of their own, because the server needs as many descriptors again.
  ChildProcess strangers([&](Messages& channel) {
    std::vector<UniqueFd> open;
    for (int i = 0; i < 300; ++i) open.push_back(RawConnect(address));
    ::send(open[1].get(), "?", 1, MSG_NOSIGNAL);
    ::send(open[2].get(), "", 0, MSG_NOSIGNAL);
    open.push_back(RawConnect(address));
    RawAsk(open.back(), 0);
    open.pop_back();  // does not wait for its descriptor
    channel.Send("connected");
    // Those that asked for nothing proper are closed without an answer.
    std::string heard;
    for (int i : {1, 2}) {
      char byte;
      if (::recv(open[i].get(), &byte, 1, 0) > 0) absl::StrAppend(&heard, "an answer to ", i, ";");
    }
    channel.Receive();
    return heard;
  });
  ASSERT_EQ(strangers.channel().Receive(), "connected");
  std::vector<std::unique_ptr<ChildProcess>> children;
  for (int i = 0; i < 3; ++i) {
    children.push_back(
        std::make_unique<ChildProcess>([&address, i] { return ReceiveAndWrite(address, i); }));
  }
  // The one that left may count as served, if its reply was sent before it was gone.
  const absl::Status status = server.Serve(memory->fd(), 3, Patiently());
  ASSERT_TRUE(status.ok()) << status;
  for (int i : {1, 2}) EXPECT_EQ(children[i]->Result(), "OK");
  const std::string first = children[0]->Result();
  EXPECT_TRUE(first == "OK" || absl::StartsWith(first, "ALREADY_EXISTS")) << first;
  strangers.channel().Send("enough");
  EXPECT_EQ(strangers.Result(), "");
}

TEST(FdPassingTest, ServeNamesWhoNeverCame) {
  FdServer server = MustListen();
  const std::string address = server.address();
  UniqueFd silent = RawConnect(address);
  ChildProcess child([&address] { return ReceiveFd(address, 1, Patiently()).status().ToString(); });
  const absl::Status status = server.Serve(STDIN_FILENO, 4, In(absl::Seconds(3)));
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_TRUE(absl::StartsWith(status.message(), "Timed out ")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "0, 2, 3")) << status;
  EXPECT_EQ(child.Result(), "OK");
}

TEST(FdPassingTest, NobodyWaitsPastTheDeadline) {
  FdServer server = MustListen();  // and never serves
  const absl::Time start = absl::Now();
  for (absl::Time deadline : {absl::InfinitePast(), absl::Now(), In(absl::Milliseconds(100))}) {
    const absl::Status status = ReceiveFd(server.address(), 0, deadline).status();
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
    EXPECT_TRUE(absl::StartsWith(status.message(), "Timed out ")) << status;
    EXPECT_TRUE(absl::IsDeadlineExceeded(server.Serve(STDIN_FILENO, 9, deadline)));
  }
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));
}

TEST(FdPassingTest, AServerThatHasEnded) {
  std::string address;
  {
    FdServer server = MustListen();
    address = server.address();
  }
  const absl::Status status = ReceiveFd(address, 0, Patiently()).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "network namespace")) << status;
}

TEST(FdPassingTest, AServerKilledWhileClientsWait) {
  ChildProcess server([](Messages& channel) {
    FdServer listening = MustListen();
    channel.Send(listening.address());
    channel.Receive();
    return std::string();
  });
  const std::string address = server.channel().Receive();
  UniqueFd connected = RawConnect(address);
  std::thread client([&] {
    const absl::Status status = ReceiveFd(address, 0, Patiently()).status();
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  });
  server.Kill();
  char byte;
  EXPECT_LE(::recv(connected.get(), &byte, 1, 0), 0);
  client.join();
}

TEST(FdPassingTest, NothingIsLeftOfKilledProcesses) {
  ChildProcess server([](Messages& channel) {
    FdServer listening = MustListen();
    absl::StatusOr<SharedMemory> memory = SharedMemory::Create(kMiB);
    channel.Send(listening.address());
    channel.Send(listening.Serve(memory->fd(), 2, Patiently()).ToString());
    channel.Receive();
    return std::string();
  });
  const std::string address = server.channel().Receive();
  EXPECT_TRUE(IsListed(address));
  ChildProcess client([&](Messages& channel) {
    absl::StatusOr<int> fd = ReceiveFd(address, 0, Patiently());
    channel.Send(fd.status().ToString());
    channel.Receive();
    return std::string();
  });
  EXPECT_EQ(client.channel().Receive(), "OK");  // the server still waits for the other
  server.Kill();
  client.Kill();
  EXPECT_FALSE(IsListed(address));
  const absl::StatusOr<std::vector<std::string>> files = ListDirectory("/dev/shm");
  if (files.ok()) {
    for (const std::string& name : *files) EXPECT_FALSE(absl::StrContains(name, "ddp")) << name;
  }
}

TEST(FdPassingTest, AnotherNetworkNamespace) {
  FdServer server = MustListen();
  const std::string address = server.address();
  const std::string result = ChildProcess([&address] {
                               if (::unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) {
                                 return std::string("no namespaces");
                               }
                               return ReceiveFd(address, 0, Patiently()).status().ToString();
                             }).Result();
  if (result == "no namespaces") GTEST_SKIP() << "this machine lets nobody make namespaces";
  EXPECT_TRUE(absl::StartsWith(result, "UNAVAILABLE")) << result;
  EXPECT_TRUE(absl::StrContains(result, "network namespace")) << result;
}

TEST(FdPassingTest, AnotherUserGetsNothing) {
  FdServer server = MustListen();
  const std::string address = server.address();
  ChildProcess child([&address](Messages& channel) {
    if (::setresuid(12345, 12345, 12345) != 0) {
      channel.Send("not root");
      return std::string();
    }
    // ReceiveFd refuses the server; what does not is refused by the server.
    channel.Send(ReceiveFd(address, 0, Patiently()).status().ToString());
    UniqueFd socket = RawConnect(address);
    RawAsk(socket, 0);
    channel.Send("asked");
    char byte;
    return std::string(::recv(socket.get(), &byte, 1, 0) > 0 ? "an answer" : "no answer");
  });
  const std::string refused = child.channel().Receive();
  if (refused == "not root") GTEST_SKIP() << "only root can act as another user";
  EXPECT_TRUE(absl::StartsWith(refused, "PERMISSION_DENIED")) << refused;
  EXPECT_TRUE(absl::StrContains(refused, "another user")) << refused;
  ASSERT_EQ(child.channel().Receive(), "asked");
  EXPECT_TRUE(absl::IsDeadlineExceeded(server.Serve(STDIN_FILENO, 1, In(absl::Milliseconds(200)))));
  EXPECT_EQ(child.Result(), "no answer");
}

// Each is closed as soon as it is accepted, so that they hold neither descriptors nor clients up.
TEST(FdPassingTest, ManyConnectionsOfAnotherUserDelayNobody) {
  absl::StatusOr<SharedMemory> memory = SharedMemory::Create(kMiB);
  ASSERT_TRUE(memory.ok()) << memory.status();
  FdServer server = MustListen();
  const std::string address = server.address();
  ChildProcess strangers([&address](Messages& channel) {
    if (::setresuid(12345, 12345, 12345) != 0) {
      channel.Send("not root");
      return std::string();
    }
    rlimit limit = {};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    std::vector<UniqueFd> open;
    for (rlim_t i = 0; i < std::min<rlim_t>(limit.rlim_cur / 2, 300); ++i) {
      open.push_back(RawConnect(address));
      RawAsk(open.back(), 0);
    }
    channel.Send("asked");
    channel.Receive();
    return std::string("done");
  });
  const std::string asked = strangers.channel().Receive();
  if (asked == "not root") GTEST_SKIP() << "only root can act as another user";
  ASSERT_EQ(asked, "asked");
  ChildProcess client([&address] { return ReceiveAndWrite(address, 0); });
  const absl::Status status = server.Serve(memory->fd(), 1, Patiently());
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(client.Result(), "OK");
  strangers.channel().Send("enough");
  EXPECT_EQ(strangers.Result(), "done");
}

TEST(FdPassingTest, NoDescriptorLeft) {
  FdServer server = MustListen();
  const std::string address = server.address();
  ChildProcess child([&address] {
    // One descriptor is left for the socket, none for the one to receive.
    const int next = ::dup(STDIN_FILENO);
    ::close(next);
    rlimit limit = {};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = static_cast<rlim_t>(next) + 1;
    ::setrlimit(RLIMIT_NOFILE, &limit);
    return ReceiveFd(address, 0, Patiently()).status().ToString();
  });
  EXPECT_TRUE(server.Serve(STDIN_FILENO, 1, Patiently()).ok());
  const std::string result = child.Result();
  EXPECT_TRUE(absl::StartsWith(result, "RESOURCE_EXHAUSTED")) << result;
  EXPECT_TRUE(absl::StrContains(result, "ulimit -n")) << result;
}

TEST(FdPassingTest, MalformedAddresses) {
  const std::string address = MustListen().address();
  for (const std::string& text : {std::string(), std::string("x"), address.substr(1), address + "0",
                                  address + "." + address}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ReceiveFd(text, 0, Patiently()).status())) << text;
  }
}

}  // namespace
}  // namespace ddp::backends::shm

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "--receive") {
    return ddp::backends::shm::ReceiveAndWrite(argv[2], 0) == "OK" ? EXIT_SUCCESS : EXIT_FAILURE;
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
