// Hands one file descriptor to the other ranks of a host, over an abstract UNIX socket: no name in
// any file system, gone with the process.
//
//   DDP_ASSIGN_OR_RETURN(FdServer server, FdServer::Listen());                 // one rank
//   store->set("segment", server.address());
//   DDP_RETURN_IF_ERROR(server.Serve(memory.fd(), local_world_size - 1, deadline));
//
//   DDP_ASSIGN_OR_RETURN(int fd, ReceiveFd(address, local_rank - 1, deadline));  // the others
//
// Who may have the descriptor: processes of the same user that know the address, which holds a
// random secret besides the socket's name (anybody can read names in /proc/net/unix). Whatever else
// connects, in whatever number, and says nothing or something wrong, is borne and costs only its
// connection.
#pragma once

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"

namespace ddp::backends::shm {

// Movable; owns the listening socket. Thread-compatible.
class FdServer {
 public:
  // From here on clients can connect; they wait until Serve.
  static absl::StatusOr<FdServer> Listen();

  // What clients need: printable, random, without spaces; for a Store, not for logs.
  std::string address() const { return name_ + "." + secret_; }

  // Sends `fd`, which stays the caller's, to each of the clients 0 … peers-1 once, and returns when
  // all have been sent it. DeadlineExceeded names those that never called. Once per server.
  absl::Status Serve(int fd, int peers, absl::Time deadline);

 private:
  FdServer(UniqueFd socket, std::string name, std::string secret)
      : socket_(std::move(socket)), name_(std::move(name)), secret_(std::move(secret)) {}

  UniqueFd socket_;
  std::string name_;
  std::string secret_;
};

// The descriptor that is served at `address`, close-on-exec and owned by the caller. `index` is
// this client's, among those that Serve waits for. Unavailable if nobody listens there (the server
// has ended, or is in another network namespace) or the server hung up; PermissionDenied for a
// server of another user; AlreadyExists if a client of this index has been served;
// ResourceExhausted for want of descriptors; DeadlineExceeded.
absl::StatusOr<int> ReceiveFd(absl::string_view address, int index, absl::Time deadline);

}  // namespace ddp::backends::shm
