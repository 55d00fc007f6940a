// Copies of a state in memory, to be written while the original changes.
//
//   Staging staging;
//   DDP_ASSIGN_OR_RETURN(State copy, staging.Copy(state));
//   std::thread([&] { written = manager->Save(name, std::move(copy)).status(); });
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "c10/core/StorageImpl.h"
#include "checkpoint/format.h"
#include "checkpoint/state.h"

namespace ddp::checkpoint {

// Keeps the memory of its copies, and uses it again for the next one. Thread-compatible.
class Staging {
 public:
  // A copy on the CPU that shares no memory with `state`, and of which every format writes the same
  // bytes: tensors that share memory do so in the copy, and have its layout. The copy before, if
  // any, must not be used any more. An error if there is not enough memory. `source` gives tensors
  // that `state` has without values, one after the other, or its error; null: there are none.
  absl::StatusOr<State> Copy(const State& state, TensorSource* source = nullptr);

  // Likewise copies, into the same copy, what is to be saved beside the state.
  absl::StatusOr<c10::IValue> Add(const c10::IValue& value);

  // Returns the size of the present copy's memory.
  uint64_t bytes() const;

 private:
  c10::IValue CopyValue(const c10::IValue& value);
  at::Tensor CopyTensor(const at::Tensor& tensor);
  at::Tensor CopyBytes(const at::Tensor& bytes);

  std::vector<at::Tensor> buffers_;  // of bytes; by order of use
  size_t used_ = 0;
  // It maps each storage of the state to its place in the present copy.
  std::map<const c10::StorageImpl*, at::Tensor> copied_;
  TensorSource* source_ = nullptr;  // of the present copy
  absl::Status given_;              // why it has not given a tensor
};

// OK if all values are the same, bit by bit, with layout and sharing of memory. Otherwise DataLoss,
// which names the first that is not. Thread-compatible.
absl::Status CheckCopy(const State& state, const State& copy);

}  // namespace ddp::checkpoint
