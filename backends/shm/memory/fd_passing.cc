#include "backends/shm/memory/fd_passing.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/status.h"

namespace ddp::backends::shm {
namespace {

constexpr size_t kNameDigits = 32;  // 128 bits
constexpr absl::string_view kNamePrefix = "ddp-shm-";

// The number in a reply. The number in a request is the client's index.
enum Reply : int32_t { kDescriptor = 1, kServedBefore = 2, kNoSuchIndex = 3 };

// One message of a SOCK_SEQPACKET socket, which keeps messages whole: a number and room for one
// descriptor.
struct Message {
  int32_t number = 0;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  iovec data = {&number, sizeof(number)};
  msghdr header = {.msg_name = nullptr,
                   .msg_namelen = 0,
                   .msg_iov = &data,
                   .msg_iovlen = 1,
                   .msg_control = control,
                   .msg_controllen = sizeof(control),
                   .msg_flags = 0};
};

absl::Status Error(absl::StatusCode code, absl::string_view what) {
  return absl::Status(code, absl::StrCat("passing shared memory to the ranks of a host: ", what));
}

absl::Status SystemError(int error, absl::string_view call) {
  absl::StatusCode code = absl::ErrnoToStatusCode(error);
  absl::string_view remedy = "";
  if (error == EMFILE || error == ENFILE || error == ETOOMANYREFS) {
    code = absl::StatusCode::kResourceExhausted;
    remedy = "; no file descriptor is left: raise `ulimit -n`";
  } else if (error == EPERM || error == EACCES) {
    remedy =
        "; a security policy of the container denies abstract UNIX sockets: allow them there, or "
        "use backend=gloo";
  }
  return Error(code, absl::StrCat(call, ": ", std::strerror(error), remedy));
}

absl::Status ServerEnded() {
  return Error(absl::StatusCode::kUnavailable,
               "the rank that serves it closed the connection; it has failed or ended");
}

absl::Status TimedOut(absl::string_view what) {
  return absl::DeadlineExceededError(
      absl::StrCat("Timed out passing shared memory to the ranks of a host: ", what));
}

absl::Status NoAnswer() {
  return TimedOut("no answer from the rank that serves it; is it still busy, or stopped?");
}

bool ConnectionClosed(int error) { return error == EPIPE || error == ECONNRESET; }

// For poll(2), in milliseconds: 0 once the deadline has passed, a minute at most.
int PollTimeout(absl::Time deadline) {
  const absl::Duration left =
      std::clamp(deadline - absl::Now(), absl::ZeroDuration(), absl::Minutes(1));
  return static_cast<int>(absl::ToInt64Milliseconds(absl::Ceil(left, absl::Milliseconds(1))));
}

absl::StatusOr<UniqueFd> NewSocket() {
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.ok()) return SystemError(errno, "socket");
  return socket;
}

// The address of an abstract socket: the path begins with a zero byte.
sockaddr_un AddressOf(absl::string_view name) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  absl::StrCat(kNamePrefix, name).copy(address.sun_path + 1, sizeof(address.sun_path) - 1);
  return address;
}
constexpr socklen_t kAddressSize =
    offsetof(sockaddr_un, sun_path) + 1 + kNamePrefix.size() + kNameDigits;

bool IsSameUser(int socket) {
  ucred peer = {};
  socklen_t size = sizeof(peer);
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
         peer.uid == ::geteuid();
}

// Sends `fd` as well, unless it is -1. Does not block: the buffer of a new socket has room.
absl::Status Send(int socket, int32_t number, int fd) {
  Message message;
  message.number = number;
  if (fd == -1) {
    message.header.msg_controllen = 0;
  } else {
    cmsghdr* control = CMSG_FIRSTHDR(&message.header);
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(control), &fd, sizeof(int));
  }
  if (::sendmsg(socket, &message.header, MSG_NOSIGNAL) >= 0) return absl::OkStatus();
  return ConnectionClosed(errno) ? ServerEnded() : SystemError(errno, "sendmsg");
}

// Answers the request of one client. A client that has closed its connection is not an error.
absl::Status Answer(int client, int fd, int peers, std::set<int>& missing) {
  int32_t index = 0;
  if (::recv(client, &index, sizeof(index), 0) != sizeof(index)) return absl::OkStatus();
  absl::Status sent;
  if (index < 0 || index >= peers) {
    sent = Send(client, kNoSuchIndex, /*fd=*/-1);
  } else if (missing.count(index) == 0) {
    sent = Send(client, kServedBefore, /*fd=*/-1);
  } else {
    sent = Send(client, kDescriptor, fd);
    if (sent.ok()) missing.erase(index);
  }
  return absl::IsUnavailable(sent) ? absl::OkStatus() : sent;
}

}  // namespace

