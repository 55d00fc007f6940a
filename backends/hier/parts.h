// What a hierarchical group is made of, and whom an error in each part is about.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "backends/hier/topology.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"

namespace ddp::backends::hier {

struct Part {
  std::string name;                           // "local", "cross-host", "all-ranks"
  std::vector<int> ranks;                     // of the whole group; backend's rank i is ranks[i]
  c10::intrusive_ptr<c10d::Backend> backend;  // null where this rank has no such part

  explicit operator bool() const { return backend != nullptr; }
  // "its local part (shm; there, ranks 0, 1 are ranks 2, 3 of the group)"
  std::string Describe() const;
};

struct Parts {
  Part local;  // the ranks of this host, if more than one
  Part cross;  // this rank's lane, if it is on one
  Part flat;   // all ranks

  // Ends whatever waits in any of them, here and at the other end. Thread-safe.
  void Abort();
};

// What went wrong in a part; what() says which.
class PartError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Calls `f`, and turns what it throws into a PartError. `doing` says what was done: "reducing".
void InPart(const Part& part, absl::string_view doing, const std::function<void()>& f);

// Waits for `work` until `deadline`. Throws PartError.
void Await(const Part& part, absl::string_view doing, c10d::Work& work, absl::Time deadline);

// What is left until `deadline`, at least a millisecond.
std::chrono::milliseconds Remaining(absl::Time deadline);

}  // namespace ddp::backends::hier
