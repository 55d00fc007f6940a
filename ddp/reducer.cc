#include "ddp/reducer.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/sparse_coo_tensor.h"
#include "ddp/gradient_hooks.h"
#include "third_party/libtorch/compat.h"
#include "torch/csrc/autograd/engine.h"
#include "torch/csrc/autograd/graph_task.h"

namespace ddp {
namespace {

// In backward_stats_, whose other values are times since the end of forward.
constexpr int64_t kNotReady = -1;

// Whether the backward that is under way runs this node.
bool IsAccumulated(const NodePtr& accumulator) {
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen == nullptr || chosen->empty()) return true;
  const auto found = chosen->find(accumulator.get());
  // What grad() returns is captured instead.
  return found != chosen->end() && found->second.needed_ && !found->second.captures_;
}

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
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    // There was no backward since the last forward: there may be one for both, or one for each.
    if (!static_graph_ && expect_autograd_hooks_) ++outstanding_;
  }
  Expect(outputs, factor);
  return ++forwards_;
}

uint64_t GradientReducer::ExpectAgain(double factor) {
  const std::lock_guard<std::mutex> once(again_mutex_);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (outstanding_ == 0 || expect_autograd_hooks_) return 0;
    --outstanding_;
  }
  Expect({}, factor);
  const std::lock_guard<std::mutex> lock(mutex_);
  // Without outputs to look from, the Reducer takes all for unused: FinishBackward marks those that
  // are.
  unused_parameters_.clear();
  return forwards_;
}

void GradientReducer::Expect(const std::vector<at::Tensor>& outputs, double factor) {
  // The Reducer expects gradients from here to the end of a synchronised backward. Counting here
  // costs a backward nothing.
  reductions_ = reductions();
  prepare_for_backward(outputs);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!has_rebuilt_bucket_) {
    // Where no forward came since the first backward: the next one's order counts.
    rebuilt_params_.clear();
    rebuilt_param_indices_.clear();
  }
  // For one backward: the Reducer resets it.
  div_factor_ = static_cast<int>(std::lround(process_group_->getSize() / factor));
  std::fill(backward_stats_.begin(), backward_stats_.end(), kNotReady);
  if (IsFirstOfStaticGraph()) {
    // The Reducer counts uses of parameters from the first backward on, including those under
    // no_sync, and would expect the sum in every later iteration. Reset the counts.
    numGradHooksTriggeredMap_.clear();
    num_bwd_calls_ = 0;
    first_autograd_hook_called_ = false;
    awaits_first_backward_ = true;
  } else {
    // The Reducer marks unused parameters at the first gradient, and fails on undefined sparse
    // ones: mark these in FinishBackward instead.
    unused_parameters_.erase(
        std::remove_if(unused_parameters_.begin(), unused_parameters_.end(),
                       [this](size_t index) { return expect_sparse_gradients_[index]; }),
        unused_parameters_.end());
  }
}

void GradientReducer::SkipBackward() {
  const std::lock_guard<std::mutex> lock(mutex_);
  awaits_first_backward_ = false;
  outstanding_ = 0;  // whatever comes is part of the next reduction
}

bool GradientReducer::NeedsFinish() const {
  return static_graph_ ? !first_backward_finished_ || finishes_all_backwards_
                       : find_unused_parameters_;
}

bool GradientReducer::ComputesGradients() const {
  return static_graph_
             ? std::any_of(grad_accumulators_.begin(), grad_accumulators_.end(), IsAccumulated)
             : std::all_of(grad_accumulators_.begin(), grad_accumulators_.end(), IsAccumulated);
}

size_t GradientReducer::RestoreHooks() {
  size_t index = 0;
  while (index < params_.size() && RestoreAccumulator(params_[index], grad_accumulators_[index])) {
    ++index;
  }
  return index;
}

bool GradientReducer::Accumulates(size_t index) const {
  return IsAccumulated(grad_accumulators_[index]);
}

