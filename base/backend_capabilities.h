// What a process-group backend declares about itself beyond c10d::Backend's interface. Callers ask
// for a capability, never for a backend's name.
//
//   BackendEntry{.device_types = {"cpu"}, .create = &Create,                      // the backend
//                .capabilities = {.collectives_use_callers_cores = true}};
//   const auto* declared = dynamic_cast<CapabilityProvider*>(backend.get());     // its user
//   if (declared != nullptr && declared->capabilities().collectives_use_callers_cores) …
#pragma once

#include <functional>

namespace ddp {

// The defaults hold for any c10d backend.
struct BackendCapabilities {
  // Collectives on CPU tensors run on the cores of the calling ranks: a Work's wait() advances
  // them, and no device or network card transfers data in the background. DistributedDataParallel
  // then averages by ReduceOp::AVG, calls Progress at the end of backward, and makes no small first
  // bucket if no core is idle.
  bool collectives_use_callers_cores = false;
  // abort() ends all waits for pending collectives at once, with an error. Otherwise the watchdog
  // (backends/watch) ends them itself.
  bool abort_ends_waits = false;
  // Works may be wrapped, and polled from any thread. False for NCCL: its Works must not be polled
  // during CUDA graph capture, and they carry the errors of NCCL's own watchdog.
  bool works_can_be_polled = true;
  // A message may be shorter than the tensor of the receive that it matches; the rest of the tensor
  // stays as it is. Backend hier sends packed numbers over such backends only.
  bool shorter_messages_fit = false;
};

// A second base class, besides c10d::Backend, of backends with non-default capabilities, and of the
// watchdog's wrapper around any backend. Thread-safe.
class CapabilityProvider {
 public:
  virtual ~CapabilityProvider() = default;
  virtual BackendCapabilities capabilities() const = 0;

  // Only with collectives_use_callers_cores. Advances pending collectives in the calling thread
  // until `done()` returns true or none is pending. Does not wait for send and recv. `done` is
  // called often and must be cheap. Does not throw: errors are in the Works and their futures. Not
  // collective.
  virtual void Progress(const std::function<bool()>& done) = 0;
};

}  // namespace ddp
