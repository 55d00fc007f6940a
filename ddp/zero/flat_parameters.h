// The parameters of one group, of one dtype and device, in one flat storage of which they are
// views. Private to zero_redundancy_optimizer.h.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ddp/zero/options.h"
#include "ddp/zero/partition.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/optim/optimizer.h"

namespace ddp::zero {

// A parameter, and its number through all groups of the optimizer.
struct NumberedParameter {
  int64_t number = 0;
  at::Tensor tensor;
  // Its place in the storage, once it has one; `tensor` shares its memory.
  at::Tensor view = {};
  // The version of `tensor` when TakeInValues last saw it. What the optimizer writes does not
  // change it.
  uint32_t version = 0;
};

// A piece that this rank owns.
struct OwnedPiece {
  Piece piece;
  at::Tensor value;  // one dimension; a view of the storage
  // The tensor that the inner optimizer updates: `value` or, with master weights, an fp32 copy,
  // which is rounded to `value` after the update.
  at::Tensor updated;

  bool has_master() const { return !updated.is_same(value); }
};

struct FlatParameters {
  int group = 0;
  std::vector<NumberedParameter> parameters;
  Partition partition;
  at::Tensor storage;
  std::vector<OwnedPiece> owned = {};
  // Scratch tensor for the head of the partition: one unit per rank, or undefined.
  at::Tensor head = {};
  // The storage's memory as the parameters see it: another StorageImpl, which can refuse access.
  // Undefined without overlap_gather.
  at::Tensor guarded = {};
};

// fp16 and bf16, which are updated in fp32 with ZeroOptions::master_weights.
inline bool IsReducedPrecision(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16;
}

// The ranges that these parameters, of parameter group `group`, make up, in the order in which
// their dtypes and devices first appear. Parameters without requires_grad are left out. Moves the
// parameters into flat storage: they keep their identity, values, and strides (those with gaps in
// memory become contiguous). Not collective.
std::vector<FlatParameters> FlattenParameters(const std::vector<NumberedParameter>& parameters,
                                              int group_index, const ZeroOptions& options,
                                              c10d::ProcessGroup* group);

// Takes in what others have made of the parameters since: torch::load and Module::to exchange a
// parameter's memory, which its view then gets the values of, and becomes the parameter's memory
// again; fp32 copies of changed elements are made anew, and keep their bits elsewhere. A change
// through Tensor::data() is not seen by fp32 copies. Costs a comparison of pointers per parameter.
// Not collective; all ranks must have made the same changes. Throws c10::Error, with the number: a
// parameter of another shape, dtype or device.
void TakeInValues(FlatParameters& flat);

// The parameter's gradient, which it must have. One of other strides than the parameter's is
// exchanged for a copy of these, so that clipping writes where a step reads. Not collective. Throws
// c10::Error, with the number: a sparse gradient.
at::Tensor DenseGradient(const NumberedParameter& parameter);

// Those of all parameters that have one.
std::vector<at::Tensor> DenseGradients(const std::deque<FlatParameters>& ranges);

// Collective. Gives all ranks the gradients of rank `source`, and resets those that it has not.
// Throws c10::Error as DenseGradient.
void BroadcastGradients(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                        const std::deque<FlatParameters>& ranges, int source);

// Collective. Gives all ranks the parameters' values of rank `source`. After TakeInValues, and
// before it: fp32 copies are as of before.
void BroadcastValues(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                     const std::deque<FlatParameters>& ranges, int source);

// Whoever reads or writes parameters from here on, until AllowAccess, gets a c10::Error that says
// what to do. This is for overlap_gather. Not collective.
void RefuseAccess(const FlatParameters& flat);
void AllowAccess(const FlatParameters& flat);

// InvalidArgument names by number those that are twice in the list, that share memory, or that are
// not floating point and dense.
absl::Status CheckParameters(const std::vector<NumberedParameter>& parameters);

// OptionError, or InvalidArgument: ranks cannot update their parts each by an optimizer like this.
absl::Status CheckOptimizer(const torch::optim::Optimizer& inner, const std::string& partition);

}  // namespace ddp::zero
