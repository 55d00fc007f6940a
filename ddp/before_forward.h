// Callbacks that run before a forward, for example to wait for an all-gather that a sharded
// optimizer has started.
//
//   BeforeForward wait(group, [this] { WaitForParameters(); });  // registered while `wait` exists
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace ddp {

// Constructor, destructor and Run are thread-safe, but an object must not be destroyed while
// another thread runs the callbacks of its group.
class [[nodiscard]] BeforeForward {
 public:
  BeforeForward(const c10d::ProcessGroup* group, std::function<void()> callback)
      : group_(group), callback_(std::move(callback)) {
    const std::lock_guard<std::mutex> lock(All().mutex);
    All().objects.push_back(this);
    ++All().count;
  }
  ~BeforeForward() {
    const std::lock_guard<std::mutex> lock(All().mutex);
    std::erase(All().objects, this);
    --All().count;
  }
  BeforeForward(const BeforeForward&) = delete;
  BeforeForward& operator=(const BeforeForward&) = delete;

  // Calls the callbacks of this group, on the caller's thread. Propagates their exceptions.
  static void Run(const c10d::ProcessGroup* group) {
    if (All().count == 0) return;
    std::vector<const BeforeForward*> of_group;
    {
      const std::lock_guard<std::mutex> lock(All().mutex);
      for (const BeforeForward* object : All().objects) {
        if (object->group_ == group) of_group.push_back(object);
      }
    }
    // The lock is not held here: callbacks may wait for other ranks, which may be threads of this
    // process.
    for (const BeforeForward* object : of_group) object->callback_();
  }

 private:
  struct Registered {
    std::atomic<int> count = 0;  // most programs have none
    std::mutex mutex;
    std::vector<const BeforeForward*> objects;
  };
  static Registered& All() {
    static auto* all = new Registered();
    return *all;
  }

  const c10d::ProcessGroup* const group_;
  const std::function<void()> callback_;
};

}  // namespace ddp