bool GradientReducer::LostFirstBackward() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return IsFirstOfStaticGraph() && awaits_first_backward_ && num_bwd_calls_ > 0;
}

bool GradientReducer::IsUnusedInStaticGraph(size_t index) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_graph_ && first_backward_finished_ && is_unused_[index];
}

void GradientReducer::FinishBackward(uint64_t forward) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if ((static_graph_ && forward != forwards_) || !expect_autograd_hooks_ || !NeedsFinish()) return;
  // The loop also marks the parameters that the Reducer would mark at the first gradient.
  has_marked_unused_parameters_ = true;
  const bool marks_all = !static_graph_ || !first_backward_finished_;
  if (IsFirstOfStaticGraph()) {
    RecordStaticGraph();
  } else if (static_graph_) {
    // Not the first, also if this rank uses no parameter. The Reducer appends the unused ones to
    // the order in which it rebuilds buckets.
    num_bwd_calls_ = std::max<long>(num_bwd_calls_, 2);
    unused_parameters_ = UnusedParameters();
  }
  for (size_t index = 0; index < params_.size(); ++index) {
    if (backward_stats_[index] != kNotReady || !(marks_all || is_unused_[index])) continue;
    EnsureSparseGradient(index);
    mark_variable_ready(index);
  }
}

void GradientReducer::RebuildBuckets() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    // The Reducer finds no parameter without a gradient then, and reports a bug of its own.
    TORCH_CHECK(!require_finalize_ || next_bucket_ < buckets_.size(),
                "the backward before has ended with an exception after the last gradient had come, "
                "so that gradients are not averaged: destroy the wrapper and wrap the module "
                "again");
    if (!has_rebuilt_bucket_) bucket_order_ = rebuilt_param_indices_;
  }
  rebuild_buckets();
}

std::vector<int64_t> GradientReducer::bucket_order() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (has_rebuilt_bucket_) return bucket_order_;
  const bool is_complete = rebuilt_param_indices_.size() == params_.size();
  return is_complete ? rebuilt_param_indices_ : std::vector<int64_t>();
}

// The Reducer records the order in which gradients arrive, and then rebuilds its buckets from that
// record.
bool GradientReducer::RestoreBucketOrder(const std::vector<int64_t>& order) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (forwards_ > 0 || !should_rebuild_buckets() || order.size() != params_.size()) return false;
    std::vector<bool> seen(order.size());
    for (const int64_t index : order) {
      if (index < 0 || index >= static_cast<int64_t>(order.size()) || seen[index]) return false;
      seen[index] = true;
    }
    rebuilt_param_indices_ = order;
    rebuilt_params_.clear();
    for (const int64_t index : order) rebuilt_params_.push_back(params_[index]);
  }
  RebuildBuckets();
  return true;
}

// What the Reducer's delay_all_reduce() does, except for the reduction. That function also waits
// for the all-reduces, which never end if a hook continues them in a later callback of autograd
// (hooks/rounds.h), and it tells hooks of no bucket that it is the last.
void GradientReducer::RecordStaticGraph() {
  first_backward_finished_ = true;
  awaits_first_backward_ = false;
  num_bwd_calls_ = 1;  // the first, also if this rank uses no parameter
  // A parameter that no rank uses keeps its gradient.
  local_used_map_dev_.copy_(local_used_map_);
  std::vector<at::Tensor> used = {local_used_map_dev_};
  local_used_work_ = process_group_->allreduce(used);
  if (adopts_static_graph_) {
    local_used_work_->wait();
    const at::Tensor used_by_any = local_used_map_dev_.cpu();
    for (size_t index = 0; index < params_.size(); ++index) {
      numGradHooksTriggeredMap_[index] = used_by_any.const_data_ptr<int>()[index] == 0 ? 0 : 1;
    }
  }
  is_unused_.resize(params_.size());
  bool leaves_out_sparse = false;
  for (size_t index = 0; index < params_.size(); ++index) {
    const auto uses = numGradHooksTriggeredMap_.find(index);
    is_unused_[index] = uses == numGradHooksTriggeredMap_.end() || uses->second == 0;
    leaves_out_sparse |= is_unused_[index] && expect_sparse_gradients_[index];
  }
  unused_parameters_ = UnusedParameters();
  finishes_all_backwards_ = leaves_out_sparse || unused_parameters_.size() == params_.size();
}

