// Turns a value into the data.pkl of a file that torch.load(weights_only=True) takes, and the
// storages that go beside it: the reverse of pickle_reader.h, of whose table it writes all but the
// last line. Typed lists (IntList, …) are written as lists.
//
//   DDP_ASSIGN_OR_RETURN(Pickled pickled, WritePickle(state.root));
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ddp::checkpoint::pt {

struct Pickled {
  std::string bytes;  // protocol 2
  // Those that the tensors are views of, each once; the one with key "N" is storages[N].
  std::vector<c10::Storage> storages;
};

// InvalidArgument, with the path of the value, for what has no equivalent: sparse or quantised
// tensors, dict keys of other types, text that is not UTF-8. Does not copy what tensors hold.
absl::StatusOr<Pickled> WritePickle(const c10::IValue& value);

}  // namespace ddp::checkpoint::pt
