// The work of a sharded optimizer around the forward of a DistributedDataParallel over the same
// group: it waits for an all-gather that it has started, and expects a backward. It has gradients
// that the wrapper's zero_grad() does not see.
//
//   AroundForward around(group, {.before = [this] { WaitForParameters(); }});  // while it exists
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ddp/model_tensors.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace ddp {

struct ForwardCallbacks {
  std::function<void()> before = nullptr;
  // It runs after a forward with gradients enabled, with the parameters of the module and the
  // tensors that backward may start from.
  std::function<void(const NamedTensors& parameters, const std::vector<at::Tensor>& outputs)>
      after = nullptr;
  // It runs in zero_grad(), with the parameters of the module.
  std::function<void(const NamedTensors& parameters, bool set_to_none)> zero_grad = nullptr;
};

// Constructor, destructor and Run… are thread-safe, but an object must not be
// destroyed while another thread runs the callbacks of its group.
class [[nodiscard]] AroundForward {
 public:
  AroundForward(const c10d::ProcessGroup* group, ForwardCallbacks callbacks)
      : group_(group), callbacks_(std::move(callbacks)) {
    const std::lock_guard<std::mutex> lock(All().mutex);
    All().objects.push_back(this);
    ++All().count;
  }
  ~AroundForward() {
    const std::lock_guard<std::mutex> lock(All().mutex);
    std::erase(All().objects, this);
    --All().count;
  }
  AroundForward(const AroundForward&) = delete;
  AroundForward& operator=(const AroundForward&) = delete;

  // Call the callbacks of this group, on the caller's thread. Propagate their exceptions.
  static void RunBefore(const c10d::ProcessGroup* group) {
    for (const AroundForward* object : Of(group)) {
      if (object->callbacks_.before) object->callbacks_.before();
    }
  }
  static void RunAfter(const c10d::ProcessGroup* group, const NamedTensors& parameters,
                       const std::vector<at::Tensor>& outputs) {
    for (const AroundForward* object : Of(group)) {
      if (object->callbacks_.after) object->callbacks_.after(parameters, outputs);
    }
  }

  static void RunZeroGrad(const c10d::ProcessGroup* group, const NamedTensors& parameters,
                          bool set_to_none) {
    for (const AroundForward* object : Of(group)) {
      if (object->callbacks_.zero_grad) object->callbacks_.zero_grad(parameters, set_to_none);
    }
  }

 private:
  struct Registered {
    std::atomic<int> count = 0;  // most programs have none
    std::mutex mutex;
    std::vector<const AroundForward*> objects;
  };
  // The lock is not held while callbacks run: they may wait for other ranks, which may be threads
  // of this process.
  static std::vector<const AroundForward*> Of(const c10d::ProcessGroup* group) {
    std::vector<const AroundForward*> of_group;
    if (All().count == 0) return of_group;
    const std::lock_guard<std::mutex> lock(All().mutex);
    for (const AroundForward* object : All().objects) {
      if (object->group_ == group) of_group.push_back(object);
    }
    return of_group;
  }
  static Registered& All() {
    static auto* all = new Registered();
    return *all;
  }

  const c10d::ProcessGroup* const group_;
  const ForwardCallbacks callbacks_;
};

}  // namespace ddp
