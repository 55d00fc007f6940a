#include "ddp/tree/decoder.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "ATen/core/jit_type.h"
#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace ddp {

using namespace tree_internal;  // the format

TreeDecoder::TreeDecoder(const EncodedTree& encoded)
    : host_(encoded.host), device_(encoded.device) {
  const size_t size = host_.defined() ? host_.nbytes() : 0;
  uint64_t nodes = 0;
  if (size >= kPreamble) std::memcpy(&nodes, host_.data_ptr<uint8_t>() + 8, 8);
  if (size < kPreamble || std::memcmp(host_.data_ptr<uint8_t>(), kMagic, 8) != 0 ||
      nodes > size - kPreamble) {
    status_ = absl::InvalidArgumentError("these bytes are not an encoded value");
    return;
  }
  nodes_ = {reinterpret_cast<const char*>(host_.data_ptr<uint8_t>()) + kPreamble, nodes};
  host_offset_ = kPreamble + nodes;
}

void TreeDecoder::Fail(const TreePath& path, std::string_view problem) {
  if (ok()) status_ = absl::InvalidArgumentError(absl::StrCat(path.Text(), " ", problem));
}

bool TreeDecoder::CheckDepth(const TreePath& path) {
  if (path.depth() > kMaxTreeDepth) Fail(path, "is nested too deeply");
  return ok();
}

absl::Status TreeDecoder::Finish() {
  DDP_RETURN_IF_ERROR(status_);
  if (!nodes_.empty() || host_offset_ != host_.nbytes() ||
      device_offset_ != (device_.defined() ? device_.nbytes() : 0)) {
    return absl::InvalidArgumentError("the encoded value has more in it than this type");
  }
  return absl::OkStatus();
}

bool TreeDecoder::Bytes(void* to, size_t size, const TreePath& path) {
  if (!ok()) return false;
  if (size > nodes_.size()) {
    Fail(path, "is cut off");
    return false;
  }
  if (size > 0) std::memcpy(to, nodes_.data(), size);
  nodes_.remove_prefix(size);
  return true;
}

bool TreeDecoder::Expect(uint8_t tag, const TreePath& path) {
  uint8_t found = 0;
  if (!Bytes(&found, 1, path)) return false;
  if (found != tag) {
    Fail(path, absl::StrCat("has tag ", found, ", not ", tag, ": it was sent as another type"));
  }
  return ok();
}

uint64_t TreeDecoder::Varint(const TreePath& path) {
  uint64_t value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    uint8_t byte = 0;
    if (!Bytes(&byte, 1, path)) return 0;
    if (shift == 63 && byte > 1) break;
    value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) return value;
  }
  Fail(path, "has a length of more than 64 bits");
  return 0;
}

size_t TreeDecoder::Count(uint8_t tag, const TreePath& path, int64_t expected) {
  if (!Expect(tag, path)) return 0;
  const uint64_t count = Varint(path);
  if (count > nodes_.size()) Fail(path, "is cut off");
  if (expected >= 0 && count != static_cast<uint64_t>(expected)) {
    Fail(path, absl::StrCat("has ", count, " members, not ", expected));
  }
  return ok() ? count : 0;
}

void TreeDecoder::Number(NumberType type, void* number, const TreePath& path) {
  uint8_t found = 0;
  if (!Expect(kTagNumber, path) || !Bytes(&found, 1, path)) return;
  if (found != type) return Fail(path, "was sent as a number of another type");
  uint8_t bytes[32];
  if (!Bytes(bytes, type % 32, path)) return;
  if (type == NumberTypeOf<bool>() && bytes[0] > 1) return Fail(path, "is no bool");
  std::memcpy(number, bytes, type % 32);
}

void TreeDecoder::NumberArray(NumberType type, absl::FunctionRef<void*(size_t)> resize,
                              const TreePath& path) {
  uint8_t found = 0;
  if (!Expect(kTagNumbers, path) || !Bytes(&found, 1, path)) return;
  if (found != type) return Fail(path, "was sent as numbers of another type");
  const uint64_t count = Varint(path), size = type % 32;
  if (!ok()) return;
  if (count > nodes_.size() / size) return Fail(path, "is cut off");
  if (type == NumberTypeOf<bool>() &&
      std::any_of(nodes_.begin(), nodes_.begin() + count, [](uint8_t byte) { return byte > 1; })) {
    return Fail(path, "is no vector of bool");
  }
  Bytes(resize(count), count * size, path);
}

