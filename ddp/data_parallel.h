// The part of DistributedDataParallel that does not depend on the module's type: keeps parameters,
// gradients and buffers of a module equal on all ranks. Most programs use ddp.h; use this for a
// wrapper of your own.
//
//   DDP_ASSIGN_OR_RETURN(auto parallel, DataParallel::Create(module, group, {}));
//   parallel->PreForward();
//   at::Tensor output = module->forward(input);
//   parallel->PostForward({output});
//   loss(output).backward();  // all-reduces the gradients
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
#include "ddp/join.h"
#include "ddp/model_tensors.h"
#include "ddp/model_wrapper.h"
#include "ddp/options.h"
#include "third_party/libtorch/compat.h"
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

class BufferBroadcast;
class CommBytesProvider;
class GradientReducer;
class ProgressHook;

// The parameters of a module that require a gradient, for an optimizer. Each is listed once: one
// that submodules share has its first name. Thread-compatible.
NamedTensors TrainableParameters(const torch::nn::Module& module);

// Thread-compatible: one thread trains. Shares ownership of the module, whose trainable parameters
// must all be there: PreForward refuses those that are added or unfrozen later, except ignored
// ones.
class DataParallel : public ModelWrapper, public Joinable {
 public:
  // Collective unless init_sync is false. Verifies that all ranks have the same model, then
  // broadcasts rank 0's parameters and, with broadcast_buffers, buffers. A null `group` or one of
  // size 1 means a world size of 1, with no communication at all.
  //
  // InvalidArgument: no parameter outside `ignored` requires a gradient, parameters are on devices
  // of several types, or options are invalid (OptionError). FailedPrecondition: the module is
  // wrapped already, or the models differ (names the tensor). With init_sync every rank returns an
  // error if one does: its own, or "rank N: …" of the lowest failed rank. Other codes if
  // communication fails; see CatchStatus, and IsFromCollective (collective_status.h).
  static absl::StatusOr<std::unique_ptr<DataParallel>> Create(
      std::shared_ptr<torch::nn::Module> module, c10::intrusive_ptr<c10d::ProcessGroup> group,
      const DataParallelOptions& options);

  ~DataParallel() override;
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;

  // Call these before and after each forward. PreForward is collective if it broadcasts buffers or
  // rebuilds buckets, so all ranks must run the same number of forwards. After several forwards
  // there may be one backward from all of them, or one from each, in any order: each is reduced.
  // `outputs`: the tensors that backward may start from; used with find_unused_parameters (also of
  // a ZeroRedundancyOptimizer) and static_graph. Throw c10::Error, as torch does in forward: if a
  // parameter got no gradient in the previous iteration (with its name), or its backward ended with
  // an exception; if one requires a gradient that did not when the module was wrapped, or was
  // not part of it (with its name), as its gradients would not be averaged; if static_graph's first
  // backward started from other tensors than `outputs`, so that its gradients were not averaged; if
  // buffers have got other shapes on some ranks; or if communication fails.
  void PreForward() override;
  void PostForward(const std::vector<at::Tensor>& outputs) override;

  // While false, backward accumulates gradients locally, without communication (no_sync).
  void set_require_backward_grad_sync(bool require) override {
    require_backward_grad_sync_ = require;
  }
  bool require_backward_grad_sync() const { return require_backward_grad_sync_; }

  // Replaces the reduction of each bucket of gradients, by default the mean over ranks, for example
  // by fp16 compression. Call it at most once, before the first backward, on all ranks. The hook
  // returns a future of the bucket's new contents. Never run with a world size of 1. `name` appears
  // in the logging data. InvalidArgument: null hook. FailedPrecondition: a hook is set already.
  absl::Status register_comm_hook(std::unique_ptr<c10d::CommHookInterface> hook,
                                  const std::string& name = "custom") override;

  // Whether register_comm_hook was called.
  bool has_comm_hook() const override { return has_comm_hook_; }

  // Bytes that this rank has handed to collectives for its gradients since construction, as
  // comm_bytes.h counts them. Without a hook: the size of all dense gradients per synchronised
  // backward. Sparse gradients are counted only over backends with collectives_use_callers_cores.
  // nullopt with a hook that does not count (CommBytesProvider); 0 with a world size of 1 and
  // without reduce_gradients. Costs nothing if it is not called. Not collective; not during
  // backward.
  std::optional<int64_t> comm_bytes() const override;

  // Empty, and not restored, without reduce_gradients, and with find_unused_parameters unless
  // static_graph is set. With static_graph it is empty until the second backward.
  std::vector<int64_t> bucket_order() const override;
  bool RestoreBucketOrder(const std::vector<int64_t>& order) override;

  // Collective. Broadcasts rank 0's buffers, except ignored ones: call it before evaluation and
  // checkpoints. Throws c10::Error if communication fails, or if the buffers' shapes differ between
  // ranks, which is checked by the first broadcast without init_sync.
  void SyncBuffers() override;

