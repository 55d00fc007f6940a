// DataParallel in a Join (join.h): what a rank without inputs does instead of forward and backward.
#include <vector>

#include "ATen/ops/zeros.h"
#include "ATen/ops/zeros_like.h"
#include "ddp/data_parallel.h"
#include "ddp/reducer.h"
#include "ddp/sync_batch_norm.h"
#include "torch/csrc/autograd/custom_function.h"
#include "torch/nn/module.h"

namespace ddp {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A scalar that depends on all its inputs with a gradient of zero.
class ZeroGradients : public torch::autograd::Function<ZeroGradients> {
 public:
  static at::Tensor forward(AutogradContext* context, at::TensorList parameters,
                            const std::vector<int64_t>& sparse) {
    context->save_for_backward(parameters.vec());
    context->saved_data["sparse"] = sparse;
    return at::zeros({}, parameters[0].options());
  }
  static variable_list backward(AutogradContext* context, const variable_list&) {
    variable_list gradients;
    const std::vector<int64_t> sparse = context->saved_data["sparse"].toIntVector();
    for (const at::Tensor& parameter : context->get_saved_variables()) {
      const bool is_sparse = sparse[gradients.size()] != 0;
      gradients.push_back(is_sparse ? EmptySparseGradient(parameter) : at::zeros_like(parameter));
    }
    gradients.emplace_back();  // of `sparse`
    return gradients;
  }
};

}  // namespace

absl::Status DataParallel::CheckJoin(const JoinOptions& options) const {
  if (reducer_ && has_comm_hook_ && !options.divide_by_initial_world_size) {
    return absl::InvalidArgumentError(
        "Join: the communication hook does not know how many ranks still have inputs, which "
        "divide_by_initial_world_size=false divides by; leave the hook out, or divide by all");
  }
  if (options.throw_on_early_termination || !HasSyncBatchNorm(*module_)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "Join: the module has SyncBatchNorm layers, which communicate within forward: set "
      "throw_on_early_termination");
}

int64_t DataParallel::ForwardInJoin() const {
  if (join_context() == nullptr) return 0;
  const bool grad_mode = torch::GradMode::is_enabled();
  const bool backward = grad_mode && ((reducer_ && require_backward_grad_sync_) ||
                                      join_context()->AnyReducesInBackward());
  return (grad_mode ? kGradModeInJoin : 0) | (require_backward_grad_sync_ ? kGradSyncInJoin : 0) |
         (backward ? kBackwardInJoin : 0);
}

void DataParallel::Shadow(const JoinOperation& operation) {
  if (operation.kind == kSyncBuffersInJoin) return SyncBuffers();
  // What this rank has accumulated is still to be reduced.
  if (!has_unreduced_gradients_) zero_grad();
  const c10::AutoGradMode grad_mode((operation.kind & kGradModeInJoin) != 0);
  const bool before = require_backward_grad_sync_;
  require_backward_grad_sync_ = (operation.kind & kGradSyncInJoin) != 0;
  const bool unreduced = has_unreduced_gradients_;
  PreForward();
  if ((operation.kind & kBackwardInJoin) == 0 || !reducer_) {
    PostForward({});
  } else {
    const at::Tensor output = ShadowOutput();
    PostForward({output});
    output.backward();
  }
  // A shadow adds nothing that would have to be reduced later.
  if (!require_backward_grad_sync_) has_unreduced_gradients_ = unreduced;
  require_backward_grad_sync_ = before;
  if ((operation.kind & kBackwardInJoin) != 0) join_context()->ShadowBackward();
}

// Something that backward can start from.
at::Tensor DataParallel::ShadowOutput() const {
  std::vector<at::Tensor> parameters;
  std::vector<int64_t> sparse;
  const bool find_unused = options_.find_unused_parameters && !options_.static_graph;
  for (size_t i = 0; i < tensors_.reduced.size(); ++i) {
    const at::Tensor& parameter = tensors_.reduced[i].second;
    if (find_unused || reducer_->IsUnusedInStaticGraph(i)) continue;
    parameters.push_back(parameter);
    sparse.push_back(tensors_.sparse[i]);
  }
  if (!parameters.empty()) return ZeroGradients::apply(at::TensorList(parameters), sparse);
  // This rank uses no parameter: the Reducer marks all of them at the end of backward, so that a
  // parameter that no other rank uses keeps its gradient.
  return at::zeros({}, tensors_.reduced[0].second.options()).requires_grad_().mul(1);
}

void DataParallel::FinishJoin(int source) { BroadcastModel(source); }

}  // namespace ddp
