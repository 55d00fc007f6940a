// A rank of //tools/bench:collectives: does what it is told over a socket, one line at a time, and
// sleeps in read() in between, so that it disturbs nobody who is being timed.
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
  void* output = nullptr;  // the same address as input, or within it, for what is done in place
};

// One rank's side of the collectives. Thread-compatible. May throw std::exception.
class Collectives {
 public:
  virtual ~Collectives() = default;

  // Makes `task` the one that Run does, with buffers that stay until Free. Collective.
  virtual absl::StatusOr<Buffers> Prepare(const Task& task) = 0;

  // The collective once, waited for. Collective; so is Barrier.
  virtual void Run() = 0;
  virtual void Barrier() = 0;

  virtual void Free() = 0;
};

// Connects to the abstract Unix socket `control`, says what it is ("rank=0 world_size=2 ABILITIES")
// and serves until the other side hangs up, which is how it is told to end. A line is answered by
// "ok SECONDS" (of the whole burst) or "error TEXT". Unavailable if nobody listens.
absl::Status ServeTasks(absl::string_view control, const Place& place, absl::string_view abilities,
                        Collectives& collectives);

}  // namespace ddp::tools::bench
