// Converts a value to the data.pkl and the storages of a file for torch.load(weights_only=True).
// The reverse of pickle_reader.h, for all but the last two lines of its table. Typed lists
// (IntList, …) are written as lists, text with the halves of UTF-16's pairs (base/utf8.h) as Python
// does, lazy conjugates as views of the original's storage.
//
//   DDP_ASSIGN_OR_RETURN(Pickled pickled, WritePickle(state.root));
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ddp::checkpoint::pt {

// Bytes [offset, offset + size) of a storage.
struct Record {
  c10::Storage storage;
  uint64_t offset = 0;
  uint64_t size = 0;
};

struct Pickled {
  std::string bytes;  // protocol 2
  // What a file holds of storages; records[N] has key "N". Tensors of one element type that overlap
  // in memory share a record. A part of a storage in which no tensor is, is in none.
  std::vector<Record> records;
};

// The bytes of a record, without a copy if they are on the CPU.
at::Tensor OnCpu(const Record& record);

// InvalidArgument, with the path, for values that cannot be represented: sparse or quantised
// tensors, dict keys of other types, strings that are not UTF-8. Does not copy tensor data.
// Thread-safe. Tensors on the device meta are written if `comes_later` is true of their storage.
absl::StatusOr<Pickled> WritePickle(
    const c10::IValue& value,
    const std::function<bool(const c10::Storage&)>& comes_later = nullptr);

}  // namespace ddp::checkpoint::pt
