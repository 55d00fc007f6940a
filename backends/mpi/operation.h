// One collective, or one message, on its way through MPI.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "backends/mpi/requests.h"
#include "backends/mpi/task.h"

namespace ddp::backends::mpi {

// What a collective speaks over.
struct Channel {
  MPI_Comm comm = MPI_COMM_NULL;
  int rank = 0;
  int size = 1;
  // Of the messages that make up a collective. Tells apart what a rank sends in one and in another,
  // should ranks disagree on what they do: a message that fits nowhere is missed, not misread.
  int tag = 0;

  // Memory that outlives the operation and is not initialised: MPI may write into it for as long as
  // a request is under way.
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
  // Those of a group run one after another, in the order of the calls, which is the same on all
  // ranks; messages run beside them.
  bool is_collective = true;
  // The same on all ranks that run the same collective.
  size_t signature = 0;
  // Makes the coroutine; called on the progress thread. What it captures lives as long as MPI may
  // touch the memory: it keeps the tensors.
  std::function<Task(Channel&)> body = nullptr;
  // "allreduce #7 of 1000 x float32". For errors.
  std::function<std::string()> describe = nullptr;
  // From when it starts, behind the group's earlier collectives.
  absl::Duration timeout = absl::InfiniteDuration();
  // Called once, on the progress thread. `source` is the rank that a message came from.
  std::function<void(const absl::Status& status, int source)> done = nullptr;
  // Called at the timeout: what to say, instead of whose message is missing.
  std::function<std::string(Channel&)> on_timeout = nullptr;
};

}  // namespace ddp::backends::mpi