absl::StatusOr<FdServer> FdServer::Listen() {
  DDP_ASSIGN_OR_RETURN(UniqueFd socket, NewSocket());
  std::random_device random;
  std::string name;
  while (name.size() < kNameDigits) absl::StrAppendFormat(&name, "%08x", random());
  const sockaddr_un address = AddressOf(name);
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), kAddressSize) != 0) {
    return SystemError(errno, "bind");
  }
  if (::listen(socket.get(), SOMAXCONN) != 0) return SystemError(errno, "listen");
  return FdServer(std::move(socket), std::move(name));
}

absl::Status FdServer::Serve(int fd, int peers, absl::Time deadline) {
  if (peers < 0) return Error(absl::StatusCode::kInvalidArgument, "less than zero clients");
  std::set<int> missing;
  for (int i = 0; i < peers; ++i) missing.insert(i);
  std::vector<UniqueFd> clients;  // connected, no request yet
  while (!missing.empty()) {
    std::vector<pollfd> events = {{socket_.get(), POLLIN, 0}};
    for (const UniqueFd& client : clients) events.push_back({client.get(), POLLIN, 0});
    if (::poll(events.data(), events.size(), PollTimeout(deadline)) < 0 && errno != EINTR) {
      return SystemError(errno, "poll");
    }
    std::vector<UniqueFd> waiting;
    for (size_t i = 0; i < clients.size(); ++i) {
      if (events[i + 1].revents == 0) {
        waiting.push_back(std::move(clients[i]));
      } else {
        DDP_RETURN_IF_ERROR(Answer(clients[i].get(), fd, peers, missing));
      }
    }
    clients = std::move(waiting);
    if (events[0].revents != 0) {
      UniqueFd client(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!client.ok() && (errno == EMFILE || errno == ENFILE)) return SystemError(errno, "accept");
      if (client.ok() && IsSameUser(client.get())) clients.push_back(std::move(client));
    }
    if (!missing.empty() && absl::Now() >= deadline) {
      return TimedOut(absl::StrCat("no request from local client(s) ", absl::StrJoin(missing, ", "),
                                   "; they have failed or are late, see their output"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<int> ReceiveFd(absl::string_view address, int index, absl::Time deadline) {
  if (address.size() != kNameDigits) {
    return Error(absl::StatusCode::kInvalidArgument, "malformed address");
  }
  DDP_ASSIGN_OR_RETURN(const UniqueFd socket, NewSocket());
  const sockaddr_un server = AddressOf(address);
  while (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&server), kAddressSize) != 0) {
    if (errno == ECONNREFUSED) {
      return Error(absl::StatusCode::kUnavailable,
                   absl::StrCat("no process listens at the abstract socket ", kNamePrefix, address,
                                "; the rank that serves it has ended, or is in another network "
                                "namespace (another container): run the ranks of one host in one, "
                                "or use backend=gloo"));
    }
    if (errno != EAGAIN && errno != EINTR) return SystemError(errno, "connect");
    if (absl::Now() >= deadline) return NoAnswer();
    absl::SleepFor(absl::Milliseconds(2));  // the backlog is full; poll(2) cannot wait for that
  }
  if (!IsSameUser(socket.get())) {
    return Error(
        absl::StatusCode::kPermissionDenied,
        "the socket belongs to another user; run the ranks of one host as one user, or use "
        "backend=gloo");
  }
  DDP_RETURN_IF_ERROR(Send(socket.get(), index, /*fd=*/-1));
  pollfd event = {socket.get(), POLLIN, 0};
  while (::poll(&event, 1, PollTimeout(deadline)) <= 0) {
    if (absl::Now() >= deadline) return NoAnswer();
  }
  Message message;
  const ssize_t size = ::recvmsg(socket.get(), &message.header, MSG_CMSG_CLOEXEC);
  if (size < 0 && !ConnectionClosed(errno)) return SystemError(errno, "recvmsg");
  if (size != sizeof(message.number)) return ServerEnded();
  switch (message.number) {
    case kServedBefore:
      return Error(absl::StatusCode::kAlreadyExists,
                   absl::StrCat("client ", index, " has been served before"));
    case kNoSuchIndex:
      return Error(absl::StatusCode::kInvalidArgument,
                   absl::StrCat("client ", index, " is not among those that are served"));
  }
  // The kernel leaves out a descriptor for which this process has no number left.
  const cmsghdr* control = CMSG_FIRSTHDR(&message.header);
  if (control == nullptr || control->cmsg_type != SCM_RIGHTS) return SystemError(EMFILE, "recvmsg");
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(control), sizeof(int));
  return fd;
}

}  // namespace ddp::backends::shm
