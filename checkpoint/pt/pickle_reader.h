// Turns the data.pkl of a file that torch.save wrote into a value, without running any code.
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

// Gives the storage with this key, which must have exactly `bytes` bytes.
using LoadStorage =
    std::function<absl::StatusOr<c10::Storage>(const std::string& key, uint64_t bytes)>;

// DataLoss for what is no such pickle, with the place and what is wrong; a Python global that is
// not in the table is named. Safe on hostile input.
absl::StatusOr<c10::IValue> ReadPickle(absl::string_view pickle, const LoadStorage& load_storage);

// Gives the tensor that holds `part`, which lies within the one described. The same storage may be
// asked for by several tensors.
using LoadTensor =
    std::function<absl::StatusOr<c10::IValue>(const TensorSpec& tensor, const Part& part)>;

// A tree that has what was asked for, with the dicts above it; and which of its tensors are parts.
struct Selection {
  c10::IValue value;
  Shards shards;
};

// The tensor that lies in `storage` as `tensor` says.
c10::IValue ViewOf(c10::Storage storage, const TensorSpec& tensor);

// As above, of what `request` names, which is not empty. InvalidArgument names what of it the
// pickle lacks or cannot give.
absl::StatusOr<Selection> ReadPickle(absl::string_view pickle, const ReadRequest& request,
                                     const LoadTensor& load_tensor);

// What ReadPickle gives, but None for each tensor; an error where it or `check` has one.
absl::StatusOr<c10::IValue> CheckPickle(
    absl::string_view pickle, const std::function<absl::Status(const TensorSpec&)>& check);

}  // namespace ddp::checkpoint::pt
