#include "checkpoint/state.h"

#include <ATen/Functions.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue_inl.h>

#include <charconv>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"

namespace ddp::checkpoint {
namespace {

constexpr std::pair<at::ScalarType, const char*> kDtypes[] = {
    {at::kBool, "bool"},
    {at::kByte, "uint8"},
    {at::kChar, "int8"},
    {at::kShort, "int16"},
    {at::kInt, "int32"},
    {at::kLong, "int64"},
    {at::kUInt16, "uint16"},
    {at::kUInt32, "uint32"},
    {at::kUInt64, "uint64"},
    {at::kHalf, "float16"},
    {at::kBFloat16, "bfloat16"},
    {at::kFloat, "float32"},
    {at::kDouble, "float64"},
    {at::kComplexHalf, "complex32"},
    {at::kComplexFloat, "complex64"},
    {at::kComplexDouble, "complex128"},
    {at::kFloat8_e4m3fn, "float8_e4m3fn"},
    {at::kFloat8_e5m2, "float8_e5m2"},
    {at::kFloat8_e4m3fnuz, "float8_e4m3fnuz"},
    {at::kFloat8_e5m2fnuz, "float8_e5m2fnuz"},
    {at::kFloat8_e8m0fnu, "float8_e8m0fnu"},
};

absl::Status AtPath(const std::string& path, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("sharded tensor '", path, "': ", what));
}

// `key` as a key of `dict`: an int where its keys are ints.
c10::IValue KeyOf(const c10::impl::GenericDict& dict, absl::string_view key) {
  int64_t number = 0;
  const bool by_number = dict.keyType()->kind() == c10::TypeKind::IntType ||
                         (dict.size() > 0 && dict.begin()->key().isInt());
  if (by_number && absl::SimpleAtoi(key, &number)) return number;
  return std::string(key);
}

// The bits of `tensor`, in a type that every operation knows.
at::Tensor Bits(const at::Tensor& tensor) {
  switch (tensor.element_size()) {
    case 1:
      return tensor.view(at::kByte);
    case 2:
      return tensor.view(at::kShort);
    case 4:
      return tensor.view(at::kInt);
    case 8:
      return tensor.view(at::kLong);
    default:
      return tensor;
  }
}

// Bytes of all tensors, of those that share memory once.
uint64_t BytesOf(const c10::IValue& value, std::set<const void*>& counted) {
  uint64_t bytes = 0;
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined() || tensor.layout() != at::kStrided) return 0;
    const void* const memory =
        tensor.is_meta() ? tensor.storage().unsafeGetStorageImpl() : tensor.const_data_ptr();
    return counted.insert(memory).second ? tensor.nbytes() : 0;
  }
  if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) bytes += BytesOf(entry.value(), counted);
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) bytes += BytesOf(element, counted);
  } else if (value.isTuple()) {
    for (const c10::IValue& element : value.toTupleRef().elements()) {
      bytes += BytesOf(element, counted);
    }
  }
  return bytes;
}

}  // namespace

std::string KeyText(const c10::IValue& key) {
  if (key.isString()) return key.toStringRef();
  if (key.isInt()) return absl::StrCat(key.toInt());
  if (key.isBool()) return key.toBool() ? "True" : "False";
  if (!key.isDouble()) return key.tagKind();
  char digits[32];
  const auto end = std::to_chars(digits, digits + sizeof(digits), key.toDouble()).ptr;
  const std::string text(digits, end);
  // A whole number differs from an int.
  return text.find_first_not_of("-0123456789") == std::string::npos ? absl::StrCat(text, ".0")
                                                                    : text;
}

std::string KindText(const c10::IValue& value) {
  if (value.isNone()) return "None";
  if (value.isTensor()) return "a tensor";
  if (value.isBool()) return "a bool";
  if (value.isInt()) return "an int";
  if (value.isDouble()) return "a float";
  if (value.isComplexDouble()) return "a complex";
  if (value.isString()) return "a str";
  if (value.isTuple()) return "a tuple";
  if (value.isList()) return "a list";
  if (value.isGenericDict()) return "a dict";
  return absl::StrCat("a ", value.tagKind());
}

std::string DtypeName(at::ScalarType dtype) {
  for (const auto& [known, name] : kDtypes) {
    if (known == dtype) return name;
  }
  return "";
}

at::ScalarType DtypeOfName(const std::string& name) {
  for (const auto& [dtype, known] : kDtypes) {
    if (known == name) return dtype;
  }
  return at::ScalarType::Undefined;
}

namespace {

// Whether `value`, of a root, is a tensor on the device meta that stands for `tensor`.
bool IsPlaceOf(const ShardedTensor& tensor, const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) return false;
  const at::Tensor& place = value.toTensor();
  return place.is_meta() && place.layout() == at::kStrided && place.scalar_type() == tensor.dtype &&
         place.sizes() == at::IntArrayRef(tensor.global_shape) &&
         place.is_non_overlapping_and_dense() && place.storage().nbytes() == place.nbytes();
}

}  // namespace

absl::StatusOr<std::optional<c10::IValue>> FindAt(c10::impl::GenericDict root,
                                                  const std::string& path) {
  std::optional<c10::IValue> value = root;
  for (const absl::string_view key : absl::StrSplit(path, '/')) {
    if (!value->isGenericDict()) return AtPath(path, "the state has a value there, too");
    const c10::impl::GenericDict dict = value->toGenericDict();
    const auto found = dict.find(KeyOf(dict, key));
    if (found == dict.end()) return std::nullopt;
    value = found->value();
  }
  return value;
}

