// What a checkpoint holds, in logical terms: names, values, and for each tensor which range of the
// whole this rank has. Never "rank 3's file": saving at one world size and loading at another is
// the normal case.
//
//   State state;
//   state.root.insert("epoch", int64_t{3});
//   state.root.insert("model", ModuleState(*model));
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace ddp::checkpoint {

// An empty tree: a dict of str -> value. Values are what Python's torch.save of plain data holds:
// tensors, bool, int64, double, str, None, lists, tuples, and dicts with str or int64 keys.
inline c10::impl::GenericDict NewTree() {
  return c10::impl::GenericDict(c10::StringType::get(), c10::AnyType::get());
}

// The part of a tensor that this rank holds: [offset, offset + local sizes) of global_shape.
struct Shard {
  std::vector<int64_t> global_shape;
  std::vector<int64_t> offset;  // one per dimension
};

// A value; copies share their tensors, as c10 handles do. Thread-compatible.
struct State {
  c10::impl::GenericDict root = NewTree();

  // By path ("model/fc.weight", levels joined by '/'): tensors of which this rank holds a part.
  // A tensor that is not named here is whole, and the same on every rank.
  std::map<std::string, Shard> shards;
};

}  // namespace ddp::checkpoint
