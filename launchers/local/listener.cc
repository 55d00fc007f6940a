#include "launchers/local/listener.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"

namespace ddp::launchers {
namespace {

// The errno of the first call that failed; 0 if the socket listens.
int TryListen(const addrinfo& address, UniqueFd& fd) {
  fd = UniqueFd(socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC, 0));
  if (!fd.ok()) return errno;
  // Allows a port in TIME_WAIT; a port that another socket listens on is still refused.
  const int on = 1;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(fd.get(), address.ai_addr, address.ai_addrlen) != 0) return errno;
  if (listen(fd.get(), SOMAXCONN) != 0) return errno;
  return 0;
}

int PortOf(int fd) {
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

}  // namespace

absl::StatusOr<Listener> Listen(const std::string& host, int port) {
  const std::string where = absl::StrCat("rendezvous at ", host, ":", port);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (int error = getaddrinfo(host.c_str(), absl::StrCat(port).c_str(), &hints, &found)) {
    return absl::NotFoundError(
        absl::StrCat(where, ": the host does not resolve: ", gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, &freeaddrinfo);
  int error = 0;
  for (const addrinfo* address = addresses.get(); address; address = address->ai_next) {
    Listener listener;
    error = TryListen(*address, listener.fd);
    if (error == 0) {
      listener.port = PortOf(listener.fd.get());
      return listener;
    }
    if (error == EADDRINUSE) break;
  }
  if (error == EADDRINUSE) {
    return absl::AlreadyExistsError(absl::StrCat(
        where, ": port ", port, " is taken by another process; choose another, or 0 for any free"));
  }
  return absl::UnavailableError(absl::StrCat(where, ": ", strerror(error)));
}

}  // namespace ddp::launchers
