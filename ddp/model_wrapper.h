// Calls of a trainer around a module's forward and backward: the interface of
// DistributedDataParallel, and wrappers by name.
//
//   DDP_ASSIGN_OR_RETURN(const ModelWrapperFactory wrap, ModelWrapperRegistry::Find("ddp"));
//   DDP_ASSIGN_OR_RETURN(std::shared_ptr<ModelWrapper> model, wrap(module, group, {}));
//   model->PreForward();
//   at::Tensor output = module->forward(input);
//   model->PostForward({output});
//   loss(output).backward();
//
// A program adds one of its own by a Registration (base/registry.h) in a target with
// alwayslink = True; `--model_wrapper=NAME` of a trainer then finds it:
//
//   const Registration<ModelWrapperRegistry> kMine("mine", &WrapMine);
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/registry.h"
#include "c10/util/intrusive_ptr.h"
#include "ddp/options.h"

namespace c10d {
class CommHookInterface;
class ProcessGroup;
}  // namespace c10d

namespace torch::nn {
class Module;
}

namespace ddp {

class Joinable;

// Thread-compatible. The functions are called on all ranks in the same order, and may be
// collective; DataParallel (data_parallel.h) says more about each.
class ModelWrapper {
 public:
  virtual ~ModelWrapper() = default;

  // The caller calls these before and after each forward. `outputs`: the tensors that backward may
  // start from.
  virtual void PreForward() = 0;
  virtual void PostForward(const std::vector<at::Tensor>& outputs) = 0;

  // While false, backward accumulates gradients locally (no_sync).
  virtual void set_require_backward_grad_sync(bool require) = 0;

  // Gives all ranks rank 0's buffers, before evaluation and checkpoints.
  virtual void SyncBuffers() = 0;

  // Resets the gradients of all parameters: to undefined, or to zero in place.
  virtual void zero_grad(bool set_to_none) = 0;

  // False: backward leaves each rank its own gradients (DataParallelOptions::reduce_gradients).
  virtual bool reduces_gradients() const = 0;
  virtual int world_size() const = 0;

  // The module that it wraps; null: this kind of wrapper does not say.
  virtual const torch::nn::Module* module() const { return nullptr; }

  // The part of it that takes part in a Join, for uneven batches (ddp/join.h); null: it cannot be
  // joined.
  virtual Joinable* joinable() { return nullptr; }

  // The names of the parameters that it leaves to each rank (DataParallelOptions::ignored); null:
  // this kind of wrapper does not say.
  virtual const std::vector<std::string>* ignored() const { return nullptr; }

  // Returns, for checkpoints, the parameters in the order in which their gradients are packed into
  // buckets, as indices into the trainable, not ignored parameters. The order of addition over
  // ranks may depend on a gradient's place in its bucket, so a resumed run has the bits of an
  // uninterrupted one only with the same buckets. Rank 0's order counts. Empty before the first
  // backward, with a world size of 1, and for wrappers whose buckets do not change. A wrapper
  // around a wrapper forwards both functions. Do not call them during backward.
  virtual std::vector<int64_t> bucket_order() const { return {}; }

  // Collective; call it before the first forward, with the same order on all ranks. Returns whether
  // the buckets are those of that order now. If false, nothing has changed: `order` is empty or not
  // a permutation of the parameters, there was a forward, or the buckets cannot change. Throws
  // c10::Error if communication fails.
  virtual bool RestoreBucketOrder(const std::vector<int64_t>& /*order*/) { return false; }

  // Communication hooks, for wrappers that take them: see DataParallel. Unimplemented if not.
  virtual absl::Status register_comm_hook(std::unique_ptr<c10d::CommHookInterface> hook,
                                          const std::string& name);
  virtual bool has_comm_hook() const { return false; }
  // Bytes handed to gradient collectives so far (comm_bytes.h); nullopt if that is not known.
  virtual std::optional<int64_t> comm_bytes() const { return std::nullopt; }
};

// Wraps a module that is on its device. Collective; null `group`: a world size of 1.
using ModelWrapperFactory = absl::StatusOr<std::shared_ptr<ModelWrapper>> (*)(
    std::shared_ptr<torch::nn::Module> module, c10::intrusive_ptr<c10d::ProcessGroup> group,
    const DataParallelOptions& options);

struct ModelWrapperTag {
  static constexpr absl::string_view kWhat = "model wrapper";
};
using ModelWrapperRegistry = Registry<ModelWrapperFactory, ModelWrapperTag>;

}  // namespace ddp
