// c10d's Reducer, plus what PyTorch does in DistributedDataParallel's Python code. Private to
// data_parallel.h.
//
//   const uint64_t forward = reducer->PrepareForBackward(outputs, /*factor=*/1);
//   // in a callback of the autograd engine, after backward from these outputs:
//   reducer->FinishBackward(forward);
#pragma once

#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"
#include "torch/csrc/distributed/c10d/reducer.hpp"

namespace ddp {

// A gradient without elements, like an Embedding's: only the first dimension is sparse.
at::Tensor EmptySparseGradient(const at::Tensor& parameter);

// As thread-safe as the Reducer: hooks and callbacks may run in autograd's threads.
class GradientReducer final : public c10d::Reducer {
 public:
  using Reducer::Reducer;

  // Call it after each forward whose backward is synchronised, with the tensors that backward may
  // start from if find_unused_parameters, else none. `factor`: the mean of gradients is multiplied
  // by it; ignored with a communication hook. Returns the number of this forward.
  uint64_t PrepareForBackward(const std::vector<at::Tensor>& outputs, double factor);

  // Backwards so far in which all buckets were reduced, and finished.
  int64_t reductions() const {
    return reductions_ + (forwards_ > 0 && !expect_autograd_hooks_ ? 1 : 0);
  }

  // Whether FinishBackward must be called for the last forward: always with find_unused_parameters,
  // in the first iteration with static_graph, else never.
  bool NeedsFinish() const;

  // Whether the first iteration of a static graph gave this parameter no gradient.
  bool IsUnusedInStaticGraph(size_t index) const;

  // Call it at the end of the backward of this forward; calls for earlier forwards are ignored.
  // Marks parameters without a gradient as ready: those that only unused outputs depend on. In the
  // first iteration of a static graph it starts the all-reduces.
  void FinishBackward(uint64_t forward);

 private:
  void EnsureSparseGradient(size_t index);

  uint64_t forwards_ = 0;
  int64_t reductions_ = 0;  // before the last forward
  bool first_backward_finished_ = false;
};

}  // namespace ddp
