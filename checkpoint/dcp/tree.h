// Puts the values of a checkpoint back into the dicts and lists that Python's DCP flattened.
//
//   DDP_ASSIGN_OR_RETURN(Tree tree, TreeOf(metadata.entries));
//   // "model.fc.weight" with the path ("model", "fc.weight") is nodes[0]["model"]["fc.weight"]
//
// DCP turns numbers as keys of a dict into text, and drops empty dicts. Both are made good where an
// optimizer's state dict is recognised, a dict with the list "param_groups" whose dicts have
// "params": keys of "state" that are all numbers are numbers again, and a missing "state" (as of
// SGD without momentum) is an empty dict.
#pragma once

#include <cstddef>
#include <map>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/dcp/metadata.h"

namespace ddp::checkpoint::dcp {

struct TreeNode {
  enum class Kind { kDict, kList, kValue };
  Kind kind = Kind::kDict;
  // Keys, all of one type per node, with the numbers of the nodes below. kDict: in the order of the
  // entries. kList: ascending indices; those that are missing stand for None, as in Python.
  std::vector<std::pair<Key, size_t>> below = {};
  size_t entry = 0;  // kValue
};

struct Tree {
  std::vector<TreeNode> nodes = {};  // nodes[0] is the dict at the top
};

// DataLoss if the paths contradict each other, or if a list lacks most of its elements. Recursion
// over the tree is as deep as the longest path. Thread-safe.
absl::StatusOr<Tree> TreeOf(const std::vector<Entry>& entries);

}  // namespace ddp::checkpoint::dcp