std::vector<size_t> GradientReducer::UnusedParameters() const {
  std::vector<size_t> unused;
  for (size_t index = 0; index < is_unused_.size(); ++index) {
    if (is_unused_[index]) unused.push_back(index);
  }
  return unused;
}

// Makes an empty sparse gradient if there is none; other ranks may have elements.
void GradientReducer::EnsureSparseGradient(size_t index) {
  if (!expect_sparse_gradients_[index]) return;
  const at::Tensor& parameter = params_[index];
  at::Tensor& gradient = parameter.mutable_grad();
  if (!gradient.defined()) gradient = EmptySparseGradient(parameter);
}

std::optional<BackendWithCapabilities> BackendOnCallersCores(c10d::ProcessGroup& group,
                                                             c10::DeviceType device) {
  if (device != c10::DeviceType::CPU) return std::nullopt;
  c10::intrusive_ptr<c10d::Backend> backend = group.getBackend(device);
  auto* declares = dynamic_cast<CapabilityProvider*>(backend.get());
  if (declares == nullptr || !declares->capabilities().collectives_use_callers_cores) {
    return std::nullopt;
  }
  return BackendWithCapabilities{std::move(backend), declares};
}

c10::intrusive_ptr<c10d::Work> AllReduceMean(c10d::ProcessGroup& group, const at::Tensor& tensor) {
  c10d::AllreduceOptions options;
  std::vector<at::Tensor> tensors = {tensor};
  if (BackendOnCallersCores(group, tensor.device().type())) {
    options.reduceOp = c10d::ReduceOp::AVG;
  } else {
    const at::NoGradGuard no_grad;
    tensors[0].div_(group.getSize());
  }
  return group.allreduce(tensors, options);
}

c10::intrusive_ptr<c10::ivalue::Future> NewFuture(const at::Tensor& result) {
  std::vector<c10::Device> devices;
  if (!result.is_cpu()) devices.push_back(result.device());
  return c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), devices);
}

c10::intrusive_ptr<c10::ivalue::Future> AverageHook::runHook(c10d::GradBucket& bucket) {
  CountBytes(bucket.getBuffer());
  if (*factor_ != 1) bucket.getBufferRef().mul_(*factor_);
  return AllReduceMean(*state_, bucket.getBuffer())->getFuture();
}

ProgressHook::ProgressHook(BackendWithCapabilities backend,
                           std::unique_ptr<c10d::CommHookInterface> inner)
    : backend_(std::move(backend)), inner_(std::move(inner)) {}

c10::intrusive_ptr<c10::ivalue::Future> ProgressHook::runHook(c10d::GradBucket& bucket) {
  const c10::intrusive_ptr<c10::ivalue::Future> future = inner_->runHook(bucket);
  if (!bucket.isLast() || torch::autograd::get_current_graph_task_id() == -1) return future;
  // This callback runs before the Reducer's own, which is queued after this hook returns. Do not
  // advance collectives here: the rest of backward may have to run before other ranks can reach
  // their all-reduce. Errors stay in the futures, which the Reducer checks.
  torch::autograd::Engine::get_default_engine().queue_callback([backend = backend_, future] {
    backend.declares->Progress([&future] { return future->completed(); });
  });
  return future;
}

at::Tensor ProgressHook::parseHookResult(const c10::IValue& result) {
  return inner_->parseHookResult(result);
}

}  // namespace ddp
