// Turns the data.pkl of a file that torch.save wrote into a value, without running any code.
//
//   DDP_ASSIGN_OR_RETURN(c10::IValue value, ReadPickle(bytes, [&](const std::string& key,
//                        uint64_t size) { return LoadRecord("archive/data/" + key, size); }));
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

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ddp::checkpoint::pt {

// Gives the storage with this key, which must have exactly `bytes` bytes.
using LoadStorage =
    std::function<absl::StatusOr<c10::Storage>(const std::string& key, uint64_t bytes)>;

// DataLoss for what is no such pickle, with the place and what is wrong; a Python global that is
// not in the table is named. Safe on hostile input.
absl::StatusOr<c10::IValue> ReadPickle(absl::string_view pickle, const LoadStorage& load_storage);

}  // namespace ddp::checkpoint::pt
