// The work of DataParallel around communication hooks, and the mean over ranks. Private to this
// folder; hooks to choose from are in hooks/.
#pragma once

#include <memory>
#include <optional>
#include <utility>

#include "base/backend_capabilities.h"
#include "c10/core/Device.h"
#include "c10/util/intrusive_ptr.h"
#include "ddp/comm_bytes.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/comm.hpp"

namespace ddp {

// A group's backend for one device type, and its capabilities. Keeps the backend alive.
struct BackendWithCapabilities {
  c10::intrusive_ptr<c10d::Backend> backend;
  CapabilityProvider* declares;  // part of *backend
};

// The group's backend for `device`, if its collectives run on the cores of the calling ranks
// (BackendCapabilities::collectives_use_callers_cores); otherwise nullopt.
std::optional<BackendWithCapabilities> BackendOnCallersCores(c10d::ProcessGroup& group,
                                                             c10::DeviceType device);

// Starts the mean over ranks of `tensor`, in place: with one all-reduce by ReduceOp::AVG over a
// backend whose collectives run on the callers' cores; over others, which may lack AVG, each rank
// divides and then they sum, as PyTorch's hooks do.
c10::intrusive_ptr<c10d::Work> AllReduceMean(c10d::ProcessGroup& group, const at::Tensor& tensor);

// An incomplete future for a tensor on the device of `result`.
c10::intrusive_ptr<c10::ivalue::Future> NewFuture(const at::Tensor& result);

// Averages each bucket by AllReduceMean. Without a hook the Reducer divides in a separate pass and
// then sums.
class AverageHook : public c10d::CppCommHookInterface<c10::intrusive_ptr<c10d::ProcessGroup>>,
                    public ByteCounter {
 public:
  // The mean is multiplied by `*factor`, which must outlive the hook.
  AverageHook(c10::intrusive_ptr<c10d::ProcessGroup> group, const double* factor)
      : CppCommHookInterface(std::move(group)), factor_(factor) {}
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override;

 private:
  const double* const factor_;
};

// Wraps a hook. At the end of backward, the thread that runs backward advances the backend's
// collectives until the last bucket's future is complete. Otherwise that thread would only wait for
// futures, and another thread of this rank would have to wake up to complete them. Outside of
// backward it only calls the hook.
class ProgressHook : public c10d::CommHookInterface {
 public:
  ProgressHook(BackendWithCapabilities backend, std::unique_ptr<c10d::CommHookInterface> inner);

  // Must be called before the first backward.
  void set_inner(std::unique_ptr<c10d::CommHookInterface> inner) { inner_ = std::move(inner); }

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override;
  at::Tensor parseHookResult(const c10::IValue& result) override;

 private:
  const BackendWithCapabilities backend_;
  std::unique_ptr<c10d::CommHookInterface> inner_;
};

}  // namespace ddp
