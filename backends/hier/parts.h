// The parts of a hierarchical group, each a c10d::Backend, and the errors of each part.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "backends/common/topology.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"

namespace ddp::backends::hier {

struct Part {
  std::string name;                           // "local", "cross-host", "all-ranks"
  std::vector<int> ranks;                     // backend's rank i is rank ranks[i] of the group
  c10::intrusive_ptr<c10d::Backend> backend;  // null if this rank is not in such a part

  explicit operator bool() const { return backend != nullptr; }
  // "its local part (shm; ranks 0, 1 there are ranks 2, 3)"
  std::string Describe() const;
};

struct Parts {
  Part local;  // the ranks of this host; null if there is only one
  Part cross;  // the ranks of this rank's lane; null if it is on none
  Part flat;   // all ranks of the group

  // Ends pending operations of all parts, also on peers that wait for this rank. Thread-safe.
  void Abort();
};

// An error of a part; what() names the part.
class PartError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Calls `f` and converts its exceptions to PartError. `doing` is for the message: "reducing".
void InPart(const Part& part, absl::string_view doing, const std::function<void()>& f);

// Waits for `work` until `deadline`. Throws PartError.
void Await(const Part& part, absl::string_view doing, c10d::Work& work, absl::Time deadline);

// Time left until `deadline`, at least one millisecond.
std::chrono::milliseconds Remaining(absl::Time deadline);

}  // namespace ddp::backends::hier