void TreeDecoder::Text(uint8_t tag, absl::FunctionRef<void*(size_t)> resize, const TreePath& path) {
  if (!Expect(tag, path)) return;
  const uint64_t size = Varint(path);
  if (!ok()) return;
  if (size > nodes_.size()) return Fail(path, "is cut off");
  Bytes(resize(size), size, path);
}

bool TreeDecoder::OptionalHasValue(const TreePath& path) {
  if (ok() && !nodes_.empty() && nodes_[0] == kTagNone) {
    nodes_.remove_prefix(1);
    return false;
  }
  return Expect(kTagOptional, path);
}

void TreeDecoder::Tensor(at::Tensor& tensor, const TreePath& path) {
  uint8_t head[3];  // tag, dtype, device type
  if (!Bytes(head, 1, path)) return;
  tensor = at::Tensor();
  if (head[0] == kTagUndefined) return;
  if (head[0] != kTagHostTensor && head[0] != kTagDeviceTensor) {
    return Fail(path, absl::StrCat("has tag ", head[0], ": it was not sent as a tensor"));
  }
  if (!Bytes(head + 1, 2, path)) return;
  const auto dtype = static_cast<c10::ScalarType>(head[1]);
  const auto type = static_cast<c10::DeviceType>(head[2]);
  const bool direct = head[0] == kTagDeviceTensor;
  if (head[1] >= static_cast<uint8_t>(c10::ScalarType::NumOptions) || !IsPlain(dtype) ||
      !HasMemory(type) || (direct && (!device_.defined() || device_.device().type() != type))) {
    return Fail(path, "is a tensor of an unknown dtype or device");
  }
  const uint64_t dimensions = Varint(path);
  if (dimensions > nodes_.size()) return Fail(path, "is cut off");
  std::vector<int64_t> sizes;
  // A size of 0 counts as 1 in the product, since strides must not overflow, either.
  const uint64_t element = c10::elementSize(dtype);
  uint64_t most = element;
  bool empty = false;
  for (uint64_t i = 0; i < dimensions && ok(); ++i) {
    const uint64_t size = Varint(path);
    if (size > std::numeric_limits<int64_t>::max() / most) return Fail(path, "is too large");
    most *= std::max<uint64_t>(size, 1);
    empty |= size == 0;
    sizes.push_back(static_cast<int64_t>(size));
  }
  if (!ok()) return;
  const uint64_t bytes = empty ? 0 : most;
  const at::Tensor& payload = direct ? device_ : host_;
  size_t& offset = direct ? device_offset_ : host_offset_;
  const size_t start = Aligned(offset);
  if (start > payload.nbytes() || bytes > payload.nbytes() - start) {
    return Fail(path, "is cut off");
  }
  offset = start + bytes;
  if (!direct) {
    const uint8_t* from = payload.data_ptr<uint8_t>() + start;
    if (dtype == c10::ScalarType::Bool &&
        std::any_of(from, from + bytes, [](uint8_t byte) { return byte > 1; })) {
      return Fail(path, "is no tensor of bool");
    }
    tensor = at::empty(sizes, dtype);
    if (bytes > 0) std::memcpy(tensor.data_ptr(), from, bytes);
    if (type != c10::DeviceType::CPU) tensor = tensor.to(c10::Device(type));
  } else {
    tensor = at::empty(sizes, payload.options().dtype(dtype));
    if (bytes > 0) {
      AsBytes(tensor).copy_(
          payload.narrow(0, static_cast<int64_t>(start), static_cast<int64_t>(bytes)));
    }
  }
}

