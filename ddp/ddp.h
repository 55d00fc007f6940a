// DistributedDataParallel: data-parallel training of any torch::nn module.
//
//   auto net = std::make_shared<Net>();
//   DDP_ASSIGN_OR_RETURN(auto model, ddp::Wrap(net, group));
//   torch::Tensor loss = torch::nll_loss(model->forward(input), target);
//   model->zero_grad();
//   loss.backward();  // averages the gradients over the ranks
//   optimizer.step();
//
// `group` is any c10d::ProcessGroup, for example from //backends:process_group; null for a world
// size of 1, which has no overhead.
#pragma once

#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ddp/data_parallel.h"
#include "ddp/inputs.h"
#include "ddp/sync_batch_norm.h"
#include "ddp/tree/tree.h"
#include "torch/nn/module.h"
#include "torch/nn/pimpl.h"

namespace ddp {

// Wraps a module of type `M` with any forward signature. Thread-compatible. Shares ownership of the
// module. For state dicts, optimizers and evaluation use module(), whose names are unchanged.
// Collective: Wrap, forward (if it broadcasts buffers, also without gradients), and backward from
// its results.
template <typename M>
class DistributedDataParallel {
 public:
  // Errors: see DataParallel::Create.
  static absl::StatusOr<std::shared_ptr<DistributedDataParallel>> Create(
      std::shared_ptr<M> module, c10::intrusive_ptr<c10d::ProcessGroup> group,
      const DataParallelOptions& options = {}) {
    auto parallel = DataParallel::Create(module, std::move(group), options);
    if (!parallel.ok()) return parallel.status();
    return std::shared_ptr<DistributedDataParallel>(
        new DistributedDataParallel(std::move(module), *std::move(parallel)));
  }

  // Calls the module's forward and returns its result. Throws c10::Error; see
  // DataParallel::PreForward.
  template <typename... Args>
  auto forward(Args&&... args) {
    parallel_->PreForward();
    using Output = decltype(module_->forward(std::forward<Args>(args)...));
    if constexpr (std::is_void_v<Output>) {
      RunModule(std::forward<Args>(args)...);
      parallel_->PostForward({});
    } else {
      Output output = RunModule(std::forward<Args>(args)...);
      std::vector<at::Tensor> tensors;
      const DataParallelOptions& options = parallel_->options();
      const bool needs_them = options.find_unused_parameters || options.static_graph;
      if constexpr (Tree<std::remove_cvref_t<Output>>) {
        // Who reduces the gradients instead may have a find_unused_parameters of its own.
        if (needs_them || !options.reduce_gradients) CollectTensors(output, tensors);
      } else {
        TORCH_CHECK(!needs_them,
                    "find_unused_parameters and static_graph need to find the tensors in "
                    "what forward returns: give that type a function FieldsOf (ddp/tree/tree.h)");
      }
      parallel_->PostForward(tensors);
      return output;
    }
  }

  template <typename... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  // Backward from forwards in its scope accumulates gradients locally, also if it runs later. The
  // next synchronised backward reduces the sum.
  class [[nodiscard]] NoSync {
   public:
    explicit NoSync(DataParallel& parallel)
        : parallel_(parallel), before_(parallel.require_backward_grad_sync()) {
      parallel_.set_require_backward_grad_sync(false);
    }
    ~NoSync() { parallel_.set_require_backward_grad_sync(before_); }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    DataParallel& parallel_;
    bool before_;
  };
  NoSync no_sync() { return NoSync(*parallel_); }

  // Once, before the first backward; see DataParallel::register_comm_hook.
  absl::Status register_comm_hook(std::unique_ptr<c10d::CommHookInterface> hook,
                                  const std::string& name = "custom") {
    return parallel_->register_comm_hook(std::move(hook), name);
  }

  void zero_grad(bool set_to_none = true) { parallel_->zero_grad(set_to_none); }

  const std::shared_ptr<M>& module() const { return module_; }
  M* operator->() const { return module_.get(); }
  DataParallel& parallel() { return *parallel_; }
  // Code that calls PreForward, the module and PostForward itself, such as the trainer, uses it.
  const std::shared_ptr<DataParallel>& shared_parallel() const { return parallel_; }

 private:
  DistributedDataParallel(std::shared_ptr<M> module, std::shared_ptr<DataParallel> parallel)
      : module_(std::move(module)), parallel_(std::move(parallel)) {}

  template <typename... Args>
  decltype(auto) RunModule(Args&&... args) {
    return FailTogether(*module_, [&]() -> decltype(auto) {
      if (parallel_->input_device()) {
        return module_->forward(
            OnDevice<Args>(std::forward<Args>(args), *parallel_->input_device()).get()...);
      }
      return module_->forward(std::forward<Args>(args)...);
    });
  }

  std::shared_ptr<M> module_;
  std::shared_ptr<DataParallel> parallel_;
};

// Collective. Wraps a module, given as a std::shared_ptr or as a torch module holder (Linear,
// Sequential, …). Errors: see DataParallel::Create.
template <typename M>
absl::StatusOr<std::shared_ptr<DistributedDataParallel<M>>> Wrap(
    std::shared_ptr<M> module, c10::intrusive_ptr<c10d::ProcessGroup> group,
    const DataParallelOptions& options = {}) {
  return DistributedDataParallel<M>::Create(std::move(module), std::move(group), options);
}

template <typename M>
absl::StatusOr<std::shared_ptr<DistributedDataParallel<M>>> Wrap(
    const torch::nn::ModuleHolder<M>& module, c10::intrusive_ptr<c10d::ProcessGroup> group,
    const DataParallelOptions& options = {}) {
  return DistributedDataParallel<M>::Create(module.ptr(), std::move(group), options);
}

// Returns `wrapped` itself; ignores the other arguments.
template <typename M>
absl::StatusOr<std::shared_ptr<DistributedDataParallel<M>>> Wrap(
    std::shared_ptr<DistributedDataParallel<M>> wrapped, c10::intrusive_ptr<c10d::ProcessGroup>,
    const DataParallelOptions& = {}) {
  return wrapped;
}

}  // namespace ddp
