// Parses a pickle into a graph, before any values are made. Runs no code: the functions that build
// tensors and plain containers are known by name; a call of any other becomes a node that says so.
//
//   DDP_ASSIGN_OR_RETURN(PickleGraph graph, ParsePickle(bytes));
//   const Node& root = graph.nodes[graph.root];
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace ddp::checkpoint::pt {

using NodeId = uint32_t;

enum class Kind {
  kNone,
  kBool,
  kInt,
  kFloat,
  kComplex,
  kString,
  kBytes,
  kTuple,
  kList,
  kDict,
  kGlobal,
  kStorage,
  kTensor,
  kSparse,
  kQuantized,
  kObject,
  kUnsupported
};

// Bits of Node::integer of a tensor: its elements are the conjugates of those in its storage, or
// their negatives.
inline constexpr int64_t kConj = 1;
inline constexpr int64_t kNeg = 2;

struct Node {
  Kind kind = Kind::kNone;
  int64_t integer = 0;  // kBool, kInt; kTensor: kConj, kNeg
  double real = 0;      // kFloat
  // kString, kBytes; kGlobal: "module.name"; kSparse: the layout, "torch.sparse_coo".
  // kUnsupported: why there is no value for it, as the rest of a sentence: "is a set".
  std::string text = {};
  // Elements. kComplex: real and imaginary part. kDict: key, value, … (of repeated keys the last
  // counts). kStorage: the five elements of its persistent id. kTensor: storage, offset, sizes,
  // strides, and the dtype if it is separate. kSparse: indices, values, sizes and, unless the file
  // is old, whether it is coalesced; other layouts: compressed indices, plain indices, values,
  // sizes. kQuantized: storage, offset, sizes, strides, and the quantizer (a tuple). kObject: the
  // class, its arguments (a tuple), and the state if it was given one.
  std::vector<NodeId> items = {};
};

// Nodes refer to each other by id. A damaged or hostile pickle may have cycles, and any kind of
// node in any place.
struct PickleGraph {
  std::vector<Node> nodes;
  NodeId root = 0;
};

inline constexpr absl::string_view kUntypedStorage = "torch.storage.UntypedStorage";

// DataLoss, with the byte's offset, for invalid pickles and for those of protocols 0 and 1. Memory
// is at most a constant factor of the pickle's length. Thread-safe.
//
// With `classes` ("module.Class") what is made of these are nodes of kind kObject, and a pickle
// that names any other global than those, torch.Size, OrderedDict and dtypes is refused.
absl::StatusOr<PickleGraph> ParsePickle(absl::string_view pickle,
                                        absl::Span<const absl::string_view> classes = {});

}  // namespace ddp::checkpoint::pt
