// The rendezvous port, taken before anybody is started.
//
//   DDP_ASSIGN_OR_RETURN(Listener listener, Listen("127.0.0.1", 0));
//   Use(listener.fd.get(), listener.port);
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace ddp::launchers {

struct Listener {
  UniqueFd fd;  // a listening TCP socket, close-on-exec
  int port = 0;
};

// Listens on `host`, a name or address of this machine, at that address alone; `port` 0 takes a
// free one. AlreadyExists if the port is taken; NotFound if the host does not resolve; Unavailable
// otherwise. Messages name host and port.
absl::StatusOr<Listener> Listen(const std::string& host, int port);

}  // namespace ddp::launchers
