// The part of DistributedDataParallel that does not depend on the module's type: keeps parameters,
// gradients and buffers of a module the same on all ranks. Most programs use ddp.h; this is for
// wrappers of their own.
//
//   DDP_ASSIGN_OR_RETURN(auto parallel, DataParallel::Create(module, group, {}));
//   parallel->PreForward();
//   at::Tensor output = module->forward(input);
//   parallel->PostForward({output});
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "c10/util/Logging.h"
#include "ddp/model_tensors.h"
#include "ddp/options.h"
#include "ddp/verify.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace torch::nn {
class Module;
}

namespace torch::autograd {
struct Node;
}

namespace c10d {
class CommHookInterface;
class Logger;
}  // namespace c10d

namespace ddp {

class GradientReducer;
class ProgressHook;

// The parameters of a module that require a gradient, each once: one that two submodules share has
// its first name. What an optimizer should be given, too.
NamedTensors TrainableParameters(const torch::nn::Module& module);

// Thread-compatible: one thread trains. Keeps the module alive; the module must not gain or lose
// parameters afterwards.
class DataParallel {
 public:
  // Collective unless init_sync is false. `group` null or of size 1: a world of one, in which
  // nothing is ever sent. Otherwise verifies that all ranks hold the same model, and gives all
  // ranks rank 0's parameters and, with broadcast_buffers, buffers. InvalidArgument: no parameter
  // that is not ignored requires a gradient, parameters are on devices of several types, or options
  // make no sense. FailedPrecondition: this module is wrapped already, or the models differ (which
  // tensor). All but the last also in a world of one.
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

  // While false, backward accumulates local gradients and sends nothing (no_sync).
  void set_require_backward_grad_sync(bool require) { require_backward_grad_sync_ = require; }
  bool require_backward_grad_sync() const { return require_backward_grad_sync_; }

  // Replaces what is done with each bucket of gradients, by default the mean over ranks: fp16
  // compression, say. Once, before the first backward, the same on all ranks. The hook must return
  // a future of the bucket's new contents. In a world of one it is never run. `name` appears in the
  // logging data. InvalidArgument: null. FailedPrecondition: there is a hook already.
  absl::Status register_comm_hook(std::unique_ptr<c10d::CommHookInterface> hook,
                                  const std::string& name = "custom");

  // Collective. Gives all ranks rank 0's buffers but the ignored, as evaluation and checkpoints
  // want them.
  void SyncBuffers();

  // Resets gradients of parameters(): to none, or to zero in place. Works with
  // gradient_as_bucket_view.
  void zero_grad(bool set_to_none = true);

  // What c10d's DDP logger knows (PyTorch: _get_ddp_logging_data), by PyTorch's names: world_size,
  // bucket_sizes, rebuilt_bucket_sizes, comm_hook, avg_backward_compute_time, … Times are of
  // sampled iterations. Empty in a world of one.
  c10::DDPLoggingData GetDDPLoggingData() const;

  // All that require a gradient, ignored ones too, each once.
  const NamedTensors& parameters() const { return tensors_.trainable; }
  const DataParallelOptions& options() const { return options_; }
  // Where forward's arguments are to be moved, if device_ids says so.
  const std::optional<c10::Device>& input_device() const { return input_device_; }
  int rank() const;
  int world_size() const;

 private:
  DataParallel(std::shared_ptr<torch::nn::Module> module,
               c10::intrusive_ptr<c10d::ProcessGroup> group, const DataParallelOptions& options,
               ModelTensors tensors);
  absl::Status CheckModule();
  void BuildReducer();
  void MarkAsWrapped();
  void FinishAfterBackward(const std::vector<at::Tensor>& outputs, uint64_t forward);
  [[noreturn]] void RethrowWithNames(const std::string& message) const;

  std::shared_ptr<torch::nn::Module> module_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;  // null in a world of one
  DataParallelOptions options_;
  ModelTensors tensors_;
  std::optional<c10::Device> input_device_;
  std::shared_ptr<GradientReducer> reducer_;  // null in a world of one, or !reduce_gradients
  std::shared_ptr<c10d::Logger> logger_;      // the reducer relies on having one
  ProgressHook* progress_hook_ = nullptr;     // the reducer's, where it has this one
  bool has_comm_hook_ = false;                // of the user
  // Without a reducer: hooks that do nothing, on gradient accumulators.
  std::vector<std::pair<std::shared_ptr<torch::autograd::Node>, uintptr_t>> marks_;
  bool require_backward_grad_sync_ = true;
  bool require_forward_param_sync_ = true;
};

}  // namespace ddp
