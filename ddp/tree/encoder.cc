#include "ddp/tree/encoder.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "ATen/core/jit_type.h"
#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace ddp {

using namespace tree_internal;  // the format

namespace {

void CopyBytes(const at::Tensor& to, size_t offset, const at::Tensor& from) {
  if (from.numel() == 0) return;
  if (to.is_cpu() && from.is_cpu()) {
    std::memcpy(to.data_ptr<uint8_t>() + offset, from.data_ptr(), from.nbytes());
  } else {
    to.narrow(0, static_cast<int64_t>(offset), static_cast<int64_t>(from.nbytes()))
        .copy_(AsBytes(from));
  }
}

// Tensors are stored at multiples of kAlignment from `offset` on, with zeros between them. Returns
// where the last one ends.
size_t SizeOf(const std::vector<at::Tensor>& tensors, size_t offset) {
  for (const at::Tensor& tensor : tensors) offset = Aligned(offset) + tensor.nbytes();
  return offset;
}

void Pack(const std::vector<at::Tensor>& tensors, size_t offset, const at::Tensor& to) {
  for (const at::Tensor& tensor : tensors) {
    const size_t start = Aligned(offset);
    if (start > offset && offset < to.nbytes()) {
      const size_t gap = std::min(start, to.nbytes()) - offset;
      to.narrow(0, static_cast<int64_t>(offset), static_cast<int64_t>(gap)).zero_();
    }
    CopyBytes(to, start, tensor);
    offset = start + tensor.nbytes();
  }
}

}  // namespace

void TreeEncoder::Fail(const TreePath& path, std::string_view problem) {
  if (status_.ok()) status_ = absl::InvalidArgumentError(absl::StrCat(path.Text(), " ", problem));
}

bool TreeEncoder::CheckDepth(const TreePath& path) {
  if (path.depth() > kMaxTreeDepth) Fail(path, "is nested too deeply");
  return status_.ok();
}

void TreeEncoder::Varint(uint64_t value) {
  for (; value >= 0x80; value >>= 7) nodes_.push_back(static_cast<char>(value | 0x80));
  nodes_.push_back(static_cast<char>(value));
}

void TreeEncoder::Number(NumberType type, const void* bytes) {
  nodes_.push_back(kTagNumber);
  nodes_.push_back(static_cast<char>(type));
  nodes_.append(static_cast<const char*>(bytes), type % 32);
}

void TreeEncoder::NumberArray(NumberType type, const void* bytes, size_t count) {
  nodes_.push_back(kTagNumbers);
  nodes_.push_back(static_cast<char>(type));
  Varint(count);
  if (count > 0) nodes_.append(static_cast<const char*>(bytes), count * (type % 32));
}

void TreeEncoder::Text(uint8_t tag, const void* bytes, size_t size) {
  nodes_.push_back(static_cast<char>(tag));
  Varint(size);
  if (size > 0) nodes_.append(static_cast<const char*>(bytes), size);
}

void TreeEncoder::operator()(std::string_view text, const TreePath&) {
  Text(kTagString, text.data(), text.size());
}
void TreeEncoder::operator()(const std::vector<uint8_t>& bytes, const TreePath&) {
  Text(kTagBytes, bytes.data(), bytes.size());
}
void TreeEncoder::operator()(const std::vector<std::byte>& bytes, const TreePath&) {
  Text(kTagBytes, bytes.data(), bytes.size());
}
void TreeEncoder::operator()(std::monostate, const TreePath&) { nodes_.push_back(kTagNone); }
void TreeEncoder::operator()(std::nullopt_t, const TreePath&) { nodes_.push_back(kTagNone); }

void TreeEncoder::operator()(const at::Tensor& tensor, const TreePath& path) {
  if (!status_.ok()) return;
  if (!tensor.defined()) {
    nodes_.push_back(kTagUndefined);
    return;
  }
  if (const std::string why = NotPlainReason(tensor); !why.empty()) {
    return Fail(path, absl::StrCat("cannot be sent: it is a ", why));
  }
  const c10::DeviceType device = tensor.device().type();
  const bool direct = device == direct_ && device != c10::DeviceType::CPU;
  nodes_.push_back(direct ? kTagDeviceTensor : kTagHostTensor);
  nodes_.push_back(static_cast<char>(tensor.scalar_type()));
  nodes_.push_back(static_cast<char>(device));
  Varint(tensor.dim());
  for (const int64_t size : tensor.sizes()) Varint(size);
  (direct ? device_ : host_).push_back(tensor.detach().resolve_conj().resolve_neg().contiguous());
}

