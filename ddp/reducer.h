// c10d's Reducer, plus what PyTorch does in DistributedDataParallel's Python code, and the hooks by
// which it takes the mean over ranks. Private to this folder; hooks to choose from are in hooks/.
//
//   const uint64_t forward = reducer->PrepareForBackward(outputs, /*factor=*/1);
//   // in a callback of the autograd engine, after backward from these outputs:
//   reducer->FinishBackward(forward);
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "base/backend_capabilities.h"
#include "c10/core/Device.h"
#include "c10/util/intrusive_ptr.h"
#include "ddp/comm_bytes.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/comm.hpp"
#include "torch/csrc/distributed/c10d/reducer.hpp"

namespace ddp {

// A gradient without elements, like an Embedding's: only the first dimension is sparse.
at::Tensor EmptySparseGradient(const at::Tensor& parameter);

// It is as thread-safe as the Reducer: hooks and callbacks may run in autograd's threads.
class GradientReducer final : public c10d::Reducer {
 public:
  using Reducer::Reducer;

  // Call it after each forward whose backward is synchronised, with the tensors that backward may
  // start from if find_unused_parameters, else none. `factor`: the mean of gradients is multiplied
  // by it; ignored with a communication hook. Returns the number of this forward.
  uint64_t PrepareForBackward(const std::vector<at::Tensor>& outputs, double factor);

  // Whether a backward may still come besides the one that is expected: without static_graph, of a
  // synchronised forward that another followed before any backward.
  bool has_outstanding() const { return outstanding_ > 0; }

  // A hook that autograd runs before the gradients of a backward calls it: if the one before has
  // been reduced, and one is outstanding, this is it, and its gradients are expected as those of
  // the first were. Returns the number of the last forward then, else 0.
  uint64_t ExpectAgain(double factor);

  // Backwards so far in which all buckets were reduced, and finished.
  int64_t reductions() const {
    return reductions_ + (forwards_ > 0 && !expect_autograd_hooks_ ? 1 : 0);
  }

  // Call it after each forward in gradient mode whose backward is not synchronised.
  void SkipBackward();

  // Whether FinishBackward must be called for the last forward: always with find_unused_parameters;
  // with static_graph in the first iteration, and in all if this rank uses no parameter, or leaves
  // out one with a sparse gradient.
  bool NeedsFinish() const;

  // Tells a hook that autograd runs whether FinishBackward must follow the backward that is under
  // way. False for grad(), which runs no parameter's hook. A backward of chosen inputs needs it if
  // they are all parameters, or, with static_graph, at least one. (Without static_graph, backwards
  // of some parameters each may complete the gradients together.)
  bool ComputesGradients() const;

  // Call it before each forward in gradient mode: hooks that torch::load or Module::to have taken
  // from parameters are theirs again. Returns the first parameter that cannot get its hook back, or
  // the number of parameters; see gradient_hooks.h.
  size_t RestoreHooks();

  // Tells a hook that autograd runs before this parameter whether the backward that is under way
  // accumulates its gradient.
  bool Accumulates(size_t index) const;

  // Whether a backward with static_graph has computed gradients after a synchronised forward, but
  // FinishBackward was not called, in the first iteration. These gradients are this rank's own.
  bool LostFirstBackward() const;

  // Whether the next backward, or the one that is under way, is the first of a static graph.
  bool IsFirstOfStaticGraph() const { return static_graph_ && !first_backward_finished_; }

  // While true, a first backward of a static graph stands for one of the other ranks' (Join): this
  // rank expects the gradients that any of them has had, and waits to learn them.
  void set_adopts_static_graph(bool adopts) { adopts_static_graph_ = adopts; }

  // Whether the first iteration of a static graph gave this parameter no gradient.
  bool IsUnusedInStaticGraph(size_t index) const;

  // Call it at the end of the backward of this forward; with static_graph, which counts the uses of
  // parameters in several backwards together, calls for earlier forwards are ignored. Marks
  // parameters without a gradient as ready: those that only unused outputs depend on. In the first
  // iteration of a static graph it starts the all-reduces.
  void FinishBackward(uint64_t forward);

  // Call it before each forward in gradient mode: rebuilds the buckets in the order in which
  // gradients have arrived, if they are due. Collective in that case. Throws c10::Error if the
  // backward before has not been reduced completely.
  void RebuildBuckets();

  // See ModelWrapper.
  std::vector<int64_t> bucket_order() const;
  bool RestoreBucketOrder(const std::vector<int64_t>& order);

 private:
  void Expect(const std::vector<at::Tensor>& outputs, double factor);
  void RecordStaticGraph();
  std::vector<size_t> UnusedParameters() const;
  void EnsureSparseGradient(size_t index);

  uint64_t forwards_ = 0;
  int64_t reductions_ = 0;   // before gradients were last expected
  int64_t outstanding_ = 0;  // see has_outstanding
  std::mutex again_mutex_;   // of ExpectAgain, which may run in several of autograd's threads
  // The order from which buckets were rebuilt. Their concatenation may be another order: buckets
  // that are not full come last, by dtype.
  std::vector<int64_t> bucket_order_;
  // These are used with a static graph only.
  bool first_backward_finished_ = false;
  bool adopts_static_graph_ = false;
  bool awaits_first_backward_ = false;   // since the last synchronised forward
  bool finishes_all_backwards_ = false;  // see NeedsFinish
  std::vector<bool> is_unused_;          // by parameter, since the first backward
};

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
