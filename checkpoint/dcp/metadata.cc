#include "checkpoint/dcp/metadata.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "checkpoint/dcp/chunks.h"
#include "checkpoint/dcp/class_names.h"
#include "checkpoint/pt/pickle_graph.h"
#include "checkpoint/pt/pickle_ops.h"

namespace ddp::checkpoint::dcp {
namespace {

using pt::Kind;
using pt::Node;
using pt::NodeId;

constexpr absl::string_view kClasses[] = {
    kMetadataClass, kTensorStorage, kBytesStorage, kChunkStorage, kTensorProperties, kMetadataIndex,
    kStorageInfo, kStorageMeta, kMemoryFormat, kGetLayout,
    // How some versions of Python pickle the members of an enum, here of kMemoryFormat.
    "builtins.getattr",
    // The folder that StorageMeta names. Its class depends on the version and the system.
    "pathlib.Path", "pathlib.PosixPath", "pathlib.WindowsPath", "pathlib.PurePosixPath",
    "pathlib.PureWindowsPath", "pathlib._local.PosixPath", "pathlib._local.WindowsPath"};

constexpr size_t kMaxDimensions = 64;
constexpr size_t kMaxQuoted = 200;

// For messages: a name from a file may be long, and hold anything.
std::string Quoted(absl::string_view name) {
  return absl::StrCat("'", absl::CHexEscape(name.substr(0, kMaxQuoted)), "'");
}

absl::Status Damaged(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("pickle: ", what));
}

// One of DCP's dataclasses: the values of its fields by their names.
using Fields = std::map<absl::string_view, NodeId>;

class Interpreter {
 public:
  explicit Interpreter(const pt::PickleGraph& graph) : nodes_(graph.nodes), root_(graph.root) {}

  absl::StatusOr<Metadata> Run() {
    DDP_ASSIGN_OR_RETURN(const Fields fields, FieldsOf(root_, kMetadataClass));
    DDP_RETURN_IF_ERROR(CheckVersion(fields));
    DDP_RETURN_IF_ERROR(ReadItems(fields));
    DDP_RETURN_IF_ERROR(ReadPaths(fields));
    DDP_ASSIGN_OR_RETURN(const NodeId values, Field(fields, "state_dict_metadata", Kind::kDict));
    Metadata metadata;
    const std::vector<NodeId>& pairs = nodes_[values].items;
    for (size_t i = 0; i < pairs.size(); i += 2) {
      DDP_ASSIGN_OR_RETURN(Entry entry, EntryOf(pairs[i], pairs[i + 1]));
      metadata.entries.push_back(std::move(entry));
    }
    for (const auto& [name, items] : items_) {
      if (!items.empty()) {
        return Damaged(absl::StrCat("stores a chunk of ", Quoted(name), " which the value lacks"));
      }
    }
    // Python's order is that of the values on rank 0, then on rank 1, and so on. That of the dict
    // is the one of the paths.
    std::stable_sort(
        metadata.entries.begin(), metadata.entries.end(),
        [this](const Entry& a, const Entry& b) { return OrderOf(a.name) < OrderOf(b.name); });
    DDP_RETURN_IF_ERROR(CheckDisjoint(metadata));
    return metadata;
  }

 private:
  bool Is(NodeId id, absl::string_view name) const {
    return nodes_[id].kind == Kind::kObject && nodes_[nodes_[id].items[0]].text == name;
  }

  // The fields of an object that a class made without arguments. An object without fields has no
  // state.
  absl::StatusOr<Fields> FieldsOf(NodeId id, absl::string_view name) const {
    if (!Is(id, name) || !nodes_[nodes_[id].items[1]].items.empty()) {
      return Damaged(absl::StrCat("lacks a ", name));
    }
    Fields fields;
    if (nodes_[id].items.size() < 3) return fields;
    const Node& state = nodes_[nodes_[id].items[2]];
    // No class has more than five fields; later versions may have a few more.
    constexpr size_t kMaxFields = 32;
    if (state.kind != Kind::kDict || state.items.size() > 2 * kMaxFields) {
      return Damaged(absl::StrCat("has a ", name, " of another form"));
    }
    for (size_t i = 0; i < state.items.size(); i += 2) {
      const Node& key = nodes_[state.items[i]];
      if (key.kind != Kind::kString || !fields.emplace(key.text, state.items[i + 1]).second) {
        return Damaged(absl::StrCat("has a ", name, " with a field twice, or without a name"));
      }
    }
    return fields;
  }

