#include "checkpoint/safetensors/header.h"

#include <algorithm>
#include <limits>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/json.h"
#include "base/status.h"
#include "base/utf8.h"
#include "checkpoint/foreign.h"

namespace ddp::checkpoint::safetensors {
namespace {

constexpr absl::string_view kMetadata = "__metadata__";
constexpr uint64_t kLengthSize = 8;
constexpr uint64_t kAlignment = 8;

struct DtypeRow {
  absl::string_view name;
  int bits;
};

// In the order of Dtype.
constexpr DtypeRow kDtypes[] = {
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64},
};
static_assert(std::size(kDtypes) == static_cast<size_t>(Dtype::kU64) + 1);

const DtypeRow& RowOf(Dtype dtype) { return kDtypes[static_cast<size_t>(dtype)]; }

absl::Status Broken(absl::string_view what) { return absl::DataLossError(what); }

absl::Status BrokenTensor(absl::string_view name, absl::string_view what) {
  return Broken(absl::StrCat("tensor '", Printable(name), "' ", what));
}

// A natural number that int64_t holds.
std::optional<int64_t> Natural(const nlohmann::json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const auto number = value.get<uint64_t>();
  if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
  return static_cast<int64_t>(number);
}

absl::StatusOr<TensorEntry> ParseTensor(const std::string& name, const nlohmann::json& fields) {
  if (!fields.is_object()) return BrokenTensor(name, "has no description");
  for (const auto& [key, value] : fields.items()) {
    if (key != "dtype" && key != "shape" && key != "data_offsets") {
      return BrokenTensor(name, absl::StrCat("has an unknown field '", Printable(key), "'"));
    }
  }
  if (fields.size() != 3) return BrokenTensor(name, "lacks one of dtype, shape and data_offsets");
  TensorEntry tensor;
  tensor.name = name;
  const nlohmann::json& dtype = fields.at("dtype");
  if (!dtype.is_string()) return BrokenTensor(name, "has a dtype that is no text");
  const std::optional<Dtype> known = DtypeOfName(dtype.get_ref<const std::string&>());
  if (!known.has_value()) {
    return BrokenTensor(name, absl::StrCat("has the unknown dtype '",
                                           Printable(dtype.get_ref<const std::string&>()), "'"));
  }
  tensor.dtype = *known;
  const nlohmann::json& shape = fields.at("shape");
  if (!shape.is_array()) return BrokenTensor(name, "has a shape that is no list");
  for (const nlohmann::json& item : shape) {
    const std::optional<int64_t> size = Natural(item);
    if (!size.has_value()) return BrokenTensor(name, "has a size that is no natural number");
    tensor.shape.push_back(*size);
  }
  const nlohmann::json& offsets = fields.at("data_offsets");
  if (!offsets.is_array() || offsets.size() != 2) {
    return BrokenTensor(name, "has data_offsets that are no two numbers");
  }
  const std::optional<int64_t> begin = Natural(offsets[0]);
  const std::optional<int64_t> end = Natural(offsets[1]);
  if (!begin.has_value() || !end.has_value() || *begin > *end) {
    return BrokenTensor(name, "has data_offsets that are no range");
  }
  tensor.begin = static_cast<uint64_t>(*begin);
  tensor.end = static_cast<uint64_t>(*end);
  const absl::StatusOr<uint64_t> size = SizeOf(tensor.dtype, tensor.shape);
  if (!size.ok()) return BrokenTensor(name, size.status().message());
  if (*size != tensor.size()) {
    return BrokenTensor(
        name, absl::StrCat("has ", tensor.size(), " bytes where its shape and dtype make ", *size));
  }
  return tensor;
}

absl::StatusOr<Metadata> ParseMetadata(const nlohmann::json& fields) {
  if (!fields.is_object()) return Broken("its __metadata__ is no object");
  Metadata metadata;
  for (const auto& [key, value] : fields.items()) {
    if (!value.is_string()) {
      return Broken(absl::StrCat("its __metadata__ '", Printable(key), "' is no text"));
    }
    metadata[key] = value.get_ref<const std::string&>();
  }
  return metadata;
}

// The bytes must be those of the tensors, each once: no place for anything else.
absl::Status CheckOffsets(const std::vector<TensorEntry>& tensors, uint64_t data_size) {
  uint64_t at = 0;
  for (const TensorEntry& tensor : tensors) {
    if (tensor.begin != at) {
      return BrokenTensor(
          tensor.name, tensor.begin < at ? "overlaps the one before it" : "has a hole before it");
    }
    at = tensor.end;
  }
  if (at == data_size) return absl::OkStatus();
  return Broken(at > data_size ? absl::StrCat("is cut off: its tensors need ", at,
                                              " bytes after the header, and it has ", data_size)
                               : absl::StrCat("has ", data_size - at, " bytes after its tensors"));
}

// Text in quotation marks, escaped as JSON needs it and no further.
absl::StatusOr<std::string> Quoted(absl::string_view text) {
  if (!IsUtf8(text)) {
    return absl::InvalidArgumentError(absl::StrCat("'", Printable(text), "' is not UTF-8"));
  }
  return nlohmann::json(std::string(text)).dump();
}

}  // namespace

