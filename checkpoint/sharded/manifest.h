// The manifest of a checkpoint in format `sharded`: which tensors it has, and where their bytes
// are. docs/checkpoint_format.md describes it byte by byte. Free of torch.
//
//   DDP_ASSIGN_OR_RETURN(Manifest manifest, DecodeManifest(text));
//   manifest.tensors.at("model.fc.weight").parts[0].offset;
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/parts.h"
#include "checkpoint/safetensors/header.h"
#include "nlohmann/json.hpp"

namespace ddp::checkpoint::sharded {

inline constexpr char kManifestFile[] = "manifest.json";
// Size of the blocks of a part. Each has a checksum; the last one may be shorter.
inline constexpr uint64_t kBlockBytes = 256 << 10;

// How files have elements of a type.
struct Encoding {
  const char* name;  // Python's: "float32"
  int64_t bytes;     // of an element
  // The files' headers give this dtype. `width` of its values make an element.
  safetensors::Dtype dtype;
  int64_t width;
  // The header says the type itself, so that other programs can read the tensor.
  bool is_plain;
};

// Null if there is no type of that name. Thread-safe.
const Encoding* EncodingOf(absl::string_view dtype);

// "rank_00003.safetensors" has whole tensors and boxes; "rank_00003.ranges", of the same encoding,
// what other programs could not make sense of.
std::string FileName(int rank, bool ranges);
// Whether `name` is one of FileName.
bool IsFileName(absl::string_view name);

struct StoredFile {
  std::string name;
  uint64_t bytes = 0;
  uint64_t header_bytes = 0;   // before the first tensor
  uint64_t header_digest = 0;  // XXH3 of these
};

// Its elements are consecutive in the file; those of a box in row-major order.
struct StoredPart {
  size_t file = 0;  // index
  uint64_t offset = 0;
  Part part;                      // Box or FlatRange
  std::vector<uint64_t> digests;  // XXH3 of each block
};

struct StoredTensor {
  const Encoding* encoding = nullptr;
  std::vector<int64_t> shape;
  std::vector<int64_t> memory_order;  // that ranges count in (parts.h)
  std::vector<StoredPart> parts;

  Shard ShardOf(const Part& part) const { return {shape, part, memory_order}; }
  uint64_t BytesOf(const Part& part) const;  // requires that `part` is within the tensor
};

struct Manifest {
  int world_size = 1;  // of the ranks that wrote it
  std::vector<StoredFile> files;
  std::map<std::string, StoredTensor> tensors;  // by name: "optimizer.state.fc.weight.exp_avg"
  nlohmann::json state;                         // the tree of values (tree_json.h)
  std::vector<nlohmann::json> per_rank;         // those of each rank, or empty
};

// Tensors as JSON and back, for the manifest and between ranks. DataLoss if `json` is none.
nlohmann::json ToJson(const StoredTensor& tensor);
absl::StatusOr<StoredTensor> TensorFromJson(const nlohmann::json& json);
nlohmann::json ToJson(const StoredFile& file);
absl::StatusOr<StoredFile> FileFromJson(const nlohmann::json& json);

// The text of the file, which ends in a checksum of all before it. Equal manifests make equal text.
std::string EncodeManifest(const Manifest& manifest);

// DataLoss, with the reason, unless it is a manifest whose checksum is right, whose files have
// names of FileName and are filled with parts, each byte once, and whose parts make up each tensor:
// what it says of sizes is then bounded by the sizes of the files. FailedPrecondition if it is of a
// newer version. Messages are meant to follow a path: "has …".
absl::StatusOr<Manifest> DecodeManifest(absl::string_view text);

}  // namespace ddp::checkpoint::sharded
