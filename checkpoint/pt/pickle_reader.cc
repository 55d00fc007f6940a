#include "checkpoint/pt/pickle_reader.h"

#include <ATen/Functions.h>
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>

#include <algorithm>
#include <set>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "checkpoint/pt/pickle_graph.h"
#include "checkpoint/pt/pickle_ops.h"

namespace ddp::checkpoint::pt {
namespace {

// Makes values of a graph, each node once: what shares a node in Python shares it here.
class Builder {
 public:
  Builder(const std::vector<Node>& nodes, const LoadTensor& load_tensor)
      : nodes_(nodes), load_tensor_(load_tensor), built_(nodes.size()) {}

  absl::StatusOr<c10::IValue> Build(NodeId id) {
    DDP_RETURN_IF_ERROR(BuildNode(id, 0));
    return built_[id].value;
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
        DDP_ASSIGN_OR_RETURN(const TensorSpec spec, TensorSpecOf(nodes_, node));
        DDP_ASSIGN_OR_RETURN(value, load_tensor_(spec, Whole{}));
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

  const std::vector<Node>& nodes_;
  const LoadTensor& load_tensor_;
  std::vector<Built> built_;
};

// Walks from the root to what a request names, and builds only that.
class Selector {
 public:
  Selector(const std::vector<Node>& nodes, const ReadRequest& request,
           const LoadTensor& load_tensor)
      : nodes_(nodes), request_(request), load_tensor_(load_tensor), builder_(nodes, load_tensor) {}

  absl::StatusOr<Selection> Select(NodeId root) {
    for (auto it = request_.parts.begin(); it != request_.parts.end(); ++it) {
      const std::string below = absl::StrCat(it->first, "/");
      const auto next = request_.parts.lower_bound(below);
      if (next != request_.parts.end() && absl::StartsWith(next->first, below)) {
        return Refuse(next->first, absl::StrCat("lies below '", it->first, "', also asked for"));
      }
    }
    DDP_ASSIGN_OR_RETURN(selection_.value, Below(root, ""));
    for (const auto& [path, part] : request_.parts) {
      if (!found_.contains(path)) return Refuse(path, "is not in the checkpoint");
    }
    return std::move(selection_);
  }

 private:
  static absl::Status Refuse(absl::string_view path, absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat("cannot give '", path, "', which ", what));
  }

  // The requested values in dict `id`; `prefix` is its path with a trailing slash. The length of
  // the requested paths bounds the recursion, even in a graph with cycles.
  absl::StatusOr<c10::IValue> Below(NodeId id, const std::string& prefix) {
    const Node& node = nodes_[id];
    if (node.kind != Kind::kDict) {
      return Refuse(absl::StripSuffix(prefix, "/"), "is no dict that could be read in part");
    }
    c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
    for (size_t i = 0; i < node.items.size(); i += 2) {
      const Node& key = nodes_[node.items[i]];
      if (key.kind != Kind::kString && key.kind != Kind::kInt) continue;
      const std::string path =
          absl::StrCat(prefix, key.kind == Kind::kInt ? absl::StrCat(key.integer) : key.text);
      const auto wanted = request_.parts.find(path);
      c10::IValue value;
      if (wanted != request_.parts.end()) {
        found_.insert(path);
        DDP_ASSIGN_OR_RETURN(value, Value(node.items[i + 1], path, wanted->second));
      } else {
        const std::string below = absl::StrCat(path, "/");
        const auto next = request_.parts.lower_bound(below);
        if (next == request_.parts.end() || !absl::StartsWith(next->first, below)) continue;
        DDP_ASSIGN_OR_RETURN(value, Below(node.items[i + 1], below));
      }
      dict.insert_or_assign(
          key.kind == Kind::kInt ? c10::IValue(key.integer) : c10::IValue(key.text),
          std::move(value));
    }
    return c10::IValue(std::move(dict));
  }

  absl::StatusOr<c10::IValue> Value(NodeId id, const std::string& path, const Part& part) {
    if (std::holds_alternative<Whole>(part)) return builder_.Build(id);
    if (nodes_[id].kind != Kind::kTensor) return Refuse(path, "is no tensor that could be cut");
    DDP_ASSIGN_OR_RETURN(const TensorSpec spec, TensorSpecOf(nodes_, nodes_[id]));
    Shard shard{.global_shape = spec.sizes, .part = part};
    DDP_RETURN_IF_ERROR(Annotate(CheckPart(shard), absl::StrCat("cannot give '", path, "'")));
    selection_.shards[path] = std::move(shard);
    return load_tensor_(spec, part);
  }

  const std::vector<Node>& nodes_;
  const ReadRequest& request_;
  const LoadTensor& load_tensor_;
  Builder builder_;
  std::set<std::string> found_;
  Selection selection_;
};

}  // namespace

c10::IValue ViewOf(c10::Storage storage, const TensorSpec& tensor) {
  return at::empty({0}, at::TensorOptions().dtype(tensor.dtype))
      .set_(std::move(storage), tensor.offset, tensor.sizes, tensor.strides);
}

absl::StatusOr<c10::IValue> ReadPickle(absl::string_view pickle, const LoadStorage& load_storage) {
  DDP_ASSIGN_OR_RETURN(const PickleGraph graph, ParsePickle(pickle));
  const LoadTensor load_tensor = [&](const TensorSpec& spec,
                                     const Part&) -> absl::StatusOr<c10::IValue> {
    DDP_ASSIGN_OR_RETURN(c10::Storage storage, load_storage(spec.key, spec.storage_bytes));
    return ViewOf(std::move(storage), spec);
  };
  return Builder(graph.nodes, load_tensor).Build(graph.root);
}

absl::StatusOr<Selection> ReadPickle(absl::string_view pickle, const ReadRequest& request,
                                     const LoadTensor& load_tensor) {
  DDP_ASSIGN_OR_RETURN(const PickleGraph graph, ParsePickle(pickle));
  return Selector(graph.nodes, request, load_tensor).Select(graph.root);
}

absl::StatusOr<c10::IValue> CheckPickle(
    absl::string_view pickle, const std::function<absl::Status(const TensorSpec&)>& check) {
  DDP_ASSIGN_OR_RETURN(const PickleGraph graph, ParsePickle(pickle));
  const LoadTensor load_nothing = [&](const TensorSpec& spec,
                                      const Part&) -> absl::StatusOr<c10::IValue> {
    DDP_RETURN_IF_ERROR(check(spec));
    return c10::IValue();
  };
  return Builder(graph.nodes, load_nothing).Build(graph.root);
}

}  // namespace ddp::checkpoint::pt
