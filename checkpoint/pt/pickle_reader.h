// Reads the data.pkl of a file that torch.save wrote, without running any code.
//
//   DDP_ASSIGN_OR_RETURN(Selection all, ReadPickle(bytes, {}, load_tensor));
//   DDP_ASSIGN_OR_RETURN(Selection some, ReadPickle(bytes, {.parts = …}, load_tensor));
//
//   Python                                    here
//   None, bool, int (64 bits), float, str     the same
//   complex                                   complex
//   bytes, bytearray                          str with these bytes
//   tuple, torch.Size                         tuple
//   list                                      list of any
//   dict, OrderedDict, Counter                GenericDict in the same order; keys are str, int,
//                                             float or bool
//   Tensor, Parameter, Buffer                 tensor on the CPU, without autograd and attributes;
//                                             lazy conjugates and negatives stay lazy, and views of
//                                             one storage stay views
//   sparse tensors of all layouts             the same
//   quantized tensors, per tensor or channel  the same
//   torch.device, torch.dtype, torch.layout   str: "cuda:0", "torch.float32", "torch.strided"
//
// Anything else (sets, nested tensors, tensor subclasses, other classes) is Unimplemented, with
// its path, or is left out: see ReadRequest::left_out.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>

#include <functional>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/format.h"
#include "checkpoint/parts.h"
#include "checkpoint/pt/tensor_spec.h"
#include "checkpoint/state.h"

namespace ddp::checkpoint::pt {

// Returns the tensor that holds `part` of `tensor`; `part` is within it. `path` is the tensor's in
// the tree, for messages. Several tensors may have the same storage.
using LoadTensor = std::function<absl::StatusOr<c10::IValue>(
    const TensorSpec& tensor, const Part& part, const std::string& path)>;

// The requested values with the dicts above them, and the tensors of which parts are requested.
struct Selection {
  c10::IValue value;
  std::map<std::string, ShardedTensor> sharded;
};

// The view of `storage` that `tensor` describes.
c10::IValue ViewOf(c10::Storage storage, const TensorSpec& tensor);

// Reads what `request` names, or all. DataLoss, with place and reason, for invalid pickles;
// InvalidArgument names a path or part that the pickle does not have. Safe on hostile input.
// Functions are thread-safe if their callbacks are.
absl::StatusOr<Selection> ReadPickle(absl::string_view pickle, const ReadRequest& request,
                                     const LoadTensor& load_tensor);

// Reads all as ReadPickle does, but with None for each tensor, on which it calls `check`. Returns
// the first error.
absl::StatusOr<c10::IValue> CheckPickle(
    absl::string_view pickle,
    const std::function<absl::Status(const TensorSpec&, const std::string& path)>& check);

}  // namespace ddp::checkpoint::pt