  absl::StatusOr<NodeId> Field(const Fields& fields, absl::string_view name, Kind kind) const {
    const auto it = fields.find(name);
    if (it != fields.end() && nodes_[it->second].kind == kind) return it->second;
    return Damaged(absl::StrCat("has no field ", name, " of the kind that belongs there"));
  }

  // Null if the field is None or missing: Python's classes have defaults.
  const Node* Optional(const Fields& fields, absl::string_view name) const {
    const auto it = fields.find(name);
    if (it == fields.end() || nodes_[it->second].kind == Kind::kNone) return nullptr;
    return &nodes_[it->second];
  }

  absl::StatusOr<std::vector<int64_t>> Sizes(const Node& node) const {
    if (node.kind != Kind::kTuple || node.items.size() > kMaxDimensions) {
      return Damaged("has a shape that is none");
    }
    std::vector<int64_t> sizes;
    for (NodeId item : node.items) {
      if (nodes_[item].kind != Kind::kInt || nodes_[item].integer < 0) {
        return Damaged("has a shape that is none");
      }
      sizes.push_back(nodes_[item].integer);
    }
    return sizes;
  }

  absl::Status CheckVersion(const Fields& fields) const {
    const Node* version = Optional(fields, "version");  // old checkpoints have none
    if (version == nullptr) return absl::OkStatus();
    if (version->kind != Kind::kString) return Damaged("has a version that is no text");
    if (absl::StartsWith(version->text, "1.")) return absl::OkStatus();
    return absl::UnimplementedError(absl::StrCat("was written in version ", Quoted(version->text),
                                                 " of the format, and only versions 1.x are read"));
  }

