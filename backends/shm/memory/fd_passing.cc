#include "backends/shm/memory/fd_passing.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status.h"

namespace ddp::backends::shm {
namespace {

constexpr size_t kSecretDigits = 32;  // 128 bit
constexpr absl::string_view kNamePrefix = "ddp-shm-";

// Sockets of type SOCK_SEQPACKET keep messages whole: one hello, one reply.
struct Hello {
  char secret[kSecretDigits];
  int32_t index;
};
enum class Reply : int32_t { kDescriptor = 1, kServedAlready = 2, kNoSuchIndex = 3 };

// Connections that have not said anything yet. Past that number the oldest goes: it is a
// stranger's, a client speaks as soon as it is connected.
constexpr size_t kMaxSilent = 256;
// A full backlog refuses without a way to wait for it.
constexpr absl::Duration kRetry = absl::Milliseconds(2);

// An absl::Time as it was meant on entry, whatever is done to the clock meanwhile.
class Timer {
 public:
  explicit Timer(absl::Time deadline)
      : end_(Clock::now() +
             absl::ToChronoMicroseconds(std::clamp(deadline - absl::Now(), absl::ZeroDuration(),
                                                   absl::Hours(24 * 365)))) {}

  // Milliseconds for poll(2), rounded up; 0 once the deadline has passed.
  int PollTimeout() const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end_ - Clock::now());
    return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 60'000));
  }
  bool Expired() const { return Clock::now() >= end_; }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point end_;
};

std::string RandomDigits() {
  std::random_device random;
  std::string digits;
  while (digits.size() < kSecretDigits) absl::StrAppendFormat(&digits, "%08x", random());
  return digits;
}

// Abstract: the name begins with a zero byte, and no file stands for it.
struct Address {
  explicit Address(absl::string_view name) {
    const std::string path = absl::StrCat(kNamePrefix, name);
    socket.sun_family = AF_UNIX;
    const size_t length = std::min(path.size(), sizeof(socket.sun_path) - 1);
    std::memcpy(socket.sun_path + 1, path.data(), length);
    size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&socket); }

  sockaddr_un socket = {};
  socklen_t size;
};

absl::Status SocketError(int error, absl::string_view what) {
  std::string message = absl::StrCat("handing over shared memory: ", what);
  absl::string_view remedy = "";
  if (error == EMFILE || error == ENFILE || error == ETOOMANYREFS) {
    remedy = "; no file descriptor is left: raise `ulimit -n`";
  } else if (error == EPERM || error == EACCES) {
    remedy =
        "; a security policy of the container denies abstract UNIX sockets: allow them there, "
        "or take backend=gloo";
  }
  const absl::Status status = absl::ErrnoToStatus(error, message);
  return absl::Status(error == ETOOMANYREFS ? absl::StatusCode::kResourceExhausted : status.code(),
                      absl::StrCat(status.message(), remedy));
}

bool HungUp(int error) { return error == EPIPE || error == ECONNRESET; }

absl::StatusOr<UniqueFd> NewSocket() {
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.ok()) return SocketError(errno, "socket");
  return socket;
}

// Whether our own user holds the other end.
bool SameUser(int socket) {
  ucred other = {};
  socklen_t size = sizeof(other);
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &other, &size) == 0 &&
         other.uid == ::geteuid();
}

// One message and, if `fd` is not -1, a descriptor. Never waits: a fresh socket has room.
absl::Status SendReply(int socket, Reply reply, int fd) {
  iovec data = {&reply, sizeof(reply)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  }
  while (::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    if (HungUp(errno)) return absl::UnavailableError("the client has gone");
    if (errno != EINTR) return SocketError(errno, "sending the descriptor");
  }
  return absl::OkStatus();
}

// Which descriptor came with a message; none if it had to be left out. Never more than one: the
// control buffer has room for no more.
UniqueFd TakeDescriptor(msghdr& message) {
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS &&
        header->cmsg_len >= CMSG_LEN(sizeof(int))) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header), sizeof(int));
      return UniqueFd(fd);
    }
  }
  return UniqueFd();
}

