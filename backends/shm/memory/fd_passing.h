// Passes one file descriptor to the other ranks of a host (SCM_RIGHTS), over an abstract UNIX
// socket: it has no name in any file system and ends with its process.
//
//   DDP_ASSIGN_OR_RETURN(FdServer server, FdServer::Listen());                 // one rank
//   store->set("segment", server.address());
//   DDP_RETURN_IF_ERROR(server.Serve(memory.fd(), local_world_size - 1, deadline));
//
//   DDP_ASSIGN_OR_RETURN(int fd, ReceiveFd(address, local_rank - 1, deadline));  // the others
//
// Both sides check the user of the other process (SO_PEERCRED). A secret in the address would add
// nothing: a process of the same user can open the descriptor in /proc/PID/fd anyway. The random
// name is not a protection; it prevents the address of a server that has ended from matching a new
// server.
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
  // Clients can connect from now on; they wait until Serve.
  static absl::StatusOr<FdServer> Listen();

  // The name of the socket: 32 hexadecimal digits.
  const std::string& address() const { return name_; }

  // Sends `fd`, which the caller keeps, once to each of the clients 0 … peers-1, and returns when
  // all have been served. Connections of other users are closed at once; those of the same user
  // that send nothing are held until the end. Call it once. DeadlineExceeded names
  // the clients that did not ask; ResourceExhausted: this process has no descriptor left.
  absl::Status Serve(int fd, int peers, absl::Time deadline);

 private:
  FdServer(UniqueFd socket, std::string name)
      : socket_(std::move(socket)), name_(std::move(name)) {}

  UniqueFd socket_;
  std::string name_;
};

// Returns the descriptor that is served at `address`: close-on-exec, owned by the caller. `index`
// is this client's number among the `peers` of Serve. Thread-safe. Errors:
//   Unavailable: no process listens there (the server has ended, or is in another network
//     namespace), or the server ended before it answered
//   PermissionDenied: the server is a process of another user
//   AlreadyExists: the client `index` has been served before
//   InvalidArgument: malformed address, or `index` is not in 0 … peers-1
//   ResourceExhausted: this process has no descriptor left
//   DeadlineExceeded
absl::StatusOr<int> ReceiveFd(absl::string_view address, int index, absl::Time deadline);

}  // namespace ddp::backends::shm
