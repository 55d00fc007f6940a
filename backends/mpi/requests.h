// Messages under way, and whose has not come.
//
//   Requests requests;
//   absl::Status status = requests.Send(buffer, /*peer=*/3, tag, comm);
//   requests.Receive(other, /*peer=*/3, tag, comm);
//   while (status.ok() && !*requests.Test()) { … }
//
// A receive asks first what has come (MPI_Improbe), and takes only a message of the size that it
// expects. Handing MPI the memory at once (MPI_Irecv) would leave the comparison to MPI, and Open
// MPI 4.1.4 reports a longer message after it has written all of it, past the end of the memory.
// Also, what has not come can then be given up without MPI knowing.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "backends/common/buffer.h"

namespace ddp::backends::mpi {

// OK for MPI_SUCCESS; otherwise Internal with the name of the call and MPI's own text.
absl::Status MpiStatus(int code, absl::string_view call);

// A message that somebody waits for.
struct Awaited {
  int peer;  // or MPI_ANY_SOURCE
  int tag;
  MPI_Comm comm;
};

// Thread-compatible, on the thread that speaks to MPI. The memory handed in must outlive the
// requests; what MPI has begun cannot be taken back, so a set is destroyed only once Idle().
class Requests {
 public:
  Requests() = default;
  Requests(const Requests&) = delete;
  Requests& operator=(const Requests&) = delete;

  // Messages of any size, zero included. Messages of one sender with one tag arrive in their order.
  absl::Status Send(Buffer buffer, int peer, int tag, MPI_Comm comm);
  // `peer` may be MPI_ANY_SOURCE.
  void Receive(Buffer buffer, int peer, int tag, MPI_Comm comm);

  // Messages that receives begun before these wait for, and that these therefore leave alone: of
  // two receives of one tag the first gets the first message, whichever is looked at when it comes.
  // Borrowed; may change between calls of Test.
  void LeaveTo(const std::vector<Awaited>* earlier) { earlier_ = earlier; }
  // Appends those that these wait for.
  void AppendAwaited(std::vector<Awaited>& awaited) const;

  // For a call of MPI that this class does not wrap: where its request goes.
  MPI_Request* Add();

  // Whether all are done. InvalidArgument for a message of another size than the receive's; the
  // rest of the set may then never be done.
  absl::StatusOr<bool> Test();

  // After a receive: where it came from.
  int source() const { return source_; }

  // Peers whose message has not come, or has but does not fit. Others may be waited for as well:
  // those that do not take what is sent to them.
  std::vector<int> MissingPeers() const;

  // Gives up what has not come.
  void AbandonReceives() { expected_.clear(); }
  // Whether MPI is done with all memory.
  bool Idle();

 private:
  struct Expected {
    Buffer buffer;
    Awaited message;
  };

  // Whether the message was there, and is being received.
  absl::StatusOr<bool> Take(const Expected& expected);

  // Whether a receive before number `i` of these waits for what that one would take.
  bool IsAnothers(size_t i) const;

  const std::vector<Awaited>* earlier_ = nullptr;
  std::vector<Expected> expected_;
  std::vector<MPI_Request> requests_;
  int source_ = -1;
};

}  // namespace ddp::backends::mpi
