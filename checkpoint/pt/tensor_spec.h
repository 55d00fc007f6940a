// A tensor as described in a pickle: its storage, and where its elements are in it.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/pt/pickle_graph.h"

namespace ddp::checkpoint::pt {

// All elements are within the storage.
struct TensorSpec {
  std::string key;             // of the storage
  uint64_t storage_bytes = 0;  // exact size of the storage
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  // Offset, sizes and strides count elements.
  int64_t offset = 0;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  // The elements are the conjugates, or the negatives, of what is in the storage.
  bool conj = false;
  bool neg = false;
  // Whoever asks for it uses its values at once: they are in memory (not ReadRequest::unread).
  bool used_at_once = false;
};

// The spec of a node of kind kTensor, or of a kQuantized one's integers. DataLoss if torch writes
// no such tensor, or if it exceeds its storage. Unimplemented, with the rest of a sentence ("is
// …"), for an element type that is not known. Thread-safe.
absl::StatusOr<TensorSpec> TensorSpecOf(const std::vector<Node>& nodes, const Node& tensor);

}  // namespace ddp::checkpoint::pt
