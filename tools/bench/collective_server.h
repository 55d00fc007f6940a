// A rank of //tools/bench:collectives: executes commands from a socket, one line each, and sleeps
// in read() between them, so that it does not disturb other measurements.
//
//   class Mine : public Collectives { … };
//   absl::Status status = ServeTasks("name-of-the-socket", {rank, world_size}, "arena=1", mine);
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "tools/bench/collective_task.h"

namespace ddp::tools::bench {

struct Buffers {
  void* input = nullptr;
  void* output = nullptr;  // for in-place operations equal to input, or one within the other
};

// The collectives of one library, on one rank. Thread-compatible. May throw std::exception.
class Collectives {
 public:
  virtual ~Collectives() = default;

  // Sets the task for Run. The buffers are valid until Free. Collective.
  virtual absl::StatusOr<Buffers> Prepare(const CollectiveTask& task) = 0;

  // Runs the collective once and waits for it. Run and Barrier are collective.
  virtual void Run() = 0;
  virtual void Barrier() = 0;

  virtual void Free() = 0;
};

// Connects to the abstract Unix socket `control`, sends "rank=0 world_size=2 ABILITIES" and serves
// until the other side closes the connection. Answers each line with "ok SECONDS" (of the whole
// burst) or "error TEXT". Unavailable if the connection is refused.
absl::Status ServeTasks(absl::string_view control, const Place& place, absl::string_view abilities,
                        Collectives& collectives);

}  // namespace ddp::tools::bench
