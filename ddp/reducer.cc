#include "ddp/reducer.h"

#include <algorithm>
#include <cmath>
#include <mutex>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/sparse_coo_tensor.h"

namespace ddp {
namespace {

// In backward_stats_, whose other values are times since the end of forward.
constexpr int64_t kNotReady = -1;

}  // namespace

at::Tensor EmptySparseGradient(const at::Tensor& parameter) {
  const at::NoGradGuard no_grad;
  const at::TensorOptions options = parameter.options().requires_grad(false);
  std::vector<int64_t> rows = parameter.sizes().vec();
  rows[0] = 0;
  return at::sparse_coo_tensor(at::empty({1, 0}, options.dtype(at::kLong)),
                               at::empty(rows, options), parameter.sizes());
}

uint64_t GradientReducer::PrepareForBackward(const std::vector<at::Tensor>& outputs,
                                             double factor) {
  // The Reducer expects gradients from here to the end of a synchronised backward. Counting here
  // costs a backward nothing.
  reductions_ = reductions();
  prepare_for_backward(outputs);
  const std::lock_guard<std::mutex> lock(mutex_);
  // For one backward: the Reducer resets it.
  div_factor_ = static_cast<int>(std::lround(process_group_->getSize() / factor));
  std::fill(backward_stats_.begin(), backward_stats_.end(), kNotReady);
  if (static_graph_) {
    if (!first_backward_finished_) {
      // The Reducer counts uses of parameters from the first backward on, including those under
      // no_sync, and would expect the sum in every later iteration. Reset the counts.
      numGradHooksTriggeredMap_.clear();
      num_bwd_calls_ = 0;
      first_autograd_hook_called_ = false;
    }
    for (size_t index : unused_parameters_) EnsureSparseGradient(index);
  } else {
    // The Reducer fails on undefined sparse gradients: mark these in FinishBackward instead.
    unused_parameters_.erase(
        std::remove_if(unused_parameters_.begin(), unused_parameters_.end(),
                       [this](size_t index) { return expect_sparse_gradients_[index]; }),
        unused_parameters_.end());
  }
  return ++forwards_;
}

bool GradientReducer::NeedsFinish() const {
  return static_graph_ ? !first_backward_finished_ : find_unused_parameters_;
}

bool GradientReducer::IsUnusedInStaticGraph(size_t index) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_graph_ && first_backward_finished_ &&
         std::find(unused_parameters_.begin(), unused_parameters_.end(), index) !=
             unused_parameters_.end();
}

void GradientReducer::FinishBackward(uint64_t forward) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (forward != forwards_ || !expect_autograd_hooks_ || !NeedsFinish()) return;
    if (!static_graph_) {
      // The loop also marks the parameters that the Reducer would mark at the first gradient.
      has_marked_unused_parameters_ = true;
      for (size_t index = 0; index < params_.size(); ++index) {
        if (backward_stats_[index] != kNotReady) continue;
        EnsureSparseGradient(index);
        mark_variable_ready(index);
      }
      return;
    }
    first_backward_finished_ = true;
    for (size_t index = 0; index < params_.size(); ++index) EnsureSparseGradient(index);
  }
  delay_all_reduce();
}

// Makes an empty sparse gradient if there is none; other ranks may have elements.
void GradientReducer::EnsureSparseGradient(size_t index) {
  if (!expect_sparse_gradients_[index]) return;
  const at::Tensor& parameter = params_[index];
  at::Tensor& gradient = parameter.mutable_grad();
  if (!gradient.defined()) gradient = EmptySparseGradient(parameter);
}

}  // namespace ddp