  // Resets the gradients of parameters(): to undefined, or to zero in place. Works with
  // gradient_as_bucket_view, where torch::optim::Optimizer::zero_grad does not. Those that a
  // sharded optimizer of stage 2 has reduced, too, if all of its parameters are this module's.
  void zero_grad(bool set_to_none = true) override;

  // Join (join.h) uses these. In a Join, the buffers that each forward broadcasts are those of the
  // lowest rank that still has inputs (PyTorch: of the highest).
  c10::intrusive_ptr<c10d::ProcessGroup> join_group() const override { return group_; }
  c10::Device join_device() const override { return tensors_.reduced[0].second.device(); }
  absl::Status CheckJoin(const JoinOptions& options) const override;
  void Shadow(const JoinOperation& operation) override;
  bool TakesSteps() const override { return false; }
  bool IsReducing() const override;
  void SetGradientFactor(double factor) override { gradient_factor_ = factor; }
  void FinishJoin(int source) override;

  // Data of c10d's DDP logger, with PyTorch's names (_get_ddp_logging_data): world_size,
  // bucket_sizes, rebuilt_bucket_sizes, comm_hook, avg_backward_compute_time, … Times, in
  // nanoseconds, are of sampled iterations. Empty with a world size of 1.
  c10::DDPLoggingData GetDDPLoggingData() const;

  // TrainableParameters of the module, including ignored ones.
  const NamedTensors& parameters() const { return tensors_.trainable; }
  const DataParallelOptions& options() const { return options_; }
  // The device to which forward's arguments must be moved; nullopt without device_ids.
  const std::optional<c10::Device>& input_device() const { return input_device_; }
  bool reduces_gradients() const override { return options_.reduce_gradients; }
  int rank() const;
  int world_size() const override;
  const torch::nn::Module* module() const override { return module_.get(); }
  Joinable* joinable() override { return this; }
  const std::vector<std::string>* ignored() const override { return &options_.ignored; }

 private:
  DataParallel(std::shared_ptr<torch::nn::Module> module,
               c10::intrusive_ptr<c10d::ProcessGroup> group, const DataParallelOptions& options,
               ModelTensors tensors);
  absl::Status CheckModule();
  void BuildReducer();
  // Kinds of JoinOperation: bits of a forward, or one of the others.
  static constexpr int64_t kGradModeInJoin = 1, kGradSyncInJoin = 2, kSyncBuffersInJoin = 4,
                           kBackwardInJoin = 8;
  int64_t ForwardInJoin() const;
  void WatchBackwards(bool watch);
  void BeforeGradient(size_t parameter);
  void ExpectAgain();
  void AnnounceBackward(uint64_t forward);
  void NoteResets();
  void ShareHeld(std::vector<uint8_t>& held) const;
  void ShadowBackward();
  void WarnOfOptimizers();
  void BroadcastModel(int source);
  void RefuseNewParameters();
  at::Tensor ShadowOutput() const;
  void MarkAsWrapped();
  void FinishAfterBackward(const std::vector<at::Tensor>& outputs, uint64_t forward);
  [[noreturn]] void RethrowWithNames(const std::string& message) const;

  std::shared_ptr<torch::nn::Module> module_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;  // null with a world size of 1
  DataParallelOptions options_;
  ModelTensors tensors_;
  std::optional<c10::Device> input_device_;
  std::unique_ptr<BufferBroadcast> buffers_;  // null with a world size of 1
  // The module's parameters (TensorImpl) that required a gradient when RefuseNewParameters last
  // looked for new ones, in order.
  std::vector<const void*> trainable_;
  std::shared_ptr<GradientReducer> reducer_;    // null with a world size of 1, or !reduce_gradients
  std::shared_ptr<c10d::Logger> logger_;        // the reducer requires one
  ProgressHook* progress_hook_ = nullptr;       // owned by the reducer; may be null
  const CommBytesProvider* counter_ = nullptr;  // the hook's part that counts, if it has one
  bool has_comm_hook_ = false;                  // the user's
  // The no-op hooks on gradient accumulators if there is no reducer (MarkAsWrapped).
  std::vector<std::pair<NodePtr, uintptr_t>> marks_;
  bool require_backward_grad_sync_ = true;
  bool require_forward_param_sync_ = true;
  bool has_unreduced_gradients_ = false;  // of backwards without synchronisation
  double gradient_factor_ = 1;            // see Joinable::SetGradientFactor
  // The position of each parameter's hook, once it has one.
  std::vector<std::optional<unsigned>> backward_hooks_;
  bool watches_backwards_ = false;
  // Ranks with inputs use these in a Join.
  bool awaits_backward_ = false;      // since the last forward with gradients
  uint64_t forward_to_announce_ = 0;  // whose backward will be reduced; 0: none
  // The least of each gradient that backwards have found since the last one that was reduced; empty
  // if there was none.
  std::vector<uint8_t> held_;
  int64_t reductions_at_backward_ = -1;  // when the last backward was announced; -1: none was
  bool has_run_out_ = false;             // a rank, in a Join before
  bool has_warned_ = false;              // see WarnOfOptimizers
};

}  // namespace ddp
