#include "checkpoint/pt/pickle_reader.h"

#include <ATen/Functions.h>
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "checkpoint/pt/pickle_graph.h"
#include "checkpoint/pt/pickle_ops.h"

namespace ddp::checkpoint::pt {
namespace {

// Makes values of a graph, each node once: what shares a node in Python shares it here.
class Builder {
 public:
  Builder(const std::vector<Node>& nodes, const LoadStorage& load_storage)
      : nodes_(nodes), load_storage_(load_storage), built_(nodes.size()) {}

  absl::StatusOr<c10::IValue> Build(NodeId id) {
    DDP_RETURN_IF_ERROR(BuildNode(id, 0));
    return std::move(built_[id].value);
  }

 private:
  struct Built {
    enum { kNew, kInProgress, kDone } state = kNew;
    int height = 0;  // containers below and including this one
    c10::IValue value;
  };

  static absl::Status Damaged(absl::string_view what) {
    return absl::DataLossError(absl::StrCat("pickle: ", what));
  }

  // Recursion is as deep as kMaxDepth: a node counts with all that is above and below it.
  absl::Status BuildNode(NodeId id, int depth) {
    if (depth + built_[id].height > kMaxDepth) return Damaged("containers nested too deeply");
    if (built_[id].state == Built::kDone) return absl::OkStatus();
    if (built_[id].state == Built::kInProgress) return Damaged("a container that holds itself");
    built_[id].state = Built::kInProgress;
    const Node& node = nodes_[id];
    c10::IValue value;
    switch (node.kind) {
      case Kind::kNone:
        break;
      case Kind::kBool:
        value = node.integer != 0;
        break;
      case Kind::kInt:
        value = node.integer;
        break;
      case Kind::kFloat:
        value = node.real;
        break;
      case Kind::kString:
        value = node.text;
        break;
      case Kind::kGlobal:
        if (DtypeOfName(node.text) == nullptr) {
          return Damaged(absl::StrCat("'", node.text, "' as a value"));
        }
        value = node.text;
        break;
      case Kind::kStorage:
        return Damaged("a bare storage as a value");
      case Kind::kTensor: {
        DDP_ASSIGN_OR_RETURN(value, Tensor(node));
        break;
      }
      case Kind::kTuple: {
        DDP_RETURN_IF_ERROR(BuildItems(id, depth));
        std::vector<c10::IValue> items;
        for (NodeId item : node.items) items.push_back(built_[item].value);
        value = c10::ivalue::Tuple::create(std::move(items));
        break;
      }
      case Kind::kList: {
        DDP_RETURN_IF_ERROR(BuildItems(id, depth));
        c10::impl::GenericList list(c10::AnyType::get());
        for (NodeId item : node.items) list.push_back(built_[item].value);
        value = std::move(list);
        break;
      }
      case Kind::kDict: {
        for (size_t i = 0; i < node.items.size(); i += 2) {
          const Kind key = nodes_[node.items[i]].kind;
          if (key != Kind::kString && key != Kind::kInt) {
            return Damaged("a dict key that is neither str nor int");
          }
        }
        DDP_RETURN_IF_ERROR(BuildItems(id, depth));
        c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
        for (size_t i = 0; i < node.items.size(); i += 2) {
          dict.insert_or_assign(built_[node.items[i]].value, built_[node.items[i + 1]].value);
        }
        value = std::move(dict);
        break;
      }
    }
    built_[id].value = std::move(value);
    built_[id].state = Built::kDone;
    return absl::OkStatus();
  }

  absl::Status BuildItems(NodeId id, int depth) {
    for (NodeId item : nodes_[id].items) {
      DDP_RETURN_IF_ERROR(BuildNode(item, depth + 1));
      built_[id].height = std::max(built_[id].height, built_[item].height + 1);
    }
    return absl::OkStatus();
  }

  absl::StatusOr<int64_t> Natural(NodeId id, absl::string_view what) const {
    if (nodes_[id].kind != Kind::kInt || nodes_[id].integer < 0) {
      return Damaged(absl::StrCat("a tensor with a bad ", what));
    }
    return nodes_[id].integer;
  }

