// What a checkpoint holds, in logical terms: names, values, and for each tensor which part of the
// whole this rank has. Never "rank 3's file": saving at one world size and loading at another is
// the normal case.
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

// An empty tree: a dict of str -> value. Values are what Python's torch.save of plain data holds:
// tensors, bool, int64, double, str, None, lists, tuples, and dicts with str or int64 keys.
inline c10::impl::GenericDict NewTree() {
  return c10::impl::GenericDict(c10::StringType::get(), c10::AnyType::get());
}

// By path ("model/fc.weight", levels joined by '/'): tensors of which only a part is there.
using Shards = std::map<std::string, Shard>;

// A value; copies share their tensors, as c10 handles do. Thread-compatible.
struct State {
  c10::impl::GenericDict root = NewTree();

  // A tensor that is not named here is whole, and the same on every rank. One that is named is
  // what `part` says in parts.h, and may be absent on a rank that holds nothing of it.
  Shards shards = {};
};

// Whether each shard's path leads through dicts to a tensor of the shape that its part needs.
// InvalidArgument names the first that does not.
absl::Status CheckShards(const State& state);

}  // namespace ddp::checkpoint