absl::Status CheckShards(const State& state) {
  for (const auto& [path, tensor] : state.sharded) {
    DDP_ASSIGN_OR_RETURN(const std::optional<c10::IValue> value, FindAt(state.root, path));
    if (value && !IsPlaceOf(tensor, *value)) {
      return AtPath(path, "the state has a value there, too");
    }
    if (DtypeName(tensor.dtype).empty()) {
      return AtPath(path, absl::StrCat("has dtype ", c10::toString(tensor.dtype),
                                       ", which checkpoints cannot hold"));
    }
    Shard shard{tensor.global_shape, FlatRange{}, tensor.memory_order};
    DDP_RETURN_IF_ERROR(Annotate(CheckPart(shard), absl::StrCat("sharded tensor '", path, "'")));
    for (const auto& [part, values] : tensor.parts) {
      shard.part = part;
      if (!values.defined()) return AtPath(path, absl::StrCat(ToString(shard), ": no tensor"));
      if (values.scalar_type() != tensor.dtype) {
        return AtPath(path, absl::StrCat(ToString(shard), ": its tensor is ", values.toString(),
                                         " instead of ", c10::toString(tensor.dtype)));
      }
      const c10::IntArrayRef sizes = values.sizes();
      DDP_RETURN_IF_ERROR(Annotate(CheckLocal(shard, {sizes.data(), sizes.size()}),
                                   absl::StrCat("sharded tensor '", path, "'")));
    }
  }
  return absl::OkStatus();
}

std::map<std::string, TensorParts> PartsOf(const State& state) {
  std::map<std::string, TensorParts> all;
  for (const auto& [path, tensor] : state.sharded) {
    TensorParts& mine = all[path];
    mine = {DtypeName(tensor.dtype), tensor.global_shape, tensor.memory_order, {}};
    for (const TensorPart& part : tensor.parts) mine.parts.push_back(part.part);
  }
  return all;
}

absl::Status InsertAt(c10::impl::GenericDict root, const std::string& path,
                      const c10::IValue& value) {
  const std::vector<absl::string_view> keys = absl::StrSplit(path, '/');
  for (size_t i = 0; i < keys.size(); ++i) {
    const c10::IValue key = KeyOf(root, keys[i]);
    const auto found = root.find(key);
    if (i + 1 == keys.size()) {
      if (found != root.end()) return AtPath(path, "the state has a value there, too");
      root.insert(key, value);
      break;
    }
    if (found == root.end()) {
      const c10::impl::GenericDict below = NewTree();
      root.insert(key, below);
      root = below;
      continue;
    }
    if (!found->value().isGenericDict()) {
      return AtPath(path, absl::StrCat("'", keys[i], "' in it is no dict"));
    }
    root = found->value().toGenericDict();
  }
  return absl::OkStatus();
}

at::Tensor PartOf(const at::Tensor& whole, const Part& part,
                  const std::vector<int64_t>& memory_order) {
  if (const auto* box = std::get_if<Box>(&part)) {
    at::Tensor view = whole;
    for (size_t i = 0; i < box->sizes.size(); ++i) {
      view = view.narrow(static_cast<int64_t>(i), box->offset[i], box->sizes[i]);
    }
    return view;
  }
  const auto* range = std::get_if<FlatRange>(&part);
  if (range == nullptr) return whole;
  const at::Tensor ordered = memory_order.empty() ? whole : whole.permute(memory_order);
  return ordered.reshape({-1}).narrow(0, range->begin, range->end - range->begin);
}

void CopyPart(const at::Tensor& values, const Part& part, const std::vector<int64_t>& memory_order,
              const at::Tensor& whole) {
  const at::Tensor from = Bits(values.detach().resolve_conj().resolve_neg());
  const at::Tensor to = Bits(whole.detach());
  const auto* range = std::get_if<FlatRange>(&part);
  if (range == nullptr) {
    PartOf(to, part, {}).copy_(from);
    return;
  }
  // A range of a tensor that is not contiguous in this order has no view: box by box.
  const at::Tensor ordered = memory_order.empty() ? to : to.permute(memory_order);
  const c10::IntArrayRef sizes = ordered.sizes();
  int64_t done = 0;
  for (const Box& box : BoxesOf({sizes.data(), sizes.size()}, *range)) {
    const at::Tensor place = PartOf(ordered, box, {});
    place.copy_(from.narrow(0, done, place.numel()).view(place.sizes()));
    done += place.numel();
  }
}

uint64_t EstimateBytes(const State& state, int ranks) {
  std::set<const void*> counted;
  uint64_t bytes = BytesOf(state.root, counted);
  for (const auto& [path, tensor] : state.sharded) {
    const auto place = FindAt(state.root, path);
    if (place.ok() && *place) continue;  // counted there
    bytes += static_cast<uint64_t>(c10::multiply_integers(tensor.global_shape)) *
             c10::elementSize(tensor.dtype);
  }
  for (const auto& [rank, entries] : state.per_rank) {
    bytes += static_cast<uint64_t>(ranks) * BytesOf(entries, counted);
  }
  return bytes;
}

}  // namespace ddp::checkpoint
