// What a process-group backend declares about itself beyond c10d::Backend's interface. Callers ask
// for a capability, never for a backend's name.
//
//   BackendEntry{.device_types = {"cpu"}, .create = &Create,                      // the backend
//                .capabilities = {.collectives_use_callers_cores = true}};
//   const auto* declared = dynamic_cast<DeclaresCapabilities*>(backend.get());     // its user
//   if (declared != nullptr && declared->capabilities().collectives_use_callers_cores) …
#pragma once

#include <functional>

namespace ddp {

// The defaults hold for any c10d backend.
struct BackendCapabilities {
  // A collective on CPU tensors is computed on the cores of the calling ranks, by a thread that
  // waits for it: a Work's wait() advances it, and no device or network transfers data meanwhile.
  // DistributedDataParallel then averages by ReduceOp::AVG, calls Progress at the end of backward,
  // and makes no small first bucket where no core is idle.
  bool collectives_use_callers_cores = false;
  // abort() ends all waits for pending collectives at once, with an error. Otherwise the watchdog
  // (backends/watch) ends them itself.
  bool abort_ends_waits = false;
  // Works may be wrapped and polled from any thread. NCCL's must not be polled while a graph is
  // captured, and carry the errors of NCCL's own watchdog.
  bool works_can_be_polled = true;
};

// Implemented, beside c10d::Backend, by backends of this repository that have something to declare,
// and by the watchdog's wrapper for any backend. Thread-safe.
class DeclaresCapabilities {
 public:
  virtual ~DeclaresCapabilities() = default;
  virtual BackendCapabilities capabilities() const = 0;

  // With collectives_use_callers_cores: advances pending collectives in the calling thread until
  // `done()` or until none is pending; messages (send, recv) are not waited for. `done` must be
  // cheap. Does not throw: errors are in the Works and their futures. Not collective by itself.
  virtual void Progress(const std::function<bool()>& done) = 0;
};

}  // namespace ddp
