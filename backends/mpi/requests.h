// A set of non-blocking messages, which reports which ranks' messages are missing.
//
//   Requests requests;
//   absl::Status status = requests.Send(buffer, /*peer=*/3, tag, comm);
//   requests.Receive(other, /*peer=*/3, tag, comm);
//   while (status.ok() && !*requests.Test()) { … }
//
// A receive first probes (MPI_Improbe), and receives only a message of the expected size. With
// MPI_Irecv the comparison would be up to MPI, and Open MPI 4.1.4 reports a message that is too
// long after it has written all of it, past the end of the memory. Also, a receive whose message
// has not arrived can be abandoned, because MPI does not know of it.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "backends/common/buffer.h"

namespace ddp::backends::mpi {

// OK for MPI_SUCCESS; otherwise Internal, with the name of the call and MPI's error text.
absl::Status MpiStatus(int code, absl::string_view call);

// A message that a receive waits for.
struct Awaited {
  int peer;  // or MPI_ANY_SOURCE
  int tag;
  MPI_Comm comm;
};

// Used on the progress thread only. Buffers are borrowed until Idle(): requests that MPI has
// started cannot be cancelled, so a set must not be destroyed before.
class Requests {
 public:
  Requests() = default;
  Requests(const Requests&) = delete;
  Requests& operator=(const Requests&) = delete;

  // Messages of any size, including zero. Messages of one sender with one tag arrive in the order
  // sent.
  absl::Status Send(Buffer buffer, int peer, int tag, MPI_Comm comm);
  // `peer` may be MPI_ANY_SOURCE.
  void Receive(Buffer buffer, int peer, int tag, MPI_Comm comm);

  // Sets the messages that earlier receives wait for. The receives of this set do not take them: of
  // two receives with the same tag, the first one gets the first message, in whatever order the
  // sets are tested. Borrowed; may change between calls of Test.
  void LeaveTo(const std::vector<Awaited>* earlier) { earlier_ = earlier; }
  // Appends the messages that this set waits for.
  void AppendAwaited(std::vector<Awaited>& awaited) const;

  // A new request, for MPI calls that this class does not wrap.
  MPI_Request* Add();

  // Whether all messages have been sent and received. Does not block. InvalidArgument if the size
  // of a message differs from that of its receive; the other requests may then never complete.
  absl::StatusOr<bool> Test();

  // The rank that sent the last received message.
  int source() const { return source_; }

  // Peers whose messages have not arrived or do not match. Peers that have not received a message
  // are not among them.
  std::vector<int> MissingPeers() const;

  // Abandons receives whose messages have not arrived.
  void AbandonReceives() { expected_.clear(); }
  // Whether MPI no longer uses any of the buffers.
  bool Idle();

 private:
  struct Expected {
    Buffer buffer;
    Awaited message;
  };

  // Whether the message has arrived; then it is being received.
  absl::StatusOr<bool> Take(const Expected& expected);

  // Whether an earlier receive than number `i` waits for the same message.
  bool IsForEarlierReceive(size_t i) const;

  const std::vector<Awaited>* earlier_ = nullptr;
  std::vector<Expected> expected_;
  std::vector<MPI_Request> requests_;
  int source_ = -1;
};

}  // namespace ddp::backends::mpi
