// c10d's Reducer, and what it leaves to the wrapper in Python. Private to data_parallel.h.
//
//   const uint64_t forward = reducer->PrepareForBackward(outputs);
//   // when backward from these outputs has ended, in a callback of the autograd engine:
//   reducer->FinishBackward(forward);
#pragma once

#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"
#include "torch/csrc/distributed/c10d/reducer.hpp"

namespace ddp {

// Thread-safe where the Reducer is: backward's hooks and callbacks may run in autograd's threads.
class GradientReducer final : public c10d::Reducer {
 public:
  using Reducer::Reducer;

  // To be called after each forward whose backward is to be synchronised, with the tensors that
  // backward may start from (find_unused_parameters) or none. Returns the forward's number.
  uint64_t PrepareForBackward(const std::vector<at::Tensor>& outputs);

  // Whether FinishBackward is needed for the forward that has been prepared last: with
  // find_unused_parameters always, with static_graph in the first iteration.
  bool NeedsFinish() const;

  // To be called at the end of the backward that belongs to this forward; calls for an earlier one
  // are ignored. Marks as ready what got no gradient since no output that leads to it is part of
  // the loss; the first iteration of a static graph starts its all-reduces here.
  void FinishBackward(uint64_t forward);

 private:
  void EnsureSparseGradient(size_t index);

  uint64_t forwards_ = 0;
  bool first_backward_finished_ = false;
};

}  // namespace ddp