  absl::StatusOr<std::vector<int64_t>> Naturals(NodeId id, absl::string_view what) const {
    if (nodes_[id].kind != Kind::kTuple) return Damaged(absl::StrCat("a tensor with bad ", what));
    std::vector<int64_t> values;
    for (NodeId item : nodes_[id].items) {
      DDP_ASSIGN_OR_RETURN(values.emplace_back(), Natural(item, what));
    }
    return values;
  }

  absl::StatusOr<c10::IValue> Tensor(const Node& node) {
    const Node& storage = nodes_[node.items[0]];
    if (storage.kind != Kind::kStorage) return Damaged("a tensor without a storage");
    const Node& key = nodes_[storage.items[2]];
    const Node& type = nodes_[storage.items[1]];
    if (nodes_[storage.items[0]].text != "storage" || type.kind != Kind::kGlobal ||
        key.kind != Kind::kString) {
      return Damaged("a persistent id that is no storage");
    }
    const bool untyped = type.text == kUntypedStorage;
    const DtypeName* dtype = DtypeOfStorage(type.text);
    if (untyped && node.items.size() == 5 && nodes_[node.items[4]].kind == Kind::kGlobal) {
      dtype = DtypeOfName(nodes_[node.items[4]].text);
    }
    if (dtype == nullptr) return Damaged("a tensor without an element type");
    const int64_t item_size = static_cast<int64_t>(c10::elementSize(dtype->dtype));
    DDP_ASSIGN_OR_RETURN(int64_t elements, Natural(storage.items[4], "storage size"));
    if (untyped) {
      if (elements % item_size != 0) return Damaged("a storage that does not fit its element type");
      elements /= item_size;
    }
    if (elements > std::numeric_limits<int64_t>::max() / item_size) {
      return Damaged("a tensor with a bad storage size");
    }

    DDP_ASSIGN_OR_RETURN(const int64_t offset, Natural(node.items[1], "offset"));
    DDP_ASSIGN_OR_RETURN(const std::vector<int64_t> sizes, Naturals(node.items[2], "sizes"));
    DDP_ASSIGN_OR_RETURN(const std::vector<int64_t> strides, Naturals(node.items[3], "strides"));
    if (!Fits(elements, offset, sizes, strides)) {
      return Damaged("a tensor that reaches beyond its storage");
    }
    DDP_ASSIGN_OR_RETURN(c10::Storage data,
                         load_storage_(key.text, static_cast<uint64_t>(elements * item_size)));
    return at::empty({0}, at::TensorOptions().dtype(dtype->dtype))
        .set_(std::move(data), offset, sizes, strides);
  }

  // Whether every element lies within `elements` elements; nothing here may overflow.
  static bool Fits(int64_t elements, int64_t offset, const std::vector<int64_t>& sizes,
                   const std::vector<int64_t>& strides) {
    constexpr size_t kMaxDimensions = 64;
    if (sizes.size() != strides.size() || sizes.size() > kMaxDimensions) return false;
    if (offset > elements) return false;
    // Also of an empty tensor the product of the other sizes must be a number.
    int64_t count = 1;
    bool empty = false;
    for (int64_t size : sizes) {
      empty = empty || size == 0;
      if (__builtin_mul_overflow(count, std::max<int64_t>(size, 1), &count)) return false;
    }
    if (empty) return true;
    int64_t last = offset;
    for (size_t i = 0; i < sizes.size(); ++i) {
      int64_t reach;
      if (__builtin_mul_overflow(sizes[i] - 1, strides[i], &reach) ||
          __builtin_add_overflow(last, reach, &last)) {
        return false;
      }
    }
    return last < elements;
  }

  const std::vector<Node>& nodes_;
  const LoadStorage& load_storage_;
  std::vector<Built> built_;
};

}  // namespace

absl::StatusOr<c10::IValue> ReadPickle(absl::string_view pickle, const LoadStorage& load_storage) {
  DDP_ASSIGN_OR_RETURN(const PickleGraph graph, ParsePickle(pickle));
  return Builder(graph.nodes, load_storage).Build(graph.root);
}

}  // namespace ddp::checkpoint::pt
