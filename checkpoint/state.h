// The contents of a checkpoint: a tree of named values, and for sharded tensors the part that this
// rank holds. Independent of the world size: a checkpoint may be loaded with another one.
//
//   State state;
//   state.root.insert("epoch", int64_t{3});
//   state.root.insert("exp_avg", mine);  // elements [40, 80) of a tensor of shape [10, 20]
//   state.shards["exp_avg"] = {.global_shape = {10, 20}, .part = FlatRange{40, 80}};
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>

#include <map>
#include <string>

#include "absl/status/status.h"
#include "checkpoint/parts.h"

namespace ddp::checkpoint {

// An empty tree: a dict of str -> value. Values may be tensors, bool, int64, double, str, None,
// lists, tuples, and dicts with str or int64 keys.
inline c10::impl::GenericDict NewTree() {
  return c10::impl::GenericDict(c10::StringType::get(), c10::AnyType::get());
}

// Tensors of which this rank holds a part, by path ("model/fc.weight", levels joined by '/').
using Shards = std::map<std::string, Shard>;

// A value, but copies share `root` and its tensors, as c10 handles do. Thread-compatible.
struct State {
  c10::impl::GenericDict root = NewTree();

  // Tensors without an entry are whole and the same on every rank. A tensor with an entry has the
  // shape that parts.h says for its part; it may be absent on ranks that hold none of it.
  Shards shards = {};
};

// InvalidArgument if a shard's path does not lead through dicts to a tensor of the shape that its
// part needs; names the first such shard. Thread-compatible.
absl::Status CheckShards(const State& state);

}  // namespace ddp::checkpoint
