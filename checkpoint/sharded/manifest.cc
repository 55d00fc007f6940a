#include "checkpoint/sharded/manifest.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <variant>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "base/json.h"
#include "base/status.h"
#include "base/utf8.h"
#include "base/xxh3.h"

namespace ddp::checkpoint::sharded {
namespace {

using nlohmann::json;
using safetensors::Dtype;

constexpr char kFormat[] = "libtorch_ddp.sharded";
constexpr int64_t kVersion = 1;
// The text is kBegin, the manifest, kMiddle, 16 digits, kEnd.
constexpr absl::string_view kBegin = "{\"manifest\": ";
constexpr absl::string_view kMiddle = ",\n\"xxh3\": \"";
constexpr absl::string_view kEnd = "\"}\n";
constexpr size_t kMostDimensions = safetensors::kMaxDimensions;
constexpr int kMostRanks = 1 << 20;

constexpr Encoding kEncodings[] = {
    {"bool", 1, Dtype::kBool, 1, true},
    {"uint8", 1, Dtype::kU8, 1, true},
    {"int8", 1, Dtype::kI8, 1, true},
    {"int16", 2, Dtype::kI16, 1, true},
    {"int32", 4, Dtype::kI32, 1, true},
    {"int64", 8, Dtype::kI64, 1, true},
    {"uint16", 2, Dtype::kU16, 1, true},
    {"uint32", 4, Dtype::kU32, 1, true},
    {"uint64", 8, Dtype::kU64, 1, true},
    {"float16", 2, Dtype::kF16, 1, true},
    {"bfloat16", 2, Dtype::kBF16, 1, true},
    {"float32", 4, Dtype::kF32, 1, true},
    {"float64", 8, Dtype::kF64, 1, true},
    {"float8_e4m3fn", 1, Dtype::kF8E4M3, 1, true},
    {"float8_e5m2", 1, Dtype::kF8E5M2, 1, true},
    {"float8_e4m3fnuz", 1, Dtype::kU8, 1, false},
    {"float8_e5m2fnuz", 1, Dtype::kU8, 1, false},
    {"float8_e8m0fnu", 1, Dtype::kU8, 1, false},
    {"complex32", 4, Dtype::kF16, 2, false},
    {"complex64", 8, Dtype::kF32, 2, false},
    {"complex128", 16, Dtype::kF64, 2, false},
};

absl::Status Damaged(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("has a manifest ", what));
}

// A number that was parsed is unsigned; one that was put in may be signed.
std::optional<int64_t> Natural(const json& value) {
  if (!value.is_number_integer()) return std::nullopt;
  const bool is_large =
      value.is_number_unsigned() &&
      value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  if (is_large || value.get<int64_t>() < 0) return std::nullopt;
  return value.get<int64_t>();
}

// Null if `value` is no object, or has no such member.
const json* Member(const json& value, const char* key) {
  if (!value.is_object()) return nullptr;
  const auto found = value.find(key);
  return found == value.end() ? nullptr : &*found;
}

std::optional<int64_t> NaturalMember(const json& value, const char* key) {
  const json* member = Member(value, key);
  return member == nullptr ? std::nullopt : Natural(*member);
}

std::optional<std::vector<int64_t>> Naturals(const json* value) {
  if (value == nullptr || !value->is_array() || value->size() > kMostDimensions) {
    return std::nullopt;
  }
  std::vector<int64_t> numbers;
  for (const json& item : *value) {
    const std::optional<int64_t> number = Natural(item);
    if (!number.has_value()) return std::nullopt;
    numbers.push_back(*number);
  }
  return numbers;
}

std::optional<Part> PartFromJson(const json& value) {
  if (const json* range = Member(value, "range")) {
    const std::optional<std::vector<int64_t>> ends = Naturals(range);
    if (!ends.has_value() || ends->size() != 2) return std::nullopt;
    return FlatRange{(*ends)[0], (*ends)[1]};
  }
  const json* box = Member(value, "box");
  if (box == nullptr || !box->is_array() || box->size() != 2) return std::nullopt;
  std::optional<std::vector<int64_t>> offset = Naturals(&(*box)[0]), sizes = Naturals(&(*box)[1]);
  if (!offset.has_value() || !sizes.has_value()) return std::nullopt;
  return Box{*std::move(offset), *std::move(sizes)};
}

uint64_t BlocksOf(uint64_t bytes) { return (bytes + kBlockBytes - 1) / kBlockBytes; }

absl::Status CheckTensor(const StoredTensor& tensor, const std::vector<StoredFile>& files) {
  std::vector<RankShard> shards;
  for (const StoredPart& part : tensor.parts) {
    if (part.file >= files.size()) return absl::DataLossError("is in a file that is not listed");
    const StoredFile& file = files[part.file];
    const uint64_t bytes = tensor.BytesOf(part.part);
    if (part.offset < file.header_bytes || part.offset > file.bytes ||
        bytes > file.bytes - part.offset) {
      return absl::DataLossError(absl::StrCat("lies outside of ", file.name));
    }
    shards.push_back({static_cast<int>(part.file), tensor.ShardOf(part.part)});
  }
  if (shards.empty() && tensor.BytesOf(Whole{}) == 0) return absl::OkStatus();
  return CheckCover(shards);
}

// Each byte behind the header is that of one part.
absl::Status CheckFilled(const Manifest& manifest) {
  std::vector<std::vector<std::pair<uint64_t, uint64_t>>> places(manifest.files.size());
  for (const auto& [name, tensor] : manifest.tensors) {
    for (const StoredPart& part : tensor.parts) {
      const uint64_t bytes = tensor.BytesOf(part.part);
      if (bytes > 0) places[part.file].emplace_back(part.offset, part.offset + bytes);
    }
  }
  for (size_t i = 0; i < places.size(); ++i) {
    std::sort(places[i].begin(), places[i].end());
    uint64_t at = manifest.files[i].header_bytes;
    bool is_filled = true;
    for (const auto& [begin, end] : places[i]) {
      is_filled = is_filled && begin == at;
      at = end;
    }
    if (!is_filled || at != manifest.files[i].bytes) {
      return Damaged(absl::StrCat("whose tensors do not fill ", manifest.files[i].name));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Manifest> FromJson(const json& root) {
  Manifest manifest;
  const json* format = Member(root, "format");
  if (format == nullptr || *format != kFormat) return Damaged("of another format");
  const std::optional<int64_t> version = NaturalMember(root, "version");
  if (version.has_value() && *version > kVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("has version ", *version, " of the format sharded, and this program reads ",
                     kVersion, ": a newer release wrote it"));
  }
  const std::optional<int64_t> world_size = NaturalMember(root, "world_size");
  if (version != kVersion || NaturalMember(root, "block_bytes") != int64_t{kBlockBytes} ||
      !world_size.has_value() || *world_size < 1 || *world_size > kMostRanks) {
    return Damaged("without a version, a size of blocks, or a world size that can be");
  }
  manifest.world_size = static_cast<int>(*world_size);
  const json* files = Member(root, "files");
  const json* tensors = Member(root, "tensors");
  const json* state = Member(root, "state");
  const json* per_rank = Member(root, "per_rank");
  if (files == nullptr || !files->is_array() || tensors == nullptr || !tensors->is_object() ||
      state == nullptr || per_rank == nullptr || !per_rank->is_array()) {
    return Damaged("that lacks files, tensors, state or per_rank");
  }
  std::set<std::string> names;
  for (const json& one : *files) {
    DDP_ASSIGN_OR_RETURN(StoredFile file, FileFromJson(one));
    if (!names.insert(file.name).second) return Damaged("that has a file twice");
    manifest.files.push_back(std::move(file));
  }
  for (const auto& [name, one] : tensors->items()) {
    absl::StatusOr<StoredTensor> tensor = TensorFromJson(one);
    absl::Status status = tensor.status();
    if (status.ok()) status = CheckTensor(*tensor, manifest.files);
    if (!status.ok()) {
      return Damaged(absl::StrCat("whose tensor '", Printable(name), "' ", status.message()));
    }
    manifest.tensors.emplace(name, *std::move(tensor));
  }
  DDP_RETURN_IF_ERROR(CheckFilled(manifest));
  manifest.state = *state;
  for (const json& tree : *per_rank) manifest.per_rank.push_back(tree);
  if (!manifest.per_rank.empty() && manifest.per_rank.size() != static_cast<size_t>(*world_size)) {
    return Damaged("that does not have the entries of each rank");
  }
  return manifest;
}

}  // namespace

const Encoding* EncodingOf(absl::string_view dtype) {
  for (const Encoding& encoding : kEncodings) {
    if (encoding.name == dtype) return &encoding;
  }
  return nullptr;
}

std::string FileName(int rank, bool ranges) {
  return absl::StrFormat("rank_%05d.%s", rank, ranges ? "ranges" : "safetensors");
}

// "rank_", at least five digits, and one of the endings.
bool IsFileName(absl::string_view name) {
  if (!absl::ConsumePrefix(&name, "rank_")) return false;
  if (!absl::ConsumeSuffix(&name, ".safetensors") && !absl::ConsumeSuffix(&name, ".ranges")) {
    return false;
  }
  return name.size() >= 5 && name.size() <= 9 &&
         std::all_of(name.begin(), name.end(), absl::ascii_isdigit);
}

uint64_t StoredTensor::BytesOf(const Part& part) const {
  uint64_t bytes = static_cast<uint64_t>(encoding->bytes);
  for (int64_t size : LocalShape({shape, part})) bytes *= static_cast<uint64_t>(size);
  return bytes;
}

json ToJson(const StoredTensor& tensor) {
  json parts = json::array();
  for (const StoredPart& stored : tensor.parts) {
    json part{{"file", stored.file}, {"offset", stored.offset}};
    if (const auto* range = std::get_if<FlatRange>(&stored.part)) {
      part["range"] = {range->begin, range->end};
    } else {
      const auto* box = std::get_if<Box>(&stored.part);
      part["box"] = json::array({box->offset, box->sizes});
    }
    std::string digests;
    for (uint64_t digest : stored.digests) digests += HexOf(digest);
    part["xxh3"] = std::move(digests);
    parts.push_back(std::move(part));
  }
  json value{{"dtype", tensor.encoding->name}, {"shape", tensor.shape}, {"parts", parts}};
  if (!tensor.memory_order.empty()) value["memory_order"] = tensor.memory_order;
  return value;
}

absl::StatusOr<StoredTensor> TensorFromJson(const json& value) {
  const auto damaged = [](absl::string_view what) { return absl::DataLossError(what); };
  StoredTensor tensor;
  const json* dtype = Member(value, "dtype");
  if (dtype != nullptr && dtype->is_string()) {
    tensor.encoding = EncodingOf(dtype->get_ref<const std::string&>());
  }
  if (tensor.encoding == nullptr) return damaged("has no known dtype");
  std::optional<std::vector<int64_t>> shape = Naturals(Member(value, "shape"));
  if (!shape.has_value()) return damaged("has no shape");
  tensor.shape = *std::move(shape);
  DDP_ASSIGN_OR_RETURN(const int64_t elements, NumElements(tensor.shape));
  int64_t bytes = 0;
  if (__builtin_mul_overflow(elements, tensor.encoding->bytes, &bytes)) {
    return damaged("is too large");
  }
  if (const json* order = Member(value, "memory_order")) {
    std::optional<std::vector<int64_t>> dimensions = Naturals(order);
    if (!dimensions.has_value()) return damaged("has no order of dimensions");
    DDP_RETURN_IF_ERROR(CheckMemoryOrder(tensor.shape, *dimensions));
    tensor.memory_order = NormalOrder(*std::move(dimensions));
  }
  const json* parts = Member(value, "parts");
  if (parts == nullptr || !parts->is_array()) return damaged("has no list of parts");
  for (const json& one : *parts) {
    StoredPart stored;
    const std::optional<int64_t> file = NaturalMember(one, "file");
    const std::optional<int64_t> offset = NaturalMember(one, "offset");
    std::optional<Part> part = PartFromJson(one);
    const json* digests = Member(one, "xxh3");
    if (!file.has_value() || !offset.has_value() || !part.has_value() || digests == nullptr ||
        !digests->is_string()) {
      return damaged("has a part without file, offset, range or box, or checksums");
    }
    stored.file = static_cast<size_t>(*file);
    stored.offset = static_cast<uint64_t>(*offset);
    stored.part = *std::move(part);
    DDP_RETURN_IF_ERROR(CheckPart(tensor.ShardOf(stored.part)));
    absl::string_view hex = digests->get_ref<const std::string&>();
    if (hex.size() != 16 * BlocksOf(tensor.BytesOf(stored.part))) {
      return damaged("has too many or too few checksums");
    }
    for (; !hex.empty(); hex.remove_prefix(16)) {
      const std::optional<uint64_t> digest = DigestOfHex(hex.substr(0, 16));
      if (!digest.has_value()) return damaged("has a checksum that is none");
      stored.digests.push_back(*digest);
    }
    tensor.parts.push_back(std::move(stored));
  }
  return tensor;
}

json ToJson(const StoredFile& file) {
  return {{"name", file.name},
          {"bytes", file.bytes},
          {"header_bytes", file.header_bytes},
          {"header_xxh3", HexOf(file.header_digest)}};
}

absl::StatusOr<StoredFile> FileFromJson(const json& value) {
  const json* name = Member(value, "name");
  const json* digest = Member(value, "header_xxh3");
  const std::optional<int64_t> bytes = NaturalMember(value, "bytes");
  const std::optional<int64_t> header_bytes = NaturalMember(value, "header_bytes");
  std::optional<uint64_t> read;
  if (digest != nullptr && digest->is_string()) {
    read = DigestOfHex(digest->get_ref<const std::string&>());
  }
  if (name == nullptr || !name->is_string() || !read.has_value() || !bytes.has_value() ||
      !header_bytes.has_value() || *header_bytes > *bytes ||
      static_cast<uint64_t>(*header_bytes) > safetensors::kMaxHeader + 8) {
    return Damaged("with a file without name, sizes or checksum");
  }
  StoredFile file;
  file.name = name->get<std::string>();
  // It is joined to the folder's path.
  if (!IsFileName(file.name)) {
    return Damaged(absl::StrCat("with a file named '", Printable(file.name), "'"));
  }
  file.bytes = static_cast<uint64_t>(*bytes);
  file.header_bytes = static_cast<uint64_t>(*header_bytes);
  file.header_digest = *read;
  return file;
}

std::string EncodeManifest(const Manifest& manifest) {
  json files = json::array();
  for (const StoredFile& file : manifest.files) files.push_back(ToJson(file));
  json tensors = json::object();
  for (const auto& [name, tensor] : manifest.tensors) tensors[name] = ToJson(tensor);
  const json root{{"format", kFormat},
                  {"version", kVersion},
                  {"world_size", manifest.world_size},
                  {"block_bytes", kBlockBytes},
                  {"files", std::move(files)},
                  {"tensors", std::move(tensors)},
                  {"state", manifest.state},
                  {"per_rank", manifest.per_rank}};
  std::string text = absl::StrCat(kBegin, root.dump());
  const std::string digest = HexOf(Xxh3(text));
  absl::StrAppend(&text, kMiddle, digest, kEnd);
  return text;
}

absl::StatusOr<Manifest> DecodeManifest(absl::string_view text) {
  absl::string_view rest = text;
  const size_t tail = kMiddle.size() + 16 + kEnd.size();
  if (!absl::ConsumePrefix(&rest, kBegin) || rest.size() < tail || !absl::EndsWith(rest, kEnd)) {
    return Damaged("that is cut off, or is none");
  }
  const absl::string_view body = rest.substr(0, rest.size() - tail);
  const absl::string_view middle = rest.substr(body.size(), kMiddle.size());
  const absl::string_view hex = rest.substr(body.size() + kMiddle.size(), 16);
  if (middle != kMiddle || DigestOfHex(hex) != Xxh3(text.substr(0, kBegin.size() + body.size()))) {
    return Damaged("that does not match its checksum");
  }
  const absl::StatusOr<json> root = ParseJson(body, {.depth = 512});
  if (!root.ok()) return Damaged(absl::StrCat("that ", root.status().message()));
  return FromJson(*root);
}

}  // namespace ddp::checkpoint::sharded
