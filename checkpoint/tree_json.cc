#include "checkpoint/tree_json.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/json_number.h"
#include "base/status.h"
#include "base/utf8.h"

namespace ddp::checkpoint {
namespace {

using nlohmann::json;

absl::Status Refuse(const std::string& path, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("'", path, "' ", what));
}

absl::Status Damaged(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("has a state that is no tree of values: ", what));
}

class Writer {
 public:
  explicit Writer(const NameOfTensor& name_of) : name_of_(name_of) {}

  absl::StatusOr<json> Write(const c10::IValue& value, const std::string& path, int depth) const {
    if (depth > kMaxTreeDepth) return Refuse(path, "is nested too deeply, or holds itself");
    if (value.isNone()) return json(nullptr);
    if (value.isBool()) return json(value.toBool());
    if (value.isInt()) return json(value.toInt());
    if (value.isDouble()) {
      const double number = value.toDouble();
      if (std::isfinite(number)) return json(number);
      return json{{"float", ToJson(number)}};
    }
    if (value.isString()) {
      if (!IsUtf8(value.toStringRef())) return Refuse(path, "is text that is not UTF-8");
      return json(value.toStringRef());
    }
    if (value.isTensor()) {
      DDP_ASSIGN_OR_RETURN(std::string name, name_of_(path, value.toTensor()));
      return json{{"tensor", std::move(name)}};
    }
    if (value.isList()) return WriteItems(value.toListRef().vec(), "list", path, depth);
    if (value.isTuple()) {
      return WriteItems(value.toTupleRef().elements().vec(), "tuple", path, depth);
    }
    if (!value.isGenericDict()) {
      return Refuse(path,
                    absl::StrCat("is a ", value.tagKind(), ", which this format cannot hold"));
    }
    json pairs = json::array();
    for (const auto& entry : value.toGenericDict()) {
      if (!entry.key().isString() && !entry.key().isInt()) {
        return Refuse(path, absl::StrCat("has a key of type ", entry.key().tagKind(),
                                         "; keys are str or int"));
      }
      const bool text = entry.key().isString();
      if (text && !IsUtf8(entry.key().toStringRef())) {
        return Refuse(path, "has a key that is not UTF-8");
      }
      json key = text ? json(entry.key().toStringRef()) : json(entry.key().toInt());
      const std::string name = text ? entry.key().toStringRef() : absl::StrCat(entry.key().toInt());
      DDP_ASSIGN_OR_RETURN(json below, Write(entry.value(), Join(path, name), depth + 1));
      json pair = json::array();
      pair.push_back(std::move(key));
      pair.push_back(std::move(below));
      pairs.push_back(std::move(pair));
    }
    json dict;
    dict["dict"] = std::move(pairs);
    return dict;
  }

 private:
  static std::string Join(const std::string& path, absl::string_view name) {
    return path.empty() ? std::string(name) : absl::StrCat(path, "/", name);
  }

  absl::StatusOr<json> WriteItems(const std::vector<c10::IValue>& items, const char* kind,
                                  const std::string& path, int depth) const {
    json list = json::array();
    for (size_t i = 0; i < items.size(); ++i) {
      DDP_ASSIGN_OR_RETURN(json item, Write(items[i], Join(path, absl::StrCat(i)), depth + 1));
      list.push_back(std::move(item));
    }
    json value;
    value[kind] = std::move(list);
    return value;
  }

  const NameOfTensor& name_of_;
};

absl::StatusOr<c10::IValue> Read(const json& value, const TensorOfName& tensor_of, int depth) {
  if (depth > kMaxTreeDepth) return Damaged("it is nested too deeply");
  if (value.is_null()) return c10::IValue();
  if (value.is_boolean()) return c10::IValue(value.get<bool>());
  if (value.is_number_integer()) {
    if (value.is_number_unsigned() &&
        value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return Damaged("an integer of more than 64 bits");
    }
    return c10::IValue(value.get<int64_t>());
  }
  if (value.is_number_float()) return c10::IValue(value.get<double>());
  if (value.is_string()) return c10::IValue(value.get<std::string>());
  if (const json* number = MemberOf(value, "float")) {
    const std::optional<double> read = NumberFromJson(*number);
    if (!read.has_value()) return Damaged("a float that is no number");
    return c10::IValue(*read);
  }
  if (const json* name = MemberOf(value, "tensor")) {
    if (!name->is_string()) return Damaged("a tensor without a name");
    return tensor_of(name->get<std::string>());
  }
  const json* list = MemberOf(value, "list");
  const json* tuple = MemberOf(value, "tuple");
  if (list != nullptr || tuple != nullptr) {
    const json& from = list != nullptr ? *list : *tuple;
    if (!from.is_array()) return Damaged("a list that is none");
    std::vector<c10::IValue> items;
    for (const json& item : from) {
      DDP_ASSIGN_OR_RETURN(c10::IValue read, Read(item, tensor_of, depth + 1));
      items.push_back(std::move(read));
    }
    if (tuple != nullptr) return c10::IValue(c10::ivalue::Tuple::create(std::move(items)));
    c10::impl::GenericList made(c10::AnyType::get());
    for (c10::IValue& item : items) made.push_back(std::move(item));
    return c10::IValue(std::move(made));
  }
  const json* pairs = MemberOf(value, "dict");
  if (pairs == nullptr || !ArePairs(*pairs)) return Damaged("a value of no known kind");
  c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
  for (const json& pair : *pairs) {
    DDP_ASSIGN_OR_RETURN(c10::IValue key, Read(pair[0], tensor_of, depth + 1));
    DDP_ASSIGN_OR_RETURN(c10::IValue below, Read(pair[1], tensor_of, depth + 1));
    if (!dict.insert(std::move(key), std::move(below)).second) {
      return Damaged("a dict that has a key twice");
    }
  }
  return c10::IValue(std::move(dict));
}

}  // namespace

const json* MemberOf(const json& value, const char* kind) {
  if (!value.is_object() || value.size() != 1) return nullptr;
  const auto found = value.find(kind);
  return found == value.end() ? nullptr : &*found;
}

bool ArePairs(const json& value) {
  if (!value.is_array()) return false;
  for (const json& pair : value) {
    if (!pair.is_array() || pair.size() != 2) return false;
    if (!pair[0].is_string() && !pair[0].is_number_integer()) return false;
  }
  return true;
}

absl::StatusOr<json> TreeToJson(const c10::IValue& tree, const NameOfTensor& name_of) {
  return Writer(name_of).Write(tree, "", 0);
}

absl::StatusOr<c10::IValue> TreeFromJson(const json& value, const TensorOfName& tensor_of) {
  return Read(value, tensor_of, 0);
}

}  // namespace ddp::checkpoint
