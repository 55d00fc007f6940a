// The index of a checkpoint of torch.distributed.checkpoint: which values it has, and where each
// lies. The file `.metadata` is a pickle of Python's dataclass Metadata.
//
//   DDP_ASSIGN_OR_RETURN(std::string pickle, ReadFile(folder + "/.metadata"));
//   DDP_ASSIGN_OR_RETURN(Metadata metadata, ParseMetadata(pickle));
//
// Reading runs no code: the parser knows the names of the classes that belong here, and refuses a
// pickle that names another.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/parts.h"

namespace ddp::checkpoint::dcp {

inline constexpr absl::string_view kMetadataFile = ".metadata";

// Longer names are refused, in both directions, in bytes.
inline constexpr size_t kMaxName = 4096;

// A file of torch.save, at bytes [offset, offset + size) of a file in the checkpoint's folder.
struct Item {
  std::string file;  // a name without folders
  uint64_t offset = 0;
  uint64_t size = 0;
};

// A box of a tensor, with at least one element.
struct Chunk {
  Box box;
  Item item;
};

// A tensor whose chunks hold each element exactly once.
struct TensorInfo {
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::vector<int64_t> shape = {};
  std::vector<Chunk> chunks = {};
};

// A key of a dict, or an index of a list.
using Key = std::variant<std::string, int64_t>;

struct Entry {
  std::string name;                      // "optimizer.param_groups.0.lr": the path, joined by dots
  std::vector<Key> path;                 // where it stood in the dict that was saved
  std::variant<TensorInfo, Item> value;  // Item: any other value than a tensor
};

// Names are unique. No two items have a byte in common.
struct Metadata {
  std::vector<Entry> entries;  // in the order in which they stood in the dict
};

// DataLoss, with the reason, for what Python's DCP does not write. Unimplemented, with the name of
// the entry, for items that were compressed or encrypted, and for later versions of the format.
// Safe on hostile input: time and memory are in proportion to the pickle's length. Thread-safe.
absl::StatusOr<Metadata> ParseMetadata(absl::string_view pickle);

}  // namespace ddp::checkpoint::dcp
