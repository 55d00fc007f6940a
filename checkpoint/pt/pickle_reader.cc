#include "checkpoint/pt/pickle_reader.h"

#include <ATen/Functions.h>
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <set>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "base/utf8.h"
#include "checkpoint/pt/pickle_graph.h"
#include "checkpoint/pt/pickle_ops.h"

namespace ddp::checkpoint::pt {
namespace {

// Paths in messages are cut at this length. A hostile pickle has long keys, deeply nested.
constexpr size_t kMostPath = 1000;

std::string Join(const std::string& path, absl::string_view name) {
  constexpr size_t kMostName = 200;
  if (path.size() > kMostPath) return path;
  const std::string shown =
      Printable(name.substr(0, kMostName)) + (name.size() > kMostName ? "…" : "");
  return path.empty() ? shown : absl::StrCat(path, "/", shown);
}

std::string Quoted(const std::string& path) {
  return absl::StrCat("'", path.empty() ? "/" : path, "'");
}

absl::Status Damaged(const std::string& path, absl::string_view what) {
  return absl::DataLossError(absl::StrCat("pickle: ", Quoted(path), " is ", what));
}

// The value of a dict key; nullopt for a node that is none.
std::optional<c10::IValue> KeyOf(const Node& node) {
  switch (node.kind) {
    case Kind::kString:
      if (node.text.size() > kMaxKey) return std::nullopt;
      return c10::IValue(node.text);
    case Kind::kInt:
      return c10::IValue(node.integer);
    case Kind::kFloat:
      return c10::IValue(node.real);
    case Kind::kBool:
      return c10::IValue(node.integer != 0);
    default:
      return std::nullopt;
  }
}

// Makes values of a graph, each node once: what shares a node in Python shares it here.
class Builder {
 public:
  static constexpr absl::string_view kRepeats =
      "repeats its elements, as torch.expand does, and the tensors of a file may have 1 GiB of "
      "repeated ones";

  Builder(const std::vector<Node>& nodes, const ReadRequest& request, const LoadTensor& load_tensor)
      : nodes_(nodes),
        left_out_(request.left_out),
        only_check_(request.only_check),
        load_tensor_(load_tensor),
        built_(nodes.size()) {}

  // nullopt if the node is left out.
  absl::StatusOr<std::optional<c10::IValue>> Build(NodeId id, const std::string& path) {
    DDP_ASSIGN_OR_RETURN(const bool is_there, BuildNode(id, path, 0));
    if (!is_there) return std::nullopt;
    return built_[id].value;
  }

 private:
  struct Built {
    enum { kNew, kInProgress, kDone, kLeftOut } state = kNew;
    int height = 0;         // containers below and including this one
    uint64_t repeated = 0;  // bytes of elements that tensors in it repeat: CountRepeated
    c10::IValue value;
  };

  // `what` is the rest of a sentence: "is a set".
  absl::StatusOr<bool> LeaveOut(const std::string& path, absl::string_view what) {
    const std::string reason = absl::StrCat(Quoted(path), " ", what);
    if (left_out_ == nullptr) {
      return absl::UnimplementedError(absl::StrCat("has a value that cannot be read: ", reason));
    }
    constexpr size_t kMost = 1000;
    if (left_out_->size() < kMost) left_out_->push_back(reason);
    return false;
  }

  // nullopt if the tensor is left out.
  absl::StatusOr<std::optional<TensorSpec>> SpecOf(const Node& node, const std::string& path) {
    absl::StatusOr<TensorSpec> spec = TensorSpecOf(nodes_, node);
    if (!spec.ok() && !absl::IsUnimplemented(spec.status())) {
      return Damaged(path, spec.status().message());
    }
    if (spec.ok() && CountRepeated(spec->sizes, spec->strides, spec->dtype, repeated_bytes_)) {
      return *std::move(spec);
    }
    DDP_RETURN_IF_ERROR(LeaveOut(path, spec.ok() ? kRepeats : spec.status().message()).status());
    return std::nullopt;
  }

