#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "absl/log/absl_check.h"
#include "base/unique_fd.h"

namespace ddp {

struct LoopbackListener {
  UniqueFd fd;  // close-on-exec
  int port = 0;
};

// For tests: listens on a free port of 127.0.0.1, as launcher local does before it starts ranks.
inline LoopbackListener ListenOnLoopback() {
  LoopbackListener listener;
  listener.fd = UniqueFd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  const int fd = listener.fd.get();
  ABSL_CHECK_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), size), 0);
  ABSL_CHECK_EQ(listen(fd, 128), 0);
  ABSL_CHECK_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), 0);
  listener.port = ntohs(address.sin_port);
  return listener;
}

}  // namespace ddp
