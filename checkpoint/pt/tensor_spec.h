// A tensor as described in a pickle: its storage, and where its elements are in it.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

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

// A small file may stand for any number of elements, with strides of 0 or that overlap, and whoever
// copies such a tensor needs memory for all of them. So the tensors of one file may have
// kMaxRepeated bytes of elements more than lie between the first and last one of each; one that
// stands at several places counts at each. Adds a tensor's to `repeated`. Returns false, and adds
// nothing, if that is too many. Thread-safe.
inline constexpr uint64_t kMaxRepeated = uint64_t{1} << 30;
bool CountRepeated(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype,
                   uint64_t& repeated);

}  // namespace ddp::checkpoint::pt
