// One collective or one message, and the channel that it uses.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "backends/mpi/coroutine.h"
#include "backends/mpi/requests.h"

namespace ddp::backends::mpi {

// Communication resources of an operation. Used on the progress thread only.
struct Channel {
  MPI_Comm comm = MPI_COMM_NULL;
  int rank = 0;
  int size = 1;
  // Tag of the messages of a collective. It differs between collectives, so that a rank never
  // receives the message of a different collective.
  int tag = 0;

  // Uninitialised memory of at least `bytes` bytes, which outlives the operation, because MPI may
  // write to it until its requests have completed. A later call may invalidate it.
  std::byte* Scratch(size_t bytes) {
    if (scratch->bytes < bytes) {
      scratch->data.reset(new std::byte[bytes]);
      scratch->bytes = bytes;
    }
    return scratch->data.get();
  }
  struct Memory {
    std::unique_ptr<std::byte[]> data;
    size_t bytes = 0;
  };
  Memory* scratch = nullptr;

  Requests requests;
};

struct Operation {
  // Collectives of a group run one after another, in the order of the calls, which must be the same
  // on all ranks. Messages run concurrently with them.
  bool is_collective = true;
  // Equal on all ranks that run the same collective; part of the tag.
  size_t signature = 0;
  // Makes the coroutine; called on the progress thread. It is destroyed when MPI no longer uses the
  // memory, so its captures should hold the tensors.
  std::function<Coroutine(Channel&)> body = nullptr;
  // "allreduce #7 of 1000 x float32", for error messages.
  std::function<std::string()> describe = nullptr;
  // Maximum duration, from when it starts, after the earlier collectives of the group.
  absl::Duration timeout = absl::InfiniteDuration();
  // Called once, on the progress thread. `source`: the sender of a received message, otherwise -1.
  std::function<void(const absl::Status& status, int source)> done = nullptr;
  // Called at the timeout, for the text of the error. Null: the text names the ranks whose messages
  // are missing.
  std::function<std::string(Channel&)> on_timeout = nullptr;
};

}  // namespace ddp::backends::mpi