  // Whether the node has a value, which is then in built_. Recursion is as deep as kMaxDepth: a
  // node counts with all that is above and below it.
  absl::StatusOr<bool> BuildNode(NodeId id, const std::string& path, int depth) {
    if (depth + built_[id].height > kMaxDepth) {
      return LeaveOut(path, "lies in containers nested too deeply");
    }
    if (built_[id].state == Built::kDone) {
      if (built_[id].repeated > kMaxRepeated - repeated_bytes_) return LeaveOut(path, kRepeats);
      repeated_bytes_ += built_[id].repeated;
      return true;
    }
    if (built_[id].state == Built::kLeftOut) return BuildNew(id, path, depth);  // says it again
    if (built_[id].state == Built::kInProgress) return LeaveOut(path, "is a container in itself");
    built_[id].state = Built::kInProgress;
    const uint64_t before = repeated_bytes_;
    DDP_ASSIGN_OR_RETURN(const bool is_there, BuildNew(id, path, depth));
    built_[id].repeated = repeated_bytes_ - before;
    built_[id].state = is_there ? Built::kDone : Built::kLeftOut;
    return is_there;
  }

  absl::StatusOr<bool> BuildNew(NodeId id, const std::string& path, int depth) {
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
      case Kind::kComplex:
        value = c10::complex<double>(Real(node.items[0]), Real(node.items[1]));
        break;
      case Kind::kString:
      case Kind::kBytes:
        value = node.text;
        break;
      case Kind::kGlobal:
        if (!IsDtype(node.text)) {
          return LeaveOut(path, absl::StrCat("refers to the Python global '",
                                             absl::CHexEscape(node.text.substr(0, kMostPath)),
                                             "', and only plain data and tensors are read"));
        }
        value = node.text;
        break;
      case Kind::kUnsupported:
        return LeaveOut(path, node.text);
      case Kind::kStorage:
        return LeaveOut(path, "is a bare storage");
      case Kind::kObject:
        return LeaveOut(path, "is an object");
      case Kind::kTensor: {
        DDP_ASSIGN_OR_RETURN(const std::optional<TensorSpec> spec, SpecOf(node, path));
        if (!spec) return false;
        DDP_ASSIGN_OR_RETURN(value, load_tensor_(*spec, Whole{}, path));
        break;
      }
      case Kind::kSparse:
        return BuildSparse(id, path, depth);
      case Kind::kQuantized:
        return BuildQuantized(id, path, depth);
      case Kind::kTuple: {
        DDP_ASSIGN_OR_RETURN(std::vector<c10::IValue> items, BuildItems(id, path, depth));
        value = c10::ivalue::Tuple::create(std::move(items));
        break;
      }
      case Kind::kList: {
        DDP_ASSIGN_OR_RETURN(std::vector<c10::IValue> items, BuildItems(id, path, depth));
        c10::impl::GenericList list(c10::AnyType::get());
        list.reserve(items.size());
        for (c10::IValue& item : items) list.push_back(std::move(item));
        value = std::move(list);
        break;
      }
      case Kind::kDict: {
        c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
        for (size_t i = 0; i < node.items.size(); i += 2) {
          const NodeId key = node.items[i];
          if (!KeyOf(nodes_[key]).has_value()) {
            constexpr absl::string_view kWhy =
                "has a key that is neither str of at most 4096 bytes, int, float nor bool";
            DDP_RETURN_IF_ERROR(LeaveOut(path, kWhy).status());
            continue;
          }
          DDP_ASSIGN_OR_RETURN(const bool has_key, BuildItem(id, key, path, depth));
          if (!has_key) continue;  // nested too deeply
          DDP_ASSIGN_OR_RETURN(
              const bool is_there,
              BuildItem(id, node.items[i + 1], Join(path, KeyText(built_[key].value)), depth));
          if (!is_there) continue;
          dict.insert_or_assign(built_[key].value, built_[node.items[i + 1]].value);
        }
        value = std::move(dict);
        break;
      }
    }
    built_[id].value = std::move(value);
    return true;
  }