absl::string_view DtypeName(Dtype dtype) { return RowOf(dtype).name; }

std::optional<Dtype> DtypeOfName(absl::string_view name) {
  for (size_t i = 0; i < std::size(kDtypes); ++i) {
    if (kDtypes[i].name == name) return static_cast<Dtype>(i);
  }
  return std::nullopt;
}

int BitsOf(Dtype dtype) { return RowOf(dtype).bits; }

std::vector<absl::string_view> DtypeNames() {
  std::vector<absl::string_view> names;
  for (const DtypeRow& row : kDtypes) names.push_back(row.name);
  return names;
}

// Also of an empty tensor the product of the other sizes must be a number, as strides are.
absl::StatusOr<uint64_t> SizeOf(Dtype dtype, absl::Span<const int64_t> shape) {
  if (shape.size() > kMaxDimensions) {
    return absl::InvalidArgumentError(
        absl::StrCat("has ", shape.size(), " dimensions, more than ", kMaxDimensions));
  }
  int64_t bits = BitsOf(dtype);
  bool empty = false;
  for (const int64_t size : shape) {
    if (size < 0) return absl::InvalidArgumentError("has a negative size");
    empty = empty || size == 0;
    if (__builtin_mul_overflow(bits, std::max<int64_t>(size, 1), &bits)) {
      return absl::InvalidArgumentError(
          absl::StrCat("has sizes [", absl::StrJoin(shape, ", "), "], whose product overflows"));
    }
  }
  if (empty) return 0;
  if (bits % 8 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("has elements of ", BitsOf(dtype), " bits that do not fill whole bytes"));
  }
  return static_cast<uint64_t>(bits) / 8;
}

void SortForAlignment(std::vector<TensorEntry>& tensors) {
  std::sort(tensors.begin(), tensors.end(), [](const TensorEntry& a, const TensorEntry& b) {
    return std::tie(b.dtype, a.name) < std::tie(a.dtype, b.name);
  });
}

absl::StatusOr<std::string> WriteHeader(std::vector<TensorEntry>& tensors,
                                        const Metadata& metadata) {
  std::string json = "{";
  absl::string_view comma = "";
  if (!metadata.empty()) {
    absl::StrAppend(&json, "\"", kMetadata, "\":{");
    for (const auto& [key, text] : metadata) {
      DDP_ASSIGN_OR_RETURN(const std::string name, Quoted(key));
      DDP_ASSIGN_OR_RETURN(const std::string value, Quoted(text));
      absl::StrAppend(&json, comma, name, ":", value);
      comma = ",";
    }
    json += "}";
  }
  std::set<absl::string_view> names;
  uint64_t at = 0;
  for (TensorEntry& tensor : tensors) {
    const auto refuse = [&](absl::string_view what) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor '", Printable(tensor.name), "' ", what));
    };
    if (tensor.name == kMetadata) return refuse("has a name that the format reserves");
    if (!names.insert(tensor.name).second) return refuse("is there twice");
    const absl::StatusOr<uint64_t> size = SizeOf(tensor.dtype, tensor.shape);
    if (!size.ok()) return refuse(size.status().message());
    tensor.begin = at;
    if (__builtin_add_overflow(at, *size, &at) ||
        at > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return refuse("ends beyond the largest file");
    }
    tensor.end = at;
    DDP_ASSIGN_OR_RETURN(const std::string name, Quoted(tensor.name));
    absl::StrAppend(&json, comma, name, ":{\"dtype\":\"", DtypeName(tensor.dtype), "\",\"shape\":[",
                    absl::StrJoin(tensor.shape, ","), "],\"data_offsets\":[", tensor.begin, ",",
                    tensor.end, "]}");
    comma = ",";
  }
  json += "}";
  json.append((kAlignment - json.size() % kAlignment) % kAlignment, ' ');
  if (json.size() > kMaxHeader) {
    return absl::InvalidArgumentError(absl::StrCat("names, shapes and metadata take ", json.size(),
                                                   " bytes of JSON; the format safetensors allows ",
                                                   kMaxHeader));
  }
  std::string header;
  for (uint64_t i = 0; i < kLengthSize; ++i) {
    header.push_back(static_cast<char>(json.size() >> (8 * i)));
  }
  return header + json;
}

