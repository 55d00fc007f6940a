// Communication hooks of DistributedDataParallel: what the Reducer does with each bucket of
// gradients. Private to data_parallel.h, which takes the user's own.
#pragma once

#include <memory>
#include <optional>

#include "base/backend_capabilities.h"
#include "c10/core/Device.h"
#include "c10/util/intrusive_ptr.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/comm.hpp"

namespace ddp {

// A group's backend for one kind of device, and its declaration. Keeps the backend alive.
struct DeclaringBackend {
  c10::intrusive_ptr<c10d::Backend> backend;
  DeclaresCapabilities* declares;  // part of *backend
};

// The backend that reduces tensors of `device` if its collectives run on the cores of the ranks
// that call them (BackendCapabilities::collectives_use_callers_cores), otherwise none.
std::optional<DeclaringBackend> BackendOnCallersCores(c10d::ProcessGroup& group,
                                                      c10::DeviceType device);

// Averages each bucket with one all-reduce by ReduceOp::AVG. Without a hook the Reducer divides
// first, in a pass of its own, and then sums. Not for backends without AVG.
class AverageHook : public c10d::CppCommHookInterface<c10::intrusive_ptr<c10d::ProcessGroup>> {
 public:
  using CppCommHookInterface::CppCommHookInterface;
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override;
};

// Runs another hook, whichever it is, and has the thread that runs backward advance the backend's
// collectives at the end of backward, until the last bucket's future is complete. Otherwise that
// thread would only wait for futures, and another thread of this rank would have to be woken to
// complete them.
class ProgressHook : public c10d::CommHookInterface {
 public:
  ProgressHook(DeclaringBackend backend, std::unique_ptr<c10d::CommHookInterface> inner);

  // Before the first backward.
  void set_inner(std::unique_ptr<c10d::CommHookInterface> inner) { inner_ = std::move(inner); }

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override;
  at::Tensor parseHookResult(const c10::IValue& result) override;

 private:
  const DeclaringBackend backend_;
  std::unique_ptr<c10d::CommHookInterface> inner_;
};

}  // namespace ddp
