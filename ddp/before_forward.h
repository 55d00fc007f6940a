// Callbacks that run before a forward, for example to wait for an all-gather that a sharded
// optimizer has started.
//
//   BeforeForward wait(group, [this] { WaitForParameters(); });  // registered while `wait` exists
#pragma once

#include <functional>

#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace ddp {

// Constructor, destructor and Run are thread-safe, but an object must not be destroyed while
// another thread runs the callbacks of its group.
class [[nodiscard]] BeforeForward {
 public:
  BeforeForward(const c10d::ProcessGroup* group, std::function<void()> callback);
  ~BeforeForward();
  BeforeForward(const BeforeForward&) = delete;
  BeforeForward& operator=(const BeforeForward&) = delete;

  // Calls the callbacks of this group, on the caller's thread. Propagates their exceptions.
  static void Run(const c10d::ProcessGroup* group);

 private:
  const c10d::ProcessGroup* const group_;
  const std::function<void()> callback_;
};

}  // namespace ddp