// Takes as long as it must to compare, wherever two texts differ.
bool EqualSecrets(absl::string_view a, absl::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned>(a[i] ^ b[i]);
  return difference == 0;
}

// The clients of one Serve: who is connected, who has been served.
class Clients {
 public:
  Clients(int fd, int peers, absl::string_view secret)
      : fd_(fd), secret_(secret), served_(static_cast<size_t>(peers)) {}

  bool AllServed() const { return !absl::c_linear_search(served_, false); }

  std::string Missing() const {
    std::vector<size_t> missing;
    for (size_t i = 0; i < served_.size(); ++i) {
      if (!served_[i]) missing.push_back(i);
    }
    return absl::StrJoin(missing, ", ");
  }

  // Waits for the listener or a client to have something, and deals with all that have.
  absl::Status Step(int listener, int timeout_ms) {
    std::vector<pollfd> events = {{listener, POLLIN, 0}};
    for (const UniqueFd& client : silent_) events.push_back({client.get(), POLLIN, 0});
    if (::poll(events.data(), events.size(), timeout_ms) < 0 && errno != EINTR) {
      return SocketError(errno, "poll");
    }
    std::vector<UniqueFd> still_silent;
    for (size_t i = 0; i < silent_.size(); ++i) {
      if (events[i + 1].revents == 0) {
        still_silent.push_back(std::move(silent_[i]));
      } else {
        DDP_RETURN_IF_ERROR(Hear(silent_[i].get()));
      }
    }
    silent_ = std::move(still_silent);
    return events[0].revents == 0 ? absl::OkStatus() : Accept(listener);
  }

 private:
  // One new connection, so that those who speak are heard between those who only connect.
  absl::Status Accept(int listener) {
    UniqueFd client(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!client.ok()) {
      if (errno == EMFILE || errno == ENFILE) return SocketError(errno, "accept");
      return absl::OkStatus();  // it has gone again
    }
    if (!SameUser(client.get())) return absl::OkStatus();
    if (silent_.size() == kMaxSilent) silent_.erase(silent_.begin());
    silent_.push_back(std::move(client));
    return absl::OkStatus();
  }

  // What one client says is the last thing heard from it. A stranger gets no answer.
  absl::Status Hear(int client) {
    Hello hello = {};
    if (::recv(client, &hello, sizeof(hello), MSG_DONTWAIT) != sizeof(hello) ||
        !EqualSecrets(absl::string_view(hello.secret, kSecretDigits), secret_)) {
      return absl::OkStatus();
    }
    if (hello.index < 0 || static_cast<size_t>(hello.index) >= served_.size()) {
      SendReply(client, Reply::kNoSuchIndex, -1).IgnoreError();
      return absl::OkStatus();
    }
    std::vector<bool>::reference served = served_[static_cast<size_t>(hello.index)];
    if (served) {
      SendReply(client, Reply::kServedAlready, -1).IgnoreError();
      return absl::OkStatus();
    }
    const absl::Status sent = SendReply(client, Reply::kDescriptor, fd_);
    served = sent.ok();
    return absl::IsUnavailable(sent) ? absl::OkStatus() : sent;
  }

  const int fd_;
  const absl::string_view secret_;
  std::vector<bool> served_;
  std::vector<UniqueFd> silent_;  // oldest first
};

// Connected, or why not.
absl::StatusOr<UniqueFd> Connect(absl::string_view name, const Timer& timer) {
  DDP_ASSIGN_OR_RETURN(UniqueFd socket, NewSocket());
  const Address address(name);
  while (::connect(socket.get(), address.get(), address.size) != 0) {
    if (errno == ECONNREFUSED) {
      return absl::UnavailableError(absl::StrCat(
          "handing over shared memory: nobody listens at the abstract socket ", kNamePrefix, name,
          "; the rank that serves it has ended, or is in another network namespace (another "
          "container): run the ranks of one host in one, or take backend=gloo"));
    }
    if (errno != EAGAIN && errno != EINTR) return SocketError(errno, "connect");
    if (timer.Expired()) {
      return absl::DeadlineExceededError(
          "handing over shared memory: the rank that serves it is there, but took no connection");
    }
    ::poll(nullptr, 0, static_cast<int>(absl::ToInt64Milliseconds(kRetry)));
  }
  if (!SameUser(socket.get())) {
    return absl::PermissionDeniedError(
        "handing over shared memory: the socket belongs to another user; run the ranks of one host "
        "as one user, or take backend=gloo");
  }
  return socket;
}

