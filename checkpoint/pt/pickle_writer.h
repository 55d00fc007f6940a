// Converts a value to the data.pkl and the storages of a file for torch.load(weights_only=True).
// The reverse of pickle_reader.h, for all but the last two lines of its table. Typed lists
// (IntList, …) are written as lists, text with the halves of UTF-16's pairs (base/utf8.h) as Python
// does, lazy conjugates as views of the original's storage.
//
//   DDP_ASSIGN_OR_RETURN(Pickled pickled, WritePickle(state.root));
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ddp::checkpoint::pt {

struct Pickled {
  std::string bytes;  // protocol 2
  // The storages of all tensors, each once; storages[N] has key "N".
  std::vector<c10::Storage> storages;
};

// InvalidArgument, with the path, for values that cannot be represented: sparse or quantised
// tensors, dict keys of other types, strings that are not UTF-8. Does not copy tensor data.
// Thread-safe. Tensors on the device meta are written if `comes_later` is true of their storage.
absl::StatusOr<Pickled> WritePickle(
    const c10::IValue& value,
    const std::function<bool(const c10::Storage&)>& comes_later = nullptr);

}  // namespace ddp::checkpoint::pt