void TreeEncoder::Enter(TreeNode node, const TreePath& path) {
  if (!CheckDepth(path)) return;
  switch (node.kind) {
    case TreeKind::kSequence:
      nodes_.push_back(kTagSequence);
      break;
    case TreeKind::kMembers:
      nodes_.push_back(kTagMembers);
      break;
    case TreeKind::kMap:
      nodes_.push_back(kTagMap);
      break;
    case TreeKind::kOptional:
      nodes_.push_back(node.count == 0 ? kTagNone : kTagOptional);
      return;
    default:
      if (node.count == std::numeric_limits<size_t>::max()) {
        return Fail(path, "cannot be sent: it is a variant without a value");
      }
      nodes_.push_back(kTagVariant);
  }
  Varint(node.count);
}

void TreeEncoder::DynamicType(const c10::Type& type, const TreePath& path) {
  const int code = TypeCode(type);
  if (code < 0 || path.depth() > kMaxTreeDepth) {
    return Fail(path, absl::StrCat("cannot be sent: it is an IValue with type ",
                                   type.annotation_str(), " in it"));
  }
  nodes_.push_back(static_cast<char>(code));
  const auto parts = type.containedTypes();
  if (code == 11) {
    if (type.castRaw<c10::TupleType>()->schema()) {
      return Fail(path, "cannot be sent: it is an IValue with a named tuple in it");
    }
    Varint(parts.size());
  }
  if (code < 8) return;  // a tensor's may be its shape
  for (const auto& part : parts) DynamicType(*part, TreePath(path, TreeStep()));
}

void TreeEncoder::Dynamic(const c10::IValue& value, const TreePath& path) {
  if (!CheckDepth(path)) return;
  if (value.isList()) {
    const c10::List<c10::IValue> list = value.toList();
    nodes_.push_back(kTagList);
    DynamicType(*list.elementType(), path);
    Varint(list.size());
    for (size_t i = 0; i < list.size(); ++i) {
      Dynamic(list.get(i), TreePath(path, TreeStep{.index = i}));
    }
  } else if (value.isTuple()) {
    const c10::ivalue::Tuple& tuple = value.toTupleRef();
    if (NamedType(tuple)) return Fail(path, "cannot be sent: it is a named tuple");
    nodes_.push_back(kTagTuple);
    Varint(tuple.size());
    for (size_t i = 0; i < tuple.size(); ++i) {
      Dynamic(tuple.elements()[i], TreePath(path, TreeStep{.index = i}));
    }
  } else if (value.isGenericDict()) {
    const auto dict = value.toGenericDict();
    nodes_.push_back(kTagDict);
    DynamicType(*dict.keyType(), path);
    DynamicType(*dict.valueType(), path);
    Varint(dict.size());
    for (const auto& entry : dict) {
      const TreePath child = OfIValueKey(path, entry.key());
      if (!CanBeKey(entry.key())) {
        return Fail(child, absl::StrCat("cannot be sent: its key is a ", entry.key().tagKind()));
      }
      Dynamic(entry.key(), child);
      Dynamic(entry.value(), child);
    }
  } else if (value.isTensor() || value.isInt() || value.isDouble() || value.isBool() ||
             value.isString() || value.isNone() || value.isComplexDouble()) {
    VisitIValueLeaf(value, *this, path);
  } else {
    Fail(path, absl::StrCat("cannot be sent: it is an IValue that is a ", value.tagKind()));
  }
}

absl::StatusOr<EncodedTree> TreeEncoder::Finish() {
  DDP_RETURN_IF_ERROR(status_);
  EncodedTree encoded;
  const size_t start = kPreamble + nodes_.size();
  encoded.host = at::empty({static_cast<int64_t>(SizeOf(host_, start))}, at::kByte);
  uint8_t* bytes = encoded.host.data_ptr<uint8_t>();
  const uint64_t size = nodes_.size();
  std::memcpy(bytes, kMagic, 8);
  std::memcpy(bytes + 8, &size, 8);
  std::memcpy(bytes + kPreamble, nodes_.data(), nodes_.size());
  Pack(host_, start, encoded.host);
  if (!device_.empty()) {
    encoded.device = at::empty({static_cast<int64_t>(SizeOf(device_, 0))},
                               device_[0].options().dtype(at::kByte));
    Pack(device_, 0, encoded.device);
  }
  return encoded;
}

}  // namespace ddp
