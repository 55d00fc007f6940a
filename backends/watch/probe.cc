#include "backends/watch/probe.h"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace ddp::backends::watch {
namespace {

struct FreeAddresses {
  void operator()(addrinfo* addresses) const { freeaddrinfo(addresses); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

// Null if there are no addresses.
Addresses Resolve(const std::string& host, const std::string& port, int type, int flags) {
  addrinfo hints = {};
  hints.ai_socktype = type;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) return nullptr;
  return Addresses(found);
}

struct SocketAddress {
  sockaddr_storage storage = {};
  socklen_t length = sizeof(storage);
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

// Finds the local address from which this host sends packets to `remote`. Sends nothing.
bool LocalAddressTowards(const addrinfo& remote, SocketAddress& local) {
  const UniqueFd fd(socket(remote.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  return fd.ok() && connect(fd.get(), remote.ai_addr, remote.ai_addrlen) == 0 &&
         getsockname(fd.get(), local.get(), &local.length) == 0;
}

void ClearPort(SocketAddress& address) {
  if (address.storage.ss_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(&address.storage)->sin6_port = 0;
  } else {
    reinterpret_cast<sockaddr_in*>(&address.storage)->sin_port = 0;
  }
}

// Empty on failure.
std::string ToString(SocketAddress& address) {
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (getnameinfo(address.get(), address.length, host, sizeof(host), port, sizeof(port),
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "";
  }
  return absl::StrContains(host, ":") ? absl::StrCat("[", host, "]:", port)
                                      : absl::StrCat(host, ":", port);
}

// Splits "10.0.0.2:40123" or "[2001:db8::2]:40123" into address and port.
std::pair<std::string, std::string> Split(absl::string_view address) {
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos) return {};
  absl::string_view host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  return {std::string(host), std::string(address.substr(colon + 1))};
}

ProbeResult FromErrno(int error) {
  if (error == 0) return ProbeResult::kAlive;
  return error == ECONNREFUSED ? ProbeResult::kRefused : ProbeResult::kNoAnswer;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ProbeListener>> ProbeListener::Open(const std::string& towards) {
  const Addresses remotes = Resolve(towards, "1", SOCK_DGRAM, AI_ADDRCONFIG);
  for (const addrinfo* remote = remotes.get(); remote != nullptr; remote = remote->ai_next) {
    SocketAddress local;
    if (!LocalAddressTowards(*remote, local)) continue;
    ClearPort(local);
    UniqueFd fd(socket(remote->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!fd.ok() || bind(fd.get(), local.get(), local.length) != 0 ||
        listen(fd.get(), SOMAXCONN) != 0 ||
        getsockname(fd.get(), local.get(), &local.length) != 0) {
      continue;
    }
    std::string address = ToString(local);
    if (!address.empty())
      return std::unique_ptr<ProbeListener>(new ProbeListener(std::move(fd), std::move(address)));
  }
  return absl::UnavailableError(
      absl::StrCat("this host has no address that can be reached from ", towards));
}

ProbeListener* ProbeListener::OfThisProcess(const std::string& towards) {
  static std::mutex* const mutex = new std::mutex;
  static ProbeListener* listener = nullptr;
  static pid_t owner = 0;
  const std::lock_guard<std::mutex> lock(*mutex);
  if (owner != getpid()) {
    owner = getpid();
    delete listener;
    absl::StatusOr<std::unique_ptr<ProbeListener>> opened = Open(towards);
    listener = opened.ok() ? opened->release() : nullptr;
  }
  return listener;
}

void ProbeListener::AcceptPending() {
  while (true) {
    const UniqueFd connection(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    // A connection that its client has closed already is not the end of the queue.
    if (!connection.ok() && errno != ECONNABORTED && errno != EINTR) return;
  }
}

bool IsLoopback(absl::string_view address) {
  return absl::StartsWith(address, "127.") || absl::StartsWith(address, "[::1]");
}

std::vector<ProbeResult> Probe(const std::vector<std::string>& addresses, absl::Duration timeout) {
  std::vector<ProbeResult> results(addresses.size(), ProbeResult::kNoAnswer);
  std::vector<UniqueFd> sockets(addresses.size());
  std::vector<pollfd> polled(addresses.size());
  int waiting = 0;
  for (size_t i = 0; i < addresses.size(); ++i) {
    polled[i] = {.fd = -1, .events = POLLOUT, .revents = 0};
    const auto [host, port] = Split(addresses[i]);
    const Addresses address = Resolve(host, port, SOCK_STREAM, AI_NUMERICHOST);
    if (address == nullptr) continue;
    sockets[i] =
        UniqueFd(socket(address->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    // Close with a reset: avoids TIME_WAIT, which would occupy the port for a minute.
    const linger at_once = {.l_onoff = 1, .l_linger = 0};
    setsockopt(sockets[i].get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    const int error =
        connect(sockets[i].get(), address->ai_addr, address->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      polled[i].fd = sockets[i].get();
      ++waiting;
    } else {
      results[i] = FromErrno(error);
    }
  }
  const absl::Time deadline = absl::Now() + timeout;
  while (waiting > 0) {
    const int64_t left = absl::ToInt64Milliseconds(deadline - absl::Now());
    if (left < 0 ||
        (poll(polled.data(), polled.size(), static_cast<int>(left)) < 0 && errno != EINTR)) {
      break;
    }
    for (size_t i = 0; i < polled.size(); ++i) {
      if (polled[i].fd < 0 || polled[i].revents == 0) continue;
      int error = 0;
      socklen_t length = sizeof(error);
      getsockopt(polled[i].fd, SOL_SOCKET, SO_ERROR, &error, &length);
      results[i] = FromErrno(error);
      polled[i].fd = -1;
      --waiting;
    }
  }
  return results;
}

}  // namespace ddp::backends::watch
