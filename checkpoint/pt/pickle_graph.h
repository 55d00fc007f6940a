// Parses a pickle into a graph, before any values are made. Runs no code: only the Python globals
// that represent tensors and plain containers are known; any other is an error.
//
//   DDP_ASSIGN_OR_RETURN(PickleGraph graph, ParsePickle(bytes));
//   const Node& root = graph.nodes[graph.root];
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ddp::checkpoint::pt {

using NodeId = uint32_t;

enum class Kind {
  kNone,
  kBool,
  kInt,
  kFloat,
  kString,
  kTuple,
  kList,
  kDict,
  kGlobal,
  kStorage,
  kTensor
};

struct Node {
  Kind kind = Kind::kNone;
  int64_t integer = 0;    // kBool, kInt
  double real = 0;        // kFloat
  std::string text = {};  // kString; kGlobal: "module.name"
  // Elements. kDict: key, value, … (of repeated keys the last counts). kStorage: the five elements
  // of its persistent id. kTensor: storage, offset, sizes, strides, and the dtype if it is
  // separate.
  std::vector<NodeId> items = {};
};

// Nodes refer to each other by id. A damaged or hostile pickle may have cycles, and any kind of
// node in any place.
struct PickleGraph {
  std::vector<Node> nodes;
  NodeId root = 0;
};

inline constexpr absl::string_view kUntypedStorage = "torch.storage.UntypedStorage";

// DataLoss, with the byte's offset, for invalid or unsupported pickles. Memory is at most a
// constant factor of the pickle's length. Thread-safe.
absl::StatusOr<PickleGraph> ParsePickle(absl::string_view pickle);

}  // namespace ddp::checkpoint::pt
