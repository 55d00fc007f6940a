// Reads the data.pkl of a file that torch.save wrote, without running any code.
//
//   DDP_ASSIGN_OR_RETURN(c10::IValue value, ReadPickle(bytes, [&](const std::string& key,
//                        uint64_t size) { return LoadRecord("archive/data/" + key, size); }));
//   DDP_ASSIGN_OR_RETURN(Selection some, ReadPickle(bytes, request, load_tensor));
//
//   Python                                    here
//   None, bool, int (64 bits), float, str     the same
//   tuple, torch.Size                         tuple
//   list                                      list of any
//   dict, OrderedDict, Counter                GenericDict in the same order; keys are str or int
//   Tensor, Parameter                         tensor on the CPU, without autograd
//   torch.device, torch.dtype                 str: "cuda:0", "torch.float32"
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/format.h"
#include "checkpoint/parts.h"
#include "checkpoint/pt/tensor_spec.h"
#include "checkpoint/state.h"

namespace ddp::checkpoint::pt {

// Returns the storage with this key, which must have exactly `bytes` bytes.
using LoadStorage =
    std::function<absl::StatusOr<c10::Storage>(const std::string& key, uint64_t bytes)>;

// DataLoss, with place and reason, for invalid pickles and for Python globals that are not in the
// table. Safe on hostile input. Functions are thread-safe if their callbacks are.
absl::StatusOr<c10::IValue> ReadPickle(absl::string_view pickle, const LoadStorage& load_storage);

// Returns the tensor that holds `part` of `tensor`; `part` is within it. Several tensors may have
// the same storage.
using LoadTensor =
    std::function<absl::StatusOr<c10::IValue>(const TensorSpec& tensor, const Part& part)>;

// The requested values with the dicts above them, and which of the tensors are parts.
struct Selection {
  c10::IValue value;
  Shards shards;
};

// The view of `storage` that `tensor` describes.
c10::IValue ViewOf(c10::Storage storage, const TensorSpec& tensor);

// Reads only what `request` names, which must not be empty. InvalidArgument names a path or part
// that the pickle does not have.
absl::StatusOr<Selection> ReadPickle(absl::string_view pickle, const ReadRequest& request,
                                     const LoadTensor& load_tensor);

// As ReadPickle, but with None for each tensor, on which it calls `check`. Returns the first error.
absl::StatusOr<c10::IValue> CheckPickle(
    absl::string_view pickle, const std::function<absl::Status(const TensorSpec&)>& check);

}  // namespace ddp::checkpoint::pt
