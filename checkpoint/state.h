// The contents of a checkpoint: a tree of named values, tensors of which each rank holds some
// parts, and entries of single ranks. Independent of the world size: a checkpoint may be loaded
// with another one.
//
//   State state;
//   state.root.insert("epoch", int64_t{3});
//   state.sharded["optimizer/state/fc.weight/exp_avg"] = {
//       .global_shape = {10, 20}, .dtype = at::kFloat,
//       .parts = {{FlatRange{40, 80}, mine}, {FlatRange{120, 160}, mine_too}}};
//   state.per_rank[rank] = rng;  // a dict
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/parts.h"

namespace ddp::checkpoint {

// An empty tree: a dict of str -> value. Values may be tensors, bool, int64, double, complex, str,
// None, lists, tuples, and dicts with str, int64, double or bool keys. A format may lack some: it
// refuses them by name.
inline c10::impl::GenericDict NewTree() {
  return c10::impl::GenericDict(c10::StringType::get(), c10::AnyType::get());
}

// Returns how a key stands in a path: "fc.weight", "7", "0.5", "True".
std::string KeyText(const c10::IValue& key);

// Returns what Python's users call a value: "a list", "an int", "None".
std::string KindText(const c10::IValue& value);

// One part that this rank holds. `tensor` has the shape that parts.h says for it.
struct TensorPart {
  Part part;
  at::Tensor tensor;
};

// A tensor of which this rank holds parts, or none: the rest is the same on all ranks.
struct ShardedTensor {
  std::vector<int64_t> global_shape;
  at::ScalarType dtype = at::kFloat;
  // The order of dimensions that ranges count in (parts.h); empty: row-major.
  std::vector<int64_t> memory_order = {};
  std::vector<TensorPart> parts = {};
};

// A value, but copies share `root` and tensors, as c10 handles do. Thread-compatible.
struct State {
  // Values that are whole, and the same on every rank.
  c10::impl::GenericDict root = NewTree();

  // Tensors are here by path ("optimizer/state/fc.weight/exp_avg": keys of the dicts from the root
  // on, joined by '/', which no key on the way has), where `root` has no value. To be saved, each
  // path is on all ranks, and the parts of all ranks make up each tensor. For a format that rank 0
  // writes alone (Format::all_ranks_write), `root` may have there a tensor on the device meta, of
  // this shape and dtype: its place in the dict and its strides are those of the tensor in the
  // checkpoint. Where a checkpoint is read without a request for parts, such tensors are in `root`,
  // and whole.
  std::map<std::string, ShardedTensor> sharded = {};

  // Values that belong to one rank (generators, a loader's position), by rank. A save takes this
  // rank's own. Where a checkpoint is read, they are those of the ranks that saved it, 0 to their
  // number.
  std::map<int, c10::impl::GenericDict> per_rank = {};
};

// Python's name: "float32". Empty if we have none for it (quantised types and the like).
std::string DtypeName(at::ScalarType dtype);
// The reverse; Undefined for an unknown name.
at::ScalarType DtypeOfName(const std::string& name);

// InvalidArgument if a part is not within its tensor, its tensor is of another shape or dtype, or
// its path is taken in `root`; names the first such path. Thread-compatible.
absl::Status CheckShards(const State& state);

// Returns what this rank holds of each sharded tensor, for CheckCoverage (cover.h).
std::map<std::string, TensorParts> PartsOf(const State& state);

// How many bytes the tensors of all ranks have, those of one memory once: whole ones, and entries
// of `ranks` single ranks as large as this one's.
uint64_t EstimateBytes(const State& state, int ranks);

// Returns what stands at `path` of `root`, as the paths of State::sharded are meant; nullopt:
// nothing. InvalidArgument if something that is no dict is on the way.
absl::StatusOr<std::optional<c10::IValue>> FindAt(c10::impl::GenericDict root,
                                                  const std::string& path);

// Puts `value` at `path` of `root`, as the paths of State::sharded are meant, and makes the dicts
// on the way; a dict with int keys gets an int. InvalidArgument if something else is on the way, or
// at `path`.
absl::Status InsertAt(c10::impl::GenericDict root, const std::string& path,
                      const c10::IValue& value);

// Copies the values of a part, in the shape of parts.h, to where it belongs in `whole`, of the same
// dtype. Requires that the part is within the tensor.
void CopyPart(const at::Tensor& values, const Part& part, const std::vector<int64_t>& memory_order,
              const at::Tensor& whole);

// The part of `whole` that `part` names, in the order of dimensions `memory_order`, in the shape of
// parts.h: a view where that is possible. Requires that the part is within the tensor.
at::Tensor PartOf(const at::Tensor& whole, const Part& part,
                  const std::vector<int64_t>& memory_order);

}  // namespace ddp::checkpoint