  double Real(NodeId id) const {
    return nodes_[id].kind == Kind::kInt ? static_cast<double>(nodes_[id].integer)
                                         : nodes_[id].real;
  }

  static bool IsDtype(absl::string_view global) {
    if (DtypeOfName(global) != nullptr) return true;
    if (!absl::ConsumePrefix(&global, "torch.")) return false;
    for (absl::string_view name : kOtherDtypeNames) {
      if (global == name) return true;
    }
    return false;
  }

  // An item of container `id`.
  absl::StatusOr<bool> BuildItem(NodeId id, NodeId item, const std::string& path, int depth) {
    DDP_ASSIGN_OR_RETURN(const bool is_there, BuildNode(item, path, depth + 1));
    built_[id].height = std::max(built_[id].height, built_[item].height + 1);
    return is_there;
  }

  // All items, with None for those that are left out.
  absl::StatusOr<std::vector<c10::IValue>> BuildItems(NodeId id, const std::string& path,
                                                      int depth) {
    const std::vector<NodeId>& items = nodes_[id].items;
    std::vector<c10::IValue> values;
    values.reserve(items.size());
    for (size_t i = 0; i < items.size(); ++i) {
      DDP_ASSIGN_OR_RETURN(const bool is_there,
                           BuildItem(id, items[i], Join(path, absl::StrCat(i)), depth));
      values.push_back(is_there ? built_[items[i]].value : c10::IValue());
    }
    return values;
  }

  // What torch leaves to whoever uses a sparse tensor, its indices being within its sizes, is
  // checked here.
  absl::StatusOr<bool> BuildSparse(NodeId id, const std::string& path, int depth) {
    struct NamedLayout {
      absl::string_view name;
      c10::Layout layout;
    };
    constexpr NamedLayout kLayouts[] = {{"torch.sparse_coo", c10::Layout::Sparse},
                                        {"torch.sparse_csr", c10::Layout::SparseCsr},
                                        {"torch.sparse_csc", c10::Layout::SparseCsc},
                                        {"torch.sparse_bsr", c10::Layout::SparseBsr},
                                        {"torch.sparse_bsc", c10::Layout::SparseBsc}};
    const Node& node = nodes_[id];
    const auto known =
        std::find_if(std::begin(kLayouts), std::end(kLayouts),
                     [&](const NamedLayout& known) { return known.name == node.text; });
    if (known == std::end(kLayouts)) return Damaged(path, "a sparse tensor of an unknown layout");
    const bool coo = known->layout == c10::Layout::Sparse;
    const size_t tensors = coo ? 2 : 3;
    if (node.items.size() <= tensors) return Damaged(path, "an incomplete sparse tensor");
    for (size_t i = 0; i < tensors; ++i) {
      if (nodes_[node.items[i]].kind != Kind::kTensor) return Damaged(path, "a bad sparse tensor");
    }
    std::vector<int64_t> sizes;
    for (NodeId item : nodes_[node.items[tensors]].items) {
      if (nodes_[item].kind != Kind::kInt || nodes_[item].integer < 0) {
        return Damaged(path, "a sparse tensor with bad sizes");
      }
      sizes.push_back(nodes_[item].integer);
    }
    std::optional<bool> is_coalesced;
    if (coo && node.items.size() == 4 && nodes_[node.items[3]].kind == Kind::kBool) {
      is_coalesced = nodes_[node.items[3]].integer != 0;
    }
    std::vector<at::Tensor> parts;
    for (size_t i = 0; i < tensors; ++i) {
      DDP_ASSIGN_OR_RETURN(const std::optional<at::Tensor> part,
                           PartOf(id, node.items[i], "a bad sparse tensor", path, depth));
      if (!part) return LeaveOut(path, "is a sparse tensor of what cannot be read");
      if (!part->defined()) return true;
      parts.push_back(*part);
    }
    const auto options = parts.back().options();
    if (parts.back().is_meta()) {  // ReadRequest::meta: there are no indices to check
      built_[id].value = at::empty(sizes, options);
      return true;
    }
    const absl::Status made = CatchStatus("a sparse tensor that torch refuses", [&] {
      if (coo) {
        at::_validate_sparse_coo_tensor_args(parts[0], parts[1], sizes, is_coalesced);
        built_[id].value = at::_sparse_coo_tensor_unsafe(
            parts[0], parts[1], sizes, options.layout(known->layout), is_coalesced);
      } else {
        at::_validate_sparse_compressed_tensor_args(parts[0], parts[1], parts[2], sizes,
                                                    known->layout);
        built_[id].value = at::_sparse_compressed_tensor_unsafe(parts[0], parts[1], parts[2], sizes,
                                                                options.layout(known->layout));
      }
    });
    if (!made.ok()) return Damaged(path, made.message());
    if (only_check_) built_[id].value = c10::IValue();
    return true;
  }

