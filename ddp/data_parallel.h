// The part of DistributedDataParallel that does not depend on the module's type: keeps parameters,
// gradients and buffers of a module the same on all ranks. Most programs use ddp.h; this is for
// wrappers of their own.
//
//   DDP_ASSIGN_OR_RETURN(auto parallel, DataParallel::Create(module, group, {}));
//   parallel->PreForward();
//   at::Tensor output = module->forward(input);
//   parallel->PostForward({output});
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ddp/options.h"
#include "ddp/verify.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace torch::nn {
class Module;
}

namespace c10d {
class Logger;
class Reducer;
}  // namespace c10d

namespace ddp {

// The parameters of a module that require a gradient, each once: one that two submodules share has
// its first name. What an optimizer should be given, too.
NamedTensors TrainableParameters(const torch::nn::Module& module);

// Thread-compatible: one thread trains. Keeps the module alive; the module must not gain or lose
// parameters afterwards.
class DataParallel {
 public:
  // Collective. `group` null or of size 1: a world of one, in which nothing is ever sent. Otherwise
  // verifies that all ranks hold the same model, and gives all ranks rank 0's parameters and
  // buffers.
  // Gradients are dense: Embedding's sparse ones are not supported.
  // InvalidArgument: no parameter requires a gradient, or options contradict each other.
  // FailedPrecondition: the models differ (which tensor), or this module is wrapped already.
  static absl::StatusOr<std::unique_ptr<DataParallel>> Create(
      std::shared_ptr<torch::nn::Module> module, c10::intrusive_ptr<c10d::ProcessGroup> group,
      const DataParallelOptions& options);

  ~DataParallel();
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;

  // To be called before and after each forward whose backward is to be synchronised. Collective
  // where buffers are broadcast or buckets rebuilt: all ranks run the same number of forwards.
  // `outputs`: the tensors backward may start from; used with find_unused_parameters and
  // static_graph. Throws c10::Error, as torch does inside a forward: if a parameter got no gradient
  // in the iteration before (with its name), or if the ranks cannot be reached.
  void PreForward();
  void PostForward(const std::vector<at::Tensor>& outputs);

  // While false, backward accumulates local gradients and sends nothing (no_sync). Not with
  // static_graph, whose Reducer would count such a backward as part of the first: forward throws.
  void set_require_backward_grad_sync(bool require) { require_backward_grad_sync_ = require; }
  bool require_backward_grad_sync() const { return require_backward_grad_sync_; }

  // Collective. Gives all ranks rank 0's buffers, as evaluation and checkpoints want them.
  void SyncBuffers();

  // Resets gradients of parameters(): to none, or to zero in place. Works with
  // gradient_as_bucket_view.
  void zero_grad(bool set_to_none = true);

  const NamedTensors& parameters() const { return parameters_; }
  const DataParallelOptions& options() const { return options_; }
  int rank() const;
  int world_size() const;

 private:
  DataParallel(std::shared_ptr<torch::nn::Module> module,
               c10::intrusive_ptr<c10d::ProcessGroup> group, const DataParallelOptions& options);
  void BuildReducer();
  void DelayAllReduceAfterFirstBackward(const std::vector<at::Tensor>& outputs);
  [[noreturn]] void RethrowWithNames(const std::string& message) const;

  std::shared_ptr<torch::nn::Module> module_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;  // null in a world of one
  DataParallelOptions options_;
  NamedTensors parameters_;  // those that require a gradient, each once
  std::vector<at::Tensor> buffers_;
  std::shared_ptr<c10d::Reducer> reducer_;  // null in a world of one
  std::shared_ptr<c10d::Logger> logger_;    // the reducer relies on having one
  bool require_backward_grad_sync_ = true;
  bool require_forward_param_sync_ = true;
  bool first_synchronized_forward_ = true;
};

}  // namespace ddp
