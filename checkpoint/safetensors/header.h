// The header of a safetensors file, as the format's own project publishes it: which tensors the
// file has, and where. Free of torch.
//
//   std::vector<TensorEntry> tensors = {{.name = "fc.weight", .dtype = Dtype::kF32, .shape = {2,
//   3}}}; SortForAlignment(tensors); DDP_ASSIGN_OR_RETURN(std::string header, WriteHeader(tensors,
//   {{"format", "pt"}})); file.Append(header), then the bytes of each of `tensors` in order:
//   row-major, little-endian
//
//   DDP_ASSIGN_OR_RETURN(Header header, ReadHeader(file));
//   file.ReadAt(header.data_begin + header.tensors[0].begin, to, header.tensors[0].size());
//
// A file is: the length of the JSON text (64 bits, little-endian); the text; the tensors' bytes.
// The text starts with '{' and is filled with blanks to a multiple of 8:
//
//   {"__metadata__":{"format":"pt"},"fc.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}
//
// Functions are thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/file.h"

namespace ddp::checkpoint::safetensors {

// All element types of the format, in its order: by width, so that tensors sorted by falling type
// are aligned. F4 has two elements per byte, F6 four in three bytes.
enum class Dtype {
  kBool,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};

// "F32", "BF16", "F8_E4M3", …, as in the header.
absl::string_view DtypeName(Dtype dtype);

// The reverse; nullopt if the format has no such type.
std::optional<Dtype> DtypeOfName(absl::string_view name);

// Bits of one element: 4 to 64.
int BitsOf(Dtype dtype);

// Names of all types, in the order of Dtype.
std::vector<absl::string_view> DtypeNames();

// Bytes of a tensor. InvalidArgument if a size is negative, the number overflows, or the elements
// do not fill whole bytes.
absl::StatusOr<uint64_t> SizeOf(Dtype dtype, absl::Span<const int64_t> shape);

struct TensorEntry {
  std::string name = {};
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape = {};
  // Bytes [begin, end), counted from the end of the header.
  uint64_t begin = 0;
  uint64_t end = 0;

  uint64_t size() const { return end - begin; }
};

// What a key "__metadata__" has: text by name.
using Metadata = std::map<std::string, std::string>;

struct Header {
  std::vector<TensorEntry> tensors;  // in the order of their bytes, without holes
  Metadata metadata;
  uint64_t data_begin = 0;  // position in the file of the tensors' bytes
};

// Limits of the format's own implementation, and of numpy.
inline constexpr uint64_t kMaxHeader = 100'000'000;  // bytes of JSON
inline constexpr size_t kMaxDimensions = 64;

// Sorts by falling type, then by name: the order of the format's own writer. Each tensor's bytes
// are then aligned to the width of its elements.
void SortForAlignment(std::vector<TensorEntry>& tensors);

// The length and the JSON text. Sets `begin` and `end` of the tensors, in their order. Equal input
// makes equal bytes. InvalidArgument names a tensor whose name is not UTF-8, is reserved
// ("__metadata__") or stands there twice, or whose size is wrong (see SizeOf); or says that the
// text is longer than kMaxHeader.
absl::StatusOr<std::string> WriteHeader(std::vector<TensorEntry>& tensors,
                                        const Metadata& metadata);

// Parses the JSON text of a file in which `data_size` bytes follow it. DataLoss, with the reason
// and the tensor, for text that breaks any rule of the format: other than one JSON object in UTF-8
// that starts at its first byte, a key twice, metadata other than text, an unknown type, a field
// too many or too few, a number that is no natural one, a size that is not that of shape and type,
// bytes that no tensor or that two tensors have, more than kMaxDimensions dimensions. Sets all but
// `data_begin`.
absl::StatusOr<Header> ParseHeader(absl::string_view json, uint64_t data_size);

// Bytes of the JSON text of a file of `file_size` bytes. `start` is its first 8 bytes, or all if it
// has fewer. DataLoss if there is no room for the text, or it is longer than kMaxHeader.
absl::StatusOr<uint64_t> HeaderLength(absl::string_view start, uint64_t file_size);

// Reads and parses the header of `file`, and no more. DataLoss starts with the path. Sets `*bytes`,
// if not null, to all bytes before the tensors'.
absl::StatusOr<Header> ReadHeader(const FileReader& file, std::string* bytes = nullptr);

}  // namespace ddp::checkpoint::safetensors
