// A tensor as a pickle describes it, before any of its bytes are read: which storage, and where in
// it its elements lie.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/pt/pickle_graph.h"

namespace ddp::checkpoint::pt {

// Every element lies within the storage.
struct TensorSpec {
  std::string key;             // of the storage
  uint64_t storage_bytes = 0;  // exactly so large is the storage
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  // In elements.
  int64_t offset = 0;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

// Of a node of kind kTensor. DataLoss if it is none that torch writes, or one that reaches beyond
// its storage.
absl::StatusOr<TensorSpec> TensorSpecOf(const std::vector<Node>& nodes, const Node& tensor);

}  // namespace ddp::checkpoint::pt
