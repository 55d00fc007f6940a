// Binds the rendezvous port before any rank is started.
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

// Listens on `port` of `host`, a name or address of this machine, and on no other address. Port 0
// means any free port. AlreadyExists if the port is in use; NotFound if `host` does not resolve;
// Unavailable otherwise. Messages name host and port. Thread-safe.
absl::StatusOr<Listener> Listen(const std::string& host, int port);

}  // namespace ddp::launchers