  absl::StatusOr<bool> BuildQuantized(NodeId id, const std::string& path, int depth) {
    constexpr absl::string_view kBad = "a bad quantized tensor";
    const Node& node = nodes_[id];
    DDP_ASSIGN_OR_RETURN(const std::optional<TensorSpec> spec, SpecOf(node, path));
    if (!spec) return false;
    const std::vector<NodeId>& quantizer = nodes_[node.items[4]].items;
    const auto is = [&](size_t i, Kind kind) {
      return i < quantizer.size() && nodes_[quantizer[i]].kind == kind;
    };
    if (!is(0, Kind::kGlobal)) return Damaged(path, kBad);
    const std::string& scheme = nodes_[quantizer[0]].text;
    const bool by_channel = scheme == "torch.per_channel_affine";
    if (!by_channel && scheme != "torch.per_tensor_affine") {
      return LeaveOut(path, absl::StrCat("is a tensor quantized by ",
                                         absl::CHexEscape(scheme.substr(0, kMostPath))));
    }
    const bool complete = by_channel
                              ? quantizer.size() == 4 && is(1, Kind::kTensor) &&
                                    is(2, Kind::kTensor) && is(3, Kind::kInt)
                              : quantizer.size() == 3 && is(1, Kind::kFloat) && is(2, Kind::kInt);
    if (!complete) return Damaged(path, kBad);
    at::Tensor scales, zero_points;
    const int64_t axis = by_channel ? nodes_[quantizer[3]].integer : 0;
    if (by_channel) {
      const auto dimensions = static_cast<int64_t>(spec->sizes.size());
      if (axis < 0 || axis >= dimensions) return Damaged(path, kBad);
      size_t next = 1;
      for (at::Tensor* channels : {&scales, &zero_points}) {
        DDP_ASSIGN_OR_RETURN(const std::optional<at::Tensor> part,
                             PartOf(id, quantizer[next++], kBad, path, depth));
        if (!part) return LeaveOut(path, "is quantized by what cannot be read");
        *channels = *part;
        const bool fits = !part->defined() || part->sizes() == c10::IntArrayRef(spec->sizes[axis]);
        if (!fits) return Damaged(path, kBad);
      }
    }
    DDP_ASSIGN_OR_RETURN(const c10::IValue loaded, load_tensor_(*spec, Whole{}, path));
    if (!loaded.isTensor()) return true;  // CheckPickle: there are no values
    const at::Tensor integers = loaded.toTensor();
    if (SharesElements(integers, *spec)) return Damaged(path, kBad);
    const auto options = integers.options().dtype(c10::toQIntType(spec->dtype));
    if (integers.is_meta() && !only_check_) {
      built_[id].value = at::empty(spec->sizes, options);
      return true;
    }
    const absl::Status made = CatchStatus("a quantized tensor that torch refuses", [&] {
      const at::Tensor empty =
          by_channel ? at::_empty_per_channel_affine_quantized(spec->sizes, scales, zero_points,
                                                               axis, options.device(at::kCPU))
                     : at::_empty_affine_quantized({0}, options.device(at::kCPU),
                                                   nodes_[quantizer[1]].real,
                                                   nodes_[quantizer[2]].integer);
      if (only_check_) return;  // its values were dropped
      built_[id].value = empty.set_(integers.storage(), spec->offset, spec->sizes, spec->strides);
    });
    if (!made.ok()) return Damaged(path, made.message());
    return true;
  }