  // Metadata.storage_data: {MetadataIndex(name, offset): _StorageInfo}. Bytes have no offset.
  absl::Status ReadItems(const Fields& fields) {
    DDP_ASSIGN_OR_RETURN(const NodeId storage, Field(fields, "storage_data", Kind::kDict));
    const std::vector<NodeId>& pairs = nodes_[storage].items;
    for (size_t i = 0; i < pairs.size(); i += 2) {
      DDP_ASSIGN_OR_RETURN(const Fields index, FieldsOf(pairs[i], kMetadataIndex));
      DDP_ASSIGN_OR_RETURN(const NodeId name, Field(index, "fqn", Kind::kString));
      if (nodes_[name].text.size() > kMaxName) return Damaged("has a name of more than 4 KiB");
      std::optional<std::vector<int64_t>> offset;
      if (const Node* node = Optional(index, "offset")) {
        DDP_ASSIGN_OR_RETURN(offset, Sizes(*node));
      }
      DDP_ASSIGN_OR_RETURN(Item item, ItemOf(pairs[i + 1], nodes_[name].text));
      if (!items_[nodes_[name].text].emplace(std::move(offset), std::move(item)).second) {
        return Damaged(absl::StrCat("stores a chunk of ", Quoted(nodes_[name].text), " twice"));
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<Item> ItemOf(NodeId id, absl::string_view name) const {
    DDP_ASSIGN_OR_RETURN(const Fields info, FieldsOf(id, kStorageInfo));
    DDP_ASSIGN_OR_RETURN(const NodeId file, Field(info, "relative_path", Kind::kString));
    DDP_ASSIGN_OR_RETURN(const NodeId offset, Field(info, "offset", Kind::kInt));
    DDP_ASSIGN_OR_RETURN(const NodeId length, Field(info, "length", Kind::kInt));
    if (const Node* transforms = Optional(info, "transform_descriptors")) {
      DDP_RETURN_IF_ERROR(CheckNoTransforms(*transforms, name));
    }
    const std::string& path = nodes_[file].text;
    // Python's writers put all files into the checkpoint's folder.
    if (path.empty() || path == "." || path == ".." || path.size() > kMaxName ||
        path.find('/') != std::string::npos || path.find('\0') != std::string::npos) {
      return Damaged(absl::StrCat("stores ", Quoted(name), " in ", Quoted(path),
                                  ", which is no file of the checkpoint's folder"));
    }
    const int64_t begin = nodes_[offset].integer, size = nodes_[length].integer;
    if (begin < 0 || size <= 0 || size > std::numeric_limits<int64_t>::max() - begin) {
      return Damaged(
          absl::StrCat("stores ", Quoted(name), " at ", size, " bytes from byte ", begin, " on"));
    }
    return Item{path, static_cast<uint64_t>(begin), static_cast<uint64_t>(size)};
  }

  absl::Status CheckNoTransforms(const Node& transforms, absl::string_view name) const {
    if (transforms.kind != Kind::kList && transforms.kind != Kind::kTuple) {
      return Damaged("has transform_descriptors that are no list");
    }
    if (transforms.items.empty()) return absl::OkStatus();
    const Node& first = nodes_[transforms.items[0]];
    return absl::UnimplementedError(
        absl::StrCat(Quoted(name), " was stored through the extension ",
                     Quoted(first.kind == Kind::kString ? first.text : "?"),
                     ", which is not read here; save it again in Python without FileSystemWriter's "
                     "_extensions"));
  }

  // Metadata.planner_data: {name: path}. None or empty where the planner did not flatten the dict.
  absl::Status ReadPaths(const Fields& fields) {
    const Node* paths = Optional(fields, "planner_data");
    if (paths == nullptr) return absl::OkStatus();
    if (paths->kind != Kind::kDict) return Damaged("has planner_data that is no dict");
    for (size_t i = 0; i < paths->items.size(); i += 2) {
      const Node& name = nodes_[paths->items[i]];
      const Node& path = nodes_[paths->items[i + 1]];
      if (name.kind != Kind::kString || name.text.size() > kMaxName || path.kind != Kind::kTuple ||
          path.items.empty()) {
        return Damaged("has a path that is none");
      }
      // Before anything is copied: a few long keys could stand in many paths.
      if (path.items.size() > static_cast<size_t>(pt::kMaxDepth)) {
        return Damaged("containers nested too deeply");
      }
      size_t size = 0;
      for (NodeId item : path.items) size += nodes_[item].text.size();
      if (size > name.text.size() || JoinedPath(path) != name.text) {
        return Damaged(absl::StrCat("gives ", Quoted(name.text), " a path of another name"));
      }
      std::vector<Key> keys;
      for (NodeId item : path.items) {
        if (nodes_[item].kind == Kind::kString) {
          keys.emplace_back(nodes_[item].text);
        } else if (keys.empty() || nodes_[item].kind != Kind::kInt || nodes_[item].integer < 0) {
          return Damaged(absl::StrCat("gives ", Quoted(name.text), " a bad index"));
        } else {
          keys.emplace_back(nodes_[item].integer);
        }
      }
      const size_t order = paths_.size();
      if (!paths_.emplace(name.text, Place{order, std::move(keys)}).second) {
        return Damaged(absl::StrCat("has two paths of ", Quoted(name.text)));
      }
    }
    return absl::OkStatus();
  }

  std::string JoinedPath(const Node& path) const {
    return absl::StrJoin(path.items, ".", [this](std::string* out, NodeId item) {
      const Node& key = nodes_[item];
      absl::StrAppend(out, key.kind == Kind::kString ? key.text : absl::StrCat(key.integer));
    });
  }

  size_t OrderOf(const std::string& name) const {
    const auto it = paths_.find(name);
    return it == paths_.end() ? paths_.size() : it->second.order;
  }

  absl::StatusOr<Entry> EntryOf(NodeId key, NodeId value) {
    if (nodes_[key].kind != Kind::kString || nodes_[key].text.size() > kMaxName) {
      return Damaged("has a value whose name is no text, or more than 4 KiB");
    }
    Entry entry{.name = nodes_[key].text, .path = {nodes_[key].text}, .value = Item{}};
    if (!names_.insert(entry.name).second) {
      return Damaged(absl::StrCat("has ", Quoted(entry.name), " twice"));
    }
    if (!paths_.empty()) {
      const auto path = paths_.find(entry.name);
      if (path == paths_.end()) return Damaged(absl::StrCat("has no path of ", Quoted(entry.name)));
      entry.path = path->second.path;
    }
    if (Is(value, kBytesStorage)) {
      absl::StatusOr<Item> item = TakeItem(entry.name, std::nullopt);
      DDP_RETURN_IF_ERROR(Annotate(item.status(), Quoted(entry.name)));
      entry.value = *std::move(item);
      return entry;
    }
    absl::StatusOr<TensorInfo> tensor = TensorOf(value, entry.name);
    DDP_RETURN_IF_ERROR(Annotate(tensor.status(), Quoted(entry.name)));
    entry.value = *std::move(tensor);
    return entry;
  }

  // Each item belongs to one chunk.
  absl::StatusOr<Item> TakeItem(const std::string& name,
                                const std::optional<std::vector<int64_t>>& offset) {
    const auto items = items_.find(name);
    if (items != items_.end()) {
      const auto item = items->second.find(offset);
      if (item != items->second.end()) {
        Item taken = std::move(item->second);
        items->second.erase(item);
        return taken;
      }
    }
    return Damaged(absl::StrCat("does not say where ",
                                offset.has_value() ? "its chunk at " + ShapeText(*offset) : "it",
                                " is stored"));
  }

  // A state is a tuple: TensorProperties has methods of its own for that.
  absl::StatusOr<c10::ScalarType> DtypeOf(NodeId id) const {
    if (!Is(id, kTensorProperties) || nodes_[id].items.size() < 3) {
      return Damaged(absl::StrCat("lacks ", kTensorProperties));
    }
    const Node& state = nodes_[nodes_[id].items[2]];
    if (state.kind != Kind::kTuple || state.items.size() < 2 || state.items.size() > 16) {
      return Damaged(absl::StrCat("has ", kTensorProperties, " of another form"));
    }
    const Node& type = nodes_[state.items[0]];
    const pt::DtypeName* dtype = type.kind == Kind::kGlobal ? pt::DtypeOfName(type.text) : nullptr;
    if (dtype == nullptr) return Damaged("has no element type");
    const NodeId layout = state.items[1];
    if (Is(layout, kGetLayout)) {
      const Node& arguments = nodes_[nodes_[layout].items[1]];
      if (arguments.items.size() == 1 && nodes_[arguments.items[0]].text == "torch.strided") {
        return dtype->dtype;
      }
    }
    return absl::UnimplementedError("is no dense tensor (torch.strided), and only those are read");
  }

  absl::StatusOr<TensorInfo> TensorOf(NodeId id, const std::string& name) {
    DDP_ASSIGN_OR_RETURN(const Fields fields, FieldsOf(id, kTensorStorage));
    const auto properties = fields.find("properties");
    if (properties == fields.end()) return Damaged("lacks the properties of a tensor");
    DDP_ASSIGN_OR_RETURN(const NodeId size, Field(fields, "size", Kind::kTuple));
    DDP_ASSIGN_OR_RETURN(const NodeId chunks, Field(fields, "chunks", Kind::kList));
    // Two tensors do not share it in Python; many that did would take more time than the pickle is
    // long.
    if (!chunk_lists_.insert(chunks).second) return Damaged("shares its chunks with another");
    TensorInfo tensor;
    DDP_ASSIGN_OR_RETURN(tensor.dtype, DtypeOf(properties->second));
    DDP_ASSIGN_OR_RETURN(tensor.shape, Sizes(nodes_[size]));
    absl::StatusOr<int64_t> elements = NumElements(tensor.shape);
    const int64_t item_size = static_cast<int64_t>(c10::elementSize(tensor.dtype));
    if (!elements.ok() || *elements > std::numeric_limits<int64_t>::max() / item_size) {
      return Damaged(absl::StrCat("no tensor has shape ", ShapeText(tensor.shape)));
    }
    std::map<std::vector<int64_t>, std::vector<int64_t>> sizes_at;
    std::vector<Box> boxes;
    for (NodeId chunk : nodes_[chunks].items) {
      DDP_ASSIGN_OR_RETURN(const Box box, BoxOf(chunk, tensor.shape));
      const bool is_empty = std::count(box.sizes.begin(), box.sizes.end(), 0) > 0;
      if (is_empty) continue;
      // Ranks that hold the same part: older versions list it once per rank and store it once.
      const auto [known, fresh] = sizes_at.emplace(box.offset, box.sizes);
      if (!fresh && known->second == box.sizes) continue;
      DDP_ASSIGN_OR_RETURN(Item item, TakeItem(name, box.offset));
      const int64_t bytes = item_size * std::accumulate(box.sizes.begin(), box.sizes.end(),
                                                        int64_t{1}, std::multiplies<>());
      if (item.size < static_cast<uint64_t>(bytes)) {
        return Damaged(absl::StrCat("stores ", bytes, " bytes of a chunk in ", item.size));
      }
      boxes.push_back(box);
      tensor.chunks.push_back({box, std::move(item)});
    }
    DDP_RETURN_IF_ERROR(CheckChunks(tensor.shape, boxes));
    DropItemsOfEmptyChunks(name, nodes_[chunks]);
    return tensor;
  }

  absl::StatusOr<Box> BoxOf(NodeId chunk, const std::vector<int64_t>& shape) const {
    DDP_ASSIGN_OR_RETURN(const Fields fields, FieldsOf(chunk, kChunkStorage));
    DDP_ASSIGN_OR_RETURN(const NodeId offsets, Field(fields, "offsets", Kind::kTuple));
    DDP_ASSIGN_OR_RETURN(const NodeId sizes, Field(fields, "sizes", Kind::kTuple));
    Box box;
    DDP_ASSIGN_OR_RETURN(box.offset, Sizes(nodes_[offsets]));
    DDP_ASSIGN_OR_RETURN(box.sizes, Sizes(nodes_[sizes]));
    const absl::Status within = CheckPart({.global_shape = shape, .part = box});
    if (!within.ok()) return Damaged(within.message());
    return box;
  }

  // Ranks without a part of a tensor store a chunk without elements, of which nothing is needed.
  void DropItemsOfEmptyChunks(const std::string& name, const Node& chunks) {
    const auto items = items_.find(name);
    if (items == items_.end() || items->second.empty()) return;
    for (NodeId chunk : chunks.items) {
      const absl::StatusOr<Fields> fields = FieldsOf(chunk, kChunkStorage);
      const absl::StatusOr<std::vector<int64_t>> offset = Sizes(nodes_[fields->at("offsets")]);
      items->second.erase(*offset);
    }
  }

  // What lies in no item is read for none: overlapping items could make little data look like much.
  absl::Status CheckDisjoint(const Metadata& metadata) const {
    std::vector<std::pair<const Item*, const Entry*>> items;
    for (const Entry& entry : metadata.entries) {
      if (const auto* item = std::get_if<Item>(&entry.value)) {
        items.emplace_back(item, &entry);
      } else {
        for (const Chunk& chunk : std::get<TensorInfo>(entry.value).chunks) {
          items.emplace_back(&chunk.item, &entry);
        }
      }
    }
    std::sort(items.begin(), items.end(), [](const auto& a, const auto& b) {
      return std::tie(a.first->file, a.first->offset) < std::tie(b.first->file, b.first->offset);
    });
    for (size_t i = 1; i < items.size(); ++i) {
      const Item& before = *items[i - 1].first;
      const Item& item = *items[i].first;
      if (before.file == item.file && before.offset + before.size > item.offset) {
        return Damaged(absl::StrCat("stores ", Quoted(items[i - 1].second->name), " and ",
                                    Quoted(items[i].second->name), " in the same bytes of ",
                                    Quoted(item.file)));
      }
    }
    return absl::OkStatus();
  }

  struct Place {
    size_t order;
    std::vector<Key> path;
  };

  const std::vector<Node>& nodes_;
  NodeId root_;
  // By name and offset of the chunk. What EntryOf takes is removed.
  std::unordered_map<std::string, std::map<std::optional<std::vector<int64_t>>, Item>> items_;
  std::unordered_map<std::string, Place> paths_;
  std::unordered_set<std::string> names_;
  std::unordered_set<NodeId> chunk_lists_;
};

}  // namespace

absl::StatusOr<Metadata> ParseMetadata(absl::string_view pickle) {
  DDP_ASSIGN_OR_RETURN(const pt::PickleGraph graph, pt::ParsePickle(pickle, kClasses));
  return Interpreter(graph).Run();
}

}  // namespace ddp::checkpoint::dcp