c10::TypePtr TreeDecoder::DynamicType(const TreePath& path, int depth) {
  uint8_t code = 0;
  if (!Bytes(&code, 1, path)) return c10::AnyType::get();
  const auto part = [&] { return DynamicType(path, depth + 1); };
  if (depth > kMaxTreeDepth) {
    Fail(path, "is nested too deeply");
  } else if (code == 1) {
    return c10::TensorType::get();
  } else if (code == 2) {
    return c10::IntType::get();
  } else if (code == 3) {
    return c10::FloatType::get();
  } else if (code == 4) {
    return c10::BoolType::get();
  } else if (code == 5) {
    return c10::StringType::get();
  } else if (code == 6) {
    return c10::ComplexType::get();
  } else if (code == 7) {
    return c10::NoneType::get();
  } else if (code == 8) {
    const c10::TypePtr inner = part();
    // c10 knows a list of optional tensors by the address of its type, and keeps such types.
    return inner == c10::TensorType::get() ? c10::OptionalType::get(inner)
                                           : c10::OptionalType::create(inner);
  } else if (code == 9) {
    return c10::ListType::create(part());
  } else if (code == 10) {
    const c10::TypePtr key = KeyType(path, depth + 1);
    return c10::DictType::create(key, part());
  } else if (code == 11) {
    std::vector<c10::TypePtr> parts;
    const uint64_t count = Varint(path);
    for (uint64_t i = 0; i < count && ok(); ++i) parts.push_back(part());
    return c10::TupleType::create(parts);
  } else if (code != 0) {
    Fail(path, "has an IValue of unknown type");
  }
  return c10::AnyType::get();
}

// Checks the type, since c10 throws for keys of other types.
c10::TypePtr TreeDecoder::KeyType(const TreePath& path, int depth) {
  c10::TypePtr type = DynamicType(path, depth);
  if (CanBeKeyType(*type)) return type;
  Fail(path, "has a dict whose keys are of a type that cannot be");
  return c10::AnyType::get();
}

c10::IValue TreeDecoder::Dynamic(const TreePath& path) {
  if (!CheckDepth(path)) return {};
  if (nodes_.empty()) {
    Fail(path, "is cut off");
    return {};
  }
  const auto read = [&]<typename T>(T value) {
    Read(value, path);
    return c10::IValue(std::move(value));
  };
  // The element's type is its list's or dict's.
  const auto element = [&](const TreePath& child, const c10::Type* type) {
    c10::IValue value = Dynamic(child);
    if (ok() && type != nullptr && !Fits(value, *type)) Fail(child, "is not of its list's type");
    return value;
  };
  const uint8_t tag = static_cast<uint8_t>(nodes_[0]);
  if (tag == kTagNone) {
    nodes_.remove_prefix(1);
    return {};
  }
  if (tag == kTagString) return read(std::string());
  if (tag == kTagNumber) {
    const uint8_t type = nodes_.size() > 1 ? static_cast<uint8_t>(nodes_[1]) : 0;
    if (type == NumberTypeOf<double>()) return read(0.0);
    if (type == NumberTypeOf<bool>()) return read(false);
    if (type == NumberTypeOf<c10::complex<double>>()) return read(c10::complex<double>());
    return read(int64_t{0});
  }
  if (tag == kTagList) {
    nodes_.remove_prefix(1);
    const c10::TypePtr type = DynamicType(path, path.depth());
    const uint64_t count = Varint(path);
    if (!ok()) return {};
    c10::impl::GenericList list(type);
    for (uint64_t i = 0; i < count && ok(); ++i) {
      list.push_back(element(TreePath(path, TreeStep{.index = i}), type.get()));
    }
    return list;
  }
  if (tag == kTagTuple) {
    std::vector<c10::IValue> elements;
    const size_t count = Count(kTagTuple, path);
    for (size_t i = 0; i < count && ok(); ++i) {
      elements.push_back(element(TreePath(path, TreeStep{.index = i}), nullptr));
    }
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  if (tag == kTagDict) {
    nodes_.remove_prefix(1);
    const c10::TypePtr key_type = KeyType(path, path.depth());
    const c10::TypePtr value_type = DynamicType(path, path.depth());
    const uint64_t count = Varint(path);
    if (!ok()) return {};
    c10::impl::GenericDict dict(key_type, value_type);
    for (uint64_t i = 0; i < count && ok(); ++i) {
      const c10::IValue key = element(path, key_type.get());
      if (!ok()) break;
      const TreePath child = OfIValueKey(path, key);
      if (!CanBeKey(key)) Fail(child, "has a key that cannot be one");
      c10::IValue value = element(child, value_type.get());
      if (ok() && !dict.insert(key, std::move(value)).second) Fail(child, "is there twice");
    }
    return dict;
  }
  return read(at::Tensor());
}

}  // namespace ddp