absl::Status ServerHungUp() {
  return absl::UnavailableError(
      "handing over shared memory: the rank that serves it hung up; it has failed or ended, or the "
      "address is of another run");
}

absl::StatusOr<int> ReadReply(int socket, int index) {
  Reply reply = {};
  iovec data = {&reply, sizeof(reply)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t n = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (n < 0 && !HungUp(errno)) return SocketError(errno, "receiving the descriptor");
  if (n != sizeof(reply)) return ServerHungUp();
  UniqueFd fd = TakeDescriptor(message);
  switch (reply) {
    case Reply::kDescriptor:
      if (fd.ok()) return fd.Release();
      return SocketError(EMFILE, "receiving the descriptor");
    case Reply::kServedAlready:
      return absl::AlreadyExistsError(
          absl::StrCat("handing over shared memory: client ", index, " has been served already"));
    case Reply::kNoSuchIndex:
      break;
  }
  return absl::InvalidArgumentError(absl::StrCat("handing over shared memory: ", index,
                                                 " is not among the clients that are waited for"));
}

}  // namespace

absl::StatusOr<FdServer> FdServer::Listen() {
  DDP_ASSIGN_OR_RETURN(UniqueFd socket, NewSocket());
  std::string name = RandomDigits();
  const Address address(name);
  if (::bind(socket.get(), address.get(), address.size) != 0) return SocketError(errno, "bind");
  if (::listen(socket.get(), SOMAXCONN) != 0) return SocketError(errno, "listen");
  return FdServer(std::move(socket), std::move(name), RandomDigits());
}

absl::Status FdServer::Serve(int fd, int peers, absl::Time deadline) {
  if (peers < 0) return absl::InvalidArgumentError(absl::StrCat(peers, " clients to serve"));
  const Timer timer(deadline);
  Clients clients(fd, peers, secret_);
  while (!clients.AllServed()) {
    DDP_RETURN_IF_ERROR(clients.Step(socket_.get(), timer.PollTimeout()));
    if (timer.Expired() && !clients.AllServed()) {
      return absl::DeadlineExceededError(
          absl::StrCat("handing over shared memory: no call from local client(s) ",
                       clients.Missing(), "; they have failed or are late, see their output"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<int> ReceiveFd(absl::string_view address, int index, absl::Time deadline) {
  const Timer timer(deadline);
  const std::vector<absl::string_view> parts = absl::StrSplit(address, '.');
  if (parts.size() != 2 || parts[0].size() != kSecretDigits || parts[1].size() != kSecretDigits) {
    return absl::InvalidArgumentError("handing over shared memory: malformed address");
  }
  DDP_ASSIGN_OR_RETURN(UniqueFd socket, Connect(parts[0], timer));
  Hello hello = {};
  std::memcpy(hello.secret, parts[1].data(), kSecretDigits);
  hello.index = index;
  if (::send(socket.get(), &hello, sizeof(hello), MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    if (HungUp(errno)) return ServerHungUp();
    return SocketError(errno, "sending the request");
  }
  pollfd event = {socket.get(), POLLIN, 0};
  while (::poll(&event, 1, timer.PollTimeout()) <= 0) {
    if (timer.Expired()) {
      return absl::DeadlineExceededError(
          "handing over shared memory: no answer from the rank that serves it; is it still busy, "
          "or stopped?");
    }
  }
  return ReadReply(socket.get(), index);
}

}  // namespace ddp::backends::shm