  // Whether elements may share memory. Then there may be any number of them.
  static bool SharesElements(const at::Tensor& tensor, const TensorSpec& spec) {
    return static_cast<uint64_t>(tensor.numel()) > spec.storage_bytes / tensor.element_size();
  }

  // A tensor that another one is made of, with its values, all of which torch goes through. nullopt
  // if it is left out; an undefined one in CheckPickle, where there are no values. `bad`: what the
  // other one is if this one has more elements than its storage.
  absl::StatusOr<std::optional<at::Tensor>> PartOf(NodeId id, NodeId item, absl::string_view bad,
                                                   const std::string& path, int depth) {
    DDP_ASSIGN_OR_RETURN(const bool is_there, BuildItem(id, item, path, depth));
    if (!is_there) return std::nullopt;
    if (!built_[item].value.isTensor()) return at::Tensor();
    const at::Tensor part = built_[item].value.toTensor();
    DDP_ASSIGN_OR_RETURN(TensorSpec spec, TensorSpecOf(nodes_, nodes_[item]));
    if (SharesElements(part, spec)) return Damaged(path, bad);
    if (only_check_) {  // its values were dropped
      const Box all{std::vector<int64_t>(spec.sizes.size()), spec.sizes};
      DDP_ASSIGN_OR_RETURN(const c10::IValue values, load_tensor_(spec, all, path));
      return values.toTensor();
    }
    spec.used_at_once = true;
    DDP_RETURN_IF_ERROR(load_tensor_(spec, Whole{}, path).status());
    return part;
  }

  const std::vector<Node>& nodes_;
  std::vector<std::string>* left_out_;
  const bool only_check_;
  const LoadTensor& load_tensor_;
  std::vector<Built> built_;
  uint64_t repeated_bytes_ = 0;
};

// Walks from the root to what a request names, and builds only that.
class Selector {
 public:
  Selector(const std::vector<Node>& nodes, const ReadRequest& request,
           const LoadTensor& load_tensor)
      : nodes_(nodes),
        request_(request),
        load_tensor_(load_tensor),
        builder_(nodes, request, load_tensor) {}

  absl::StatusOr<Selection> Select(NodeId root) {
    if (request_.parts.empty()) {
      DDP_ASSIGN_OR_RETURN(const std::optional<c10::IValue> all, builder_.Build(root, ""));
      selection_.value = all.value_or(c10::IValue());
      return std::move(selection_);
    }
    DDP_RETURN_IF_ERROR(CheckRequest(request_));
    DDP_ASSIGN_OR_RETURN(selection_.value, Below(root, ""));
    for (const auto& [path, wanted] : request_.parts) {
      if (!wanted.optional && !found_.contains(path)) {
        return Refuse(path, "is not in the checkpoint");
      }
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
      std::optional<c10::IValue> key = KeyOf(nodes_[node.items[i]]);
      if (!key.has_value()) continue;
      const std::string path = absl::StrCat(prefix, KeyText(*key));
      const auto wanted = request_.parts.find(path);
      std::optional<c10::IValue> value;
      if (wanted != request_.parts.end()) {
        found_.insert(path);
        if (!wanted->second.whole()) {
          DDP_ASSIGN_OR_RETURN(const bool is_cut,
                               AddParts(node.items[i + 1], path, wanted->second));
          if (is_cut) continue;
        }
        DDP_ASSIGN_OR_RETURN(value, builder_.Build(node.items[i + 1], path));
        if (!value.has_value()) continue;
      } else {
        if (LeadsOn(request_, path, nodes_[node.items[i + 1]].kind == Kind::kDict)) {
          DDP_ASSIGN_OR_RETURN(value, Below(node.items[i + 1], absl::StrCat(path, "/")));
        } else if (request_.all_else) {
          DDP_ASSIGN_OR_RETURN(value, builder_.Build(node.items[i + 1], path));
          if (!value.has_value()) continue;
        } else {
          continue;
        }
      }
      dict.insert_or_assign(*std::move(key), *std::move(value));
    }
    return c10::IValue(std::move(dict));
  }