absl::StatusOr<Header> ParseHeader(absl::string_view json, uint64_t data_size) {
  if (json.empty() || json[0] != '{') return Broken("has a header that does not start with '{'");
  const absl::StatusOr<nlohmann::json> root =
      ParseJson(json, {.depth = 3, .items = kMaxDimensions});
  if (!root.ok()) return Broken(absl::StrCat("has a header that ", root.status().message()));
  Header header;
  for (const auto& [key, value] : root->items()) {
    if (key == kMetadata) {
      DDP_ASSIGN_OR_RETURN(header.metadata, ParseMetadata(value));
    } else {
      DDP_ASSIGN_OR_RETURN(header.tensors.emplace_back(), ParseTensor(key, value));
    }
  }
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const TensorEntry& a, const TensorEntry& b) {
              return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
            });
  DDP_RETURN_IF_ERROR(CheckOffsets(header.tensors, data_size));
  return header;
}

absl::StatusOr<uint64_t> HeaderLength(absl::string_view start, uint64_t file_size) {
  if (file_size == 0) return Broken("is empty");
  if (file_size < kLengthSize || start.size() < kLengthSize) {
    return Broken("is no safetensors file: it is shorter than the length of a header");
  }
  uint64_t length = 0;
  for (uint64_t i = 0; i < kLengthSize; ++i) {
    length |= uint64_t{static_cast<uint8_t>(start[i])} << (8 * i);
  }
  if (length > kMaxHeader) {
    return Broken(absl::StrCat("is no safetensors file: its first bytes would be a header of ",
                               length, " bytes"));
  }
  if (length > file_size - kLengthSize) {
    return Broken(absl::StrCat("is cut off: its header needs ", length, " bytes, and it has ",
                               file_size - kLengthSize));
  }
  return length;
}

absl::StatusOr<Header> ReadHeader(const FileReader& file, std::string* bytes) {
  DDP_RETURN_IF_ERROR(RefusePointer(file));
  std::string head(std::min(file.size(), kForeignHead), '\0');
  DDP_RETURN_IF_ERROR(file.ReadAt(0, head.data(), head.size()));
  const bool may_be_json = head.size() > kLengthSize && head[kLengthSize] == '{';
  std::string foreign = may_be_json ? "" : DescribeForeign(head, file.size());
  if (!may_be_json && absl::StartsWith(head, "PK\3\4")) {
    foreign = "is no safetensors file but a zip archive, as torch.save writes";
  }
  if (!foreign.empty() && IsOtherFile(head)) {
    return absl::UnimplementedError(absl::StrCat(file.path(), " ", foreign));
  }
  const auto damaged = [&](const absl::Status& status) {
    if (may_be_json) {
      return absl::DataLossError(absl::StrCat(file.path(), " ", status.message()));
    }
    return OfNoSuchFormat(
        absl::StrCat(file.path(), " ", foreign.empty() ? status.message() : foreign));
  };
  const absl::StatusOr<uint64_t> length = HeaderLength(head, file.size());
  if (!length.ok()) return damaged(length.status());
  head.resize(kLengthSize + *length);
  DDP_RETURN_IF_ERROR(file.ReadAt(kLengthSize, head.data() + kLengthSize, *length));
  absl::StatusOr<Header> header =
      ParseHeader(absl::string_view(head).substr(kLengthSize), file.size() - head.size());
  if (!header.ok()) return damaged(header.status());
  header->data_begin = head.size();
  if (bytes != nullptr) *bytes = std::move(head);
  return header;
}

}  // namespace ddp::checkpoint::safetensors
