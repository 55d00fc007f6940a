#include "checkpoint/pt/tensor_spec.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "checkpoint/pt/pickle_ops.h"

namespace ddp::checkpoint::pt {
namespace {

absl::Status Damaged(absl::string_view what) { return absl::DataLossError(what); }

absl::StatusOr<int64_t> Natural(const Node& node, absl::string_view what) {
  if (node.kind != Kind::kInt || node.integer < 0) {
    return Damaged(absl::StrCat("a tensor with a bad ", what));
  }
  return node.integer;
}

absl::StatusOr<std::vector<int64_t>> Naturals(const std::vector<Node>& nodes, const Node& node,
                                              absl::string_view what) {
  if (node.kind != Kind::kTuple) return Damaged(absl::StrCat("a tensor with bad ", what));
  std::vector<int64_t> values;
  for (NodeId item : node.items) {
    DDP_ASSIGN_OR_RETURN(values.emplace_back(), Natural(nodes[item], what));
  }
  return values;
}

// Whether all elements are within `elements` elements. Must not overflow.
bool Fits(int64_t elements, const TensorSpec& spec) {
  constexpr size_t kMaxDimensions = 64;
  const std::vector<int64_t>& sizes = spec.sizes;
  if (sizes.size() != spec.strides.size() || sizes.size() > kMaxDimensions) return false;
  if (spec.offset > elements) return false;
  // Also of an empty tensor the product of the other sizes must be a number.
  int64_t count = 1;
  bool empty = false;
  for (int64_t size : sizes) {
    empty = empty || size == 0;
    if (__builtin_mul_overflow(count, std::max<int64_t>(size, 1), &count)) return false;
  }
  if (empty) return true;
  int64_t last = spec.offset;
  for (size_t i = 0; i < sizes.size(); ++i) {
    int64_t reach;
    if (__builtin_mul_overflow(sizes[i] - 1, spec.strides[i], &reach) ||
        __builtin_add_overflow(last, reach, &last)) {
      return false;
    }
  }
  return last < elements;
}

}  // namespace

absl::StatusOr<TensorSpec> TensorSpecOf(const std::vector<Node>& nodes, const Node& tensor) {
  const Node& storage = nodes[tensor.items[0]];
  if (storage.kind != Kind::kStorage) return Damaged("a tensor without a storage");
  const Node& key = nodes[storage.items[2]];
  const Node& type = nodes[storage.items[1]];
  if (nodes[storage.items[0]].text != "storage" || type.kind != Kind::kGlobal ||
      key.kind != Kind::kString) {
    return Damaged("a persistent id that is no storage");
  }
  const bool untyped = type.text == kUntypedStorage;
  const bool separate = untyped && tensor.items.size() == 5;
  const Node& dtype_node = separate ? nodes[tensor.items[4]] : type;
  const DtypeName* dtype = tensor.kind == Kind::kQuantized ? IntegersOfStorage(dtype_node.text)
                           : separate                      ? DtypeOfName(dtype_node.text)
                                                           : DtypeOfStorage(dtype_node.text);
  if (dtype == nullptr || dtype_node.kind != Kind::kGlobal) {
    constexpr size_t kShown = 64;
    if (dtype_node.kind != Kind::kGlobal || untyped != separate ||
        dtype_node.text.size() > kShown) {
      return Damaged("a tensor without an element type");
    }
    return absl::UnimplementedError(
        absl::StrCat("is a tensor of ", absl::CHexEscape(dtype_node.text)));
  }
  const int64_t item_size = static_cast<int64_t>(c10::elementSize(dtype->dtype));
  DDP_ASSIGN_OR_RETURN(int64_t elements, Natural(nodes[storage.items[4]], "storage size"));
  if (untyped) {
    if (elements % item_size != 0) return Damaged("a storage that does not fit its element type");
    elements /= item_size;
  }
  if (elements > std::numeric_limits<int64_t>::max() / item_size) {
    return Damaged("a tensor with a bad storage size");
  }

  TensorSpec spec;
  spec.key = key.text;
  spec.storage_bytes = static_cast<uint64_t>(elements * item_size);
  spec.dtype = dtype->dtype;
  spec.conj = (tensor.integer & kConj) != 0;
  spec.neg = (tensor.integer & kNeg) != 0;
  const bool complex = c10::isComplexType(spec.dtype);
  if ((spec.conj && !complex) || (spec.neg && !complex && !c10::isFloatingType(spec.dtype))) {
    return Damaged("a tensor whose element type has no such metadata");
  }
  DDP_ASSIGN_OR_RETURN(spec.offset, Natural(nodes[tensor.items[1]], "offset"));
  DDP_ASSIGN_OR_RETURN(spec.sizes, Naturals(nodes, nodes[tensor.items[2]], "sizes"));
  DDP_ASSIGN_OR_RETURN(spec.strides, Naturals(nodes, nodes[tensor.items[3]], "strides"));
  if (!Fits(elements, spec)) return Damaged("a tensor that reaches beyond its storage");
  return spec;
}

bool CountRepeated(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype,
                   uint64_t& repeated) {
  const uint64_t item_size = c10::elementSize(dtype);
  uint64_t bytes = item_size, span = item_size;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return true;
    if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(sizes[i]), &bytes)) return false;
    span += static_cast<uint64_t>((sizes[i] - 1) * strides[i]) * item_size;
  }
  if (bytes <= span) return true;
  if (bytes - span > kMaxRepeated - repeated) return false;
  repeated += bytes - span;
  return true;
}

}  // namespace ddp::checkpoint::pt