  // False: nothing was added, since all else is wanted, too, and this has no such parts.
  absl::StatusOr<bool> AddParts(NodeId id, const std::string& path, const Wanted& wanted) {
    if (request_.all_else) return CutWhole(id, path, wanted);
    if (nodes_[id].kind != Kind::kTensor) return Refuse(path, "is no tensor that could be cut");
    const absl::StatusOr<TensorSpec> spec = TensorSpecOf(nodes_, nodes_[id]);
    if (absl::IsUnimplemented(spec.status())) return Refuse(path, spec.status().message());
    if (!spec.ok()) return Damaged(path, spec.status().message());
    ShardedTensor tensor{
        .global_shape = spec->sizes, .dtype = spec->dtype, .memory_order = wanted.memory_order};
    Shard shard{spec->sizes, FlatRange{}, wanted.memory_order};
    const std::string what = absl::StrCat("cannot give '", path, "'");
    DDP_RETURN_IF_ERROR(Annotate(CheckPart(shard), what));
    TensorSpec ordered = *spec;
    for (size_t i = 0; i < wanted.memory_order.size(); ++i) {
      const auto dimension = static_cast<size_t>(wanted.memory_order[i]);
      ordered.sizes[i] = spec->sizes[dimension];
      ordered.strides[i] = spec->strides[dimension];
    }
    for (const Part& part : wanted.parts) {
      shard.part = part;
      DDP_RETURN_IF_ERROR(Annotate(CheckPart(shard), what));
      const bool is_range = std::holds_alternative<FlatRange>(part);
      DDP_ASSIGN_OR_RETURN(const c10::IValue values,
                           load_tensor_(is_range ? ordered : *spec, part, path));
      tensor.parts.push_back({part, values.toTensor()});
    }
    selection_.sharded.emplace(path, std::move(tensor));
    return true;
  }

  // The checksum is that of the whole tensor.
  absl::StatusOr<bool> CutWhole(NodeId id, const std::string& path, const Wanted& wanted) {
    DDP_ASSIGN_OR_RETURN(const std::optional<c10::IValue> value, builder_.Build(id, path));
    if (!value.has_value() || !value->isTensor()) return false;
    std::optional<ShardedTensor> cut = Cut(value->toTensor(), wanted);
    if (!cut.has_value()) return false;
    selection_.sharded.emplace(path, *std::move(cut));
    return true;
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
  at::Tensor view = at::empty({0}, at::TensorOptions().dtype(tensor.dtype))
                        .set_(std::move(storage), tensor.offset, tensor.sizes, tensor.strides);
  if (tensor.conj) view._set_conj(true);
  if (tensor.neg) view._set_neg(true);
  return view;
}

absl::StatusOr<Selection> ReadPickle(absl::string_view pickle, const ReadRequest& request,
                                     const LoadTensor& load_tensor) {
  DDP_ASSIGN_OR_RETURN(const PickleGraph graph, ParsePickle(pickle));
  return Selector(graph.nodes, request, load_tensor).Select(graph.root);
}

absl::StatusOr<c10::IValue> CheckPickle(
    absl::string_view pickle,
    const std::function<absl::Status(const TensorSpec&, const std::string& path)>& check) {
  DDP_ASSIGN_OR_RETURN(const PickleGraph graph, ParsePickle(pickle));
  const LoadTensor load_nothing = [&](const TensorSpec& spec, const Part&,
                                      const std::string& path) -> absl::StatusOr<c10::IValue> {
    DDP_RETURN_IF_ERROR(check(spec, path));
    return c10::IValue();
  };
  DDP_ASSIGN_OR_RETURN(Selection all, Selector(graph.nodes, {}, load_nothing).Select(graph.root));
  return std::move(all.value);
}

}  // namespace ddp::checkpoint::pt
