// The format `dcp`: reads what Python's torch.distributed.checkpoint wrote.
#include <ATen/Functions.h>
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <variant>
#include <vector>

#include "absl/log/absl_log.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/status.h"
#include "checkpoint/consolidate.h"
#include "checkpoint/dcp/chunks.h"
#include "checkpoint/dcp/item_reader.h"
#include "checkpoint/dcp/metadata.h"
#include "checkpoint/dcp/tree.h"
#include "checkpoint/foreign.h"
#include "checkpoint/format.h"
#include "checkpoint/parts.h"
#include "checkpoint/state.h"

namespace ddp::checkpoint::dcp {
namespace {

constexpr absl::string_view kReadOnly =
    "is no format to save in, only one to read: save in another, and convert with `ckpt convert`";

int64_t Elements(const Box& box) {
  return std::accumulate(box.sizes.begin(), box.sizes.end(), int64_t{1}, std::multiplies<>());
}

std::string TextOf(const Key& key) {
  const auto* name = std::get_if<std::string>(&key);
  return name != nullptr ? *name : absl::StrCat(std::get<int64_t>(key));
}

// `box` counted from the first element of `origin`.
Box Within(Box box, const Box& origin) {
  for (size_t d = 0; d < box.offset.size(); ++d) box.offset[d] -= origin.offset[d];
  return box;
}

class Folder {
 public:
  static absl::StatusOr<Folder> Open(const std::string& path) {
    std::error_code error;
    const std::filesystem::file_status status = std::filesystem::status(path, error);
    if (status.type() == std::filesystem::file_type::not_found) {
      return absl::NotFoundError(absl::StrCat("opening ", path, ": no such folder"));
    }
    if (!std::filesystem::is_directory(status)) {
      return absl::DataLossError(
          absl::StrCat(path, " is no folder, as torch.distributed.checkpoint writes"));
    }
    Folder folder(path);
    DDP_ASSIGN_OR_RETURN(const std::string pickle, folder.ReadMetadataFile());
    absl::StatusOr<Metadata> metadata = ParseMetadata(pickle);
    const std::string file = absl::StrCat(path, "/", kMetadataFile);
    if (!metadata.ok()) return Annotate(metadata.status(), file);
    folder.metadata_ = *std::move(metadata);
    absl::StatusOr<Tree> tree = TreeOf(folder.metadata_.entries);
    if (!tree.ok()) return Annotate(tree.status(), file);
    folder.tree_ = *std::move(tree);
    DDP_RETURN_IF_ERROR(folder.CheckFiles());
    return folder;
  }

  // What `request` names, with the dicts above it, or all.
  absl::StatusOr<State> Read(const ReadRequest& request) {
    left_out_ = request.left_out;
    meta_ = request.meta;
    only_check_ = request.only_check;
    State state;
    if (request.parts.empty()) {
      DDP_ASSIGN_OR_RETURN(const std::optional<c10::IValue> root, Value(0, ""));
      state.root = root->toGenericDict();  // a dict is always there
    } else {
      DDP_RETURN_IF_ERROR(CheckRequest(request));
      std::set<std::string> found;
      DDP_ASSIGN_OR_RETURN(const c10::IValue root, Below(0, "", request, found, state));
      for (const auto& [path, wanted] : request.parts) {
        if (!wanted.optional && !found.contains(path)) {
          return Refuse(path, "is not in the checkpoint");
        }
      }
      state.root = root.toGenericDict();
    }
    if (is_unverified_) {
      ABSL_LOG(WARNING) << path_ << " has items without checksums: it is not known whether they "
                        << "are damaged";
    }
    return state;
  }

  absl::Status CheckComplete() const {
    for (const Entry& entry : metadata_.entries) {
      if (const auto* item = std::get_if<Item>(&entry.value)) {
        absl::StatusOr<ItemReader> reader = ItemReader::Open(path_, *item);
        DDP_RETURN_IF_ERROR(Of(entry, reader.ok() ? reader->CheckValue() : reader.status()));
        continue;
      }
      const auto& tensor = std::get<TensorInfo>(entry.value);
      for (const Chunk& chunk : tensor.chunks) {
        absl::StatusOr<ItemReader> reader = ItemReader::Open(path_, chunk.item);
        DDP_RETURN_IF_ERROR(Of(entry, reader.ok()
                                          ? reader->CheckTensor(tensor.dtype, chunk.box.sizes)
                                          : reader.status()));
      }
    }
    return absl::OkStatus();
  }

 private:
  explicit Folder(std::string path) : path_(std::move(path)) {}

  absl::StatusOr<std::string> ReadMetadataFile() const {
    const std::string file = absl::StrCat(path_, "/", kMetadataFile);
    DDP_RETURN_IF_ERROR(RefuseLink(file));
    absl::StatusOr<FileReader> reader = FileReader::Open(file);
    if (absl::IsNotFound(reader.status())) {
      std::error_code error;
      // A writer without collectives leaves one for each rank, and no common one.
      if (std::filesystem::exists(absl::StrCat(path_, "/__0", kMetadataFile), error)) {
        return absl::UnimplementedError(absl::StrCat(
            path_,
            " was saved by each rank for itself (use_collectives=False), which is not read"));
      }
      return absl::DataLossError(
          absl::StrCat(path_, " has no file ", kMetadataFile,
                       ": torch.distributed.checkpoint did not write it, or was interrupted"));
    }
    if (absl::IsFailedPrecondition(reader.status())) {
      return absl::DataLossError(reader.status().message());
    }
    DDP_RETURN_IF_ERROR(reader.status());
    DDP_RETURN_IF_ERROR(RefusePointer(*reader));
    constexpr uint64_t kMost = uint64_t{256} << 20;
    if (reader->size() > kMost) {
      return absl::DataLossError(absl::StrCat(file, " is longer than 256 MiB"));
    }
    std::string contents(reader->size(), '\0');
    DDP_RETURN_IF_ERROR(reader->ReadAt(0, contents.data(), contents.size()));
    return contents;
  }

  // All items lie within their files. They are disjoint, and each has the bytes of its chunk: so a
  // tensor takes no more memory than the files have.
  absl::Status CheckFiles() const {
    std::map<std::string, uint64_t> sizes;
    for (const Entry& entry : metadata_.entries) {
      if (const auto* item = std::get_if<Item>(&entry.value)) {
        DDP_RETURN_IF_ERROR(Of(entry, CheckFile(*item, sizes)));
        continue;
      }
      for (const Chunk& chunk : std::get<TensorInfo>(entry.value).chunks) {
        DDP_RETURN_IF_ERROR(Of(entry, CheckFile(chunk.item, sizes)));
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckFile(const Item& item, std::map<std::string, uint64_t>& sizes) const {
    const std::string path = absl::StrCat(path_, "/", item.file);
    const auto [known, fresh] = sizes.emplace(item.file, 0);
    if (fresh) {
      DDP_RETURN_IF_ERROR(RefuseLink(path));
      const absl::StatusOr<FileReader> file = FileReader::Open(path);
      if (absl::IsNotFound(file.status())) {
        return absl::DataLossError(absl::StrCat(path, " is missing"));
      }
      if (absl::IsFailedPrecondition(file.status())) {
        return absl::DataLossError(file.status().message());
      }
      DDP_RETURN_IF_ERROR(file.status());
      DDP_RETURN_IF_ERROR(RefusePointer(*file));
      known->second = file->size();
    }
    if (item.offset <= known->second && item.size <= known->second - item.offset) {
      return absl::OkStatus();
    }
    return absl::DataLossError(absl::StrCat(path, " is cut off: it has ", known->second,
                                            " bytes, and needs ", item.offset + item.size));
  }

  static absl::Status Refuse(absl::string_view path, absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat("cannot give '", path, "', which ", what));
  }

  static absl::Status Of(const Entry& entry, const absl::Status& status) {
    return Annotate(status, absl::StrCat("'", entry.name, "'"));
  }

  static c10::IValue ToIValue(const Key& key) {
    const auto* name = std::get_if<std::string>(&key);
    return name != nullptr ? c10::IValue(*name) : c10::IValue(std::get<int64_t>(key));
  }

  // The requested values in dict `id`; `prefix` is its path with a trailing slash. Adds tensors of
  // which parts are requested to `state`.
  absl::StatusOr<c10::IValue> Below(size_t id, const std::string& prefix,
                                    const ReadRequest& request, std::set<std::string>& found,
                                    State& state) {
    const TreeNode& node = tree_.nodes[id];
    if (node.kind != TreeNode::Kind::kDict) {
      return Refuse(absl::StripSuffix(prefix, "/"), "is no dict that could be read in part");
    }
    c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
    for (const auto& [key, next] : node.below) {
      const std::string path = absl::StrCat(prefix, TextOf(key));
      const auto wanted = request.parts.find(path);
      std::optional<c10::IValue> value;
      if (wanted != request.parts.end()) {
        found.insert(path);
        if (!wanted->second.whole() && !request.all_else) {
          DDP_RETURN_IF_ERROR(AddParts(next, path, wanted->second, state));
          continue;
        }
        DDP_ASSIGN_OR_RETURN(value, Value(next, path));
        if (!value.has_value()) continue;
        // Checksums are those of whole items.
        std::optional<ShardedTensor> cut;
        if (!wanted->second.whole() && value->isTensor()) {
          cut = Cut(value->toTensor(), wanted->second);
        }
        if (cut.has_value()) {
          state.sharded.emplace(path, *std::move(cut));
          continue;
        }
      } else {
        if (LeadsOn(request, path, tree_.nodes[next].kind == TreeNode::Kind::kDict)) {
          DDP_ASSIGN_OR_RETURN(value, Below(next, absl::StrCat(path, "/"), request, found, state));
        } else if (request.all_else) {
          DDP_ASSIGN_OR_RETURN(value, Value(next, path));
          if (!value.has_value()) continue;
        } else {
          continue;
        }
      }
      dict.insert_or_assign(ToIValue(key), *std::move(value));
    }
    return c10::IValue(std::move(dict));
  }

  absl::Status AddParts(size_t id, const std::string& path, const Wanted& wanted, State& state) {
    const TreeNode& node = tree_.nodes[id];
    const TensorInfo* tensor = node.kind == TreeNode::Kind::kValue
                                   ? std::get_if<TensorInfo>(&metadata_.entries[node.entry].value)
                                   : nullptr;
    if (tensor == nullptr) return Refuse(path, "is no tensor that could be cut");
    const std::string what = absl::StrCat("cannot give '", path, "'");
    ShardedTensor parts{
        .global_shape = tensor->shape, .dtype = tensor->dtype, .memory_order = wanted.memory_order};
    Shard shard{tensor->shape, FlatRange{}, wanted.memory_order};
    DDP_RETURN_IF_ERROR(Annotate(CheckPart(shard), what));
    for (const Part& part : wanted.parts) {
      shard.part = part;
      DDP_RETURN_IF_ERROR(Annotate(CheckPart(shard), what));
      absl::StatusOr<at::Tensor> values = TensorPart(*tensor, part, wanted.memory_order);
      if (!values.ok()) return Of(metadata_.entries[node.entry], values.status());
      parts.parts.push_back({part, *std::move(values)});
    }
    state.sharded.emplace(path, std::move(parts));
    return absl::OkStatus();
  }

  // All that is at a node; nullopt for what is left out. The recursion is as deep as the longest
  // path, which ParseMetadata limits.
  absl::StatusOr<std::optional<c10::IValue>> Value(size_t id, const std::string& path) {
    const TreeNode& node = tree_.nodes[id];
    if (node.kind == TreeNode::Kind::kValue) return EntryValue(metadata_.entries[node.entry], path);
    const auto below = [&](const Key& key) {
      return path.empty() ? TextOf(key) : absl::StrCat(path, "/", TextOf(key));
    };
    if (node.kind == TreeNode::Kind::kDict) {
      c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
      for (const auto& [key, next] : node.below) {
        DDP_ASSIGN_OR_RETURN(std::optional<c10::IValue> value, Value(next, below(key)));
        if (value.has_value()) dict.insert_or_assign(ToIValue(key), *std::move(value));
      }
      return std::optional<c10::IValue>(std::move(dict));
    }
    c10::impl::GenericList list(c10::AnyType::get());
    for (const auto& [key, next] : node.below) {
      const auto index = static_cast<size_t>(std::get<int64_t>(key));
      while (list.size() < index) list.push_back(c10::IValue());
      DDP_ASSIGN_OR_RETURN(std::optional<c10::IValue> value, Value(next, below(key)));
      list.push_back(std::move(value).value_or(c10::IValue()));
    }
    return std::optional<c10::IValue>(std::move(list));
  }

  absl::StatusOr<std::optional<c10::IValue>> EntryValue(const Entry& entry,
                                                        const std::string& path) {
    if (const auto* item = std::get_if<Item>(&entry.value)) {
      absl::StatusOr<ItemReader> reader = Open(*item);
      DDP_RETURN_IF_ERROR(Of(entry, reader.status()));
      absl::StatusOr<std::optional<c10::IValue>> value = reader->Value(path, left_out_);
      if (!value.ok()) return Of(entry, value.status());
      if (only_check_) *value = c10::IValue();
      return value;
    }
    const auto& info = std::get<TensorInfo>(entry.value);
    if (meta_) {
      const auto options = at::TensorOptions().dtype(info.dtype).device(at::kMeta);
      return std::optional<c10::IValue>(at::empty(info.shape, options));
    }
    absl::StatusOr<at::Tensor> tensor = TensorPart(info, Whole{}, {});
    if (!tensor.ok()) return Of(entry, tensor.status());
    if (only_check_) return std::optional<c10::IValue>(c10::IValue());
    return std::optional<c10::IValue>(*std::move(tensor));
  }

  absl::StatusOr<ItemReader> Open(const Item& item) {
    DDP_ASSIGN_OR_RETURN(ItemReader reader, ItemReader::Open(path_, item));
    is_unverified_ = is_unverified_ || !reader.has_checksums();
    return reader;
  }

  absl::StatusOr<at::Tensor> TensorPart(const TensorInfo& tensor, const Part& part,
                                        const std::vector<int64_t>& order) {
    const auto* range = std::get_if<FlatRange>(&part);
    if (range == nullptr) {
      const auto* box = std::get_if<Box>(&part);
      if (box != nullptr) return BoxOf(tensor, *box);
      return BoxOf(tensor, {std::vector<int64_t>(tensor.shape.size()), tensor.shape});
    }
    // Box by box, in the order of dimensions in which the range's elements are numbered.
    const std::vector<int64_t> shape =
        InMemoryOrder({tensor.shape, FlatRange{}, order}).global_shape;
    const at::Tensor to = at::empty({range->end - range->begin}, tensor.dtype);
    int64_t done = 0;
    for (const Box& ordered : BoxesOf(shape, *range)) {
      at::Tensor place = to.narrow(0, done, Elements(ordered)).view(ordered.sizes);
      Box box = ordered;
      std::vector<int64_t> back(order.size());
      for (size_t i = 0; i < order.size(); ++i) {
        const auto dimension = static_cast<size_t>(order[i]);
        box.offset[dimension] = ordered.offset[i];
        box.sizes[dimension] = ordered.sizes[i];
        back[dimension] = static_cast<int64_t>(i);
      }
      if (!order.empty()) place = place.permute(back);
      DDP_RETURN_IF_ERROR(Fill(tensor, box, place));
      done += Elements(ordered);
    }
    return to;
  }

  absl::StatusOr<at::Tensor> BoxOf(const TensorInfo& tensor, const Box& box) {
    if (tensor.chunks.size() == 1 && box == tensor.chunks[0].box) {  // without a copy
      DDP_ASSIGN_OR_RETURN(const ItemReader reader, Open(tensor.chunks[0].item));
      return reader.Tensor(tensor.dtype, box.sizes, Whole{});
    }
    const at::Tensor to = at::empty(box.sizes, tensor.dtype);
    DDP_RETURN_IF_ERROR(Fill(tensor, box, to));
    return to;
  }

  // Copies the elements of `box` from the chunks that have them.
  absl::Status Fill(const TensorInfo& tensor, const Box& box, const at::Tensor& to) {
    for (const Chunk& chunk : tensor.chunks) {
      const std::optional<Box> common = Intersection(chunk.box, box);
      if (!common.has_value()) continue;
      DDP_ASSIGN_OR_RETURN(const ItemReader reader, Open(chunk.item));
      const Part part = *common == chunk.box ? Part(Whole{}) : Part(Within(*common, chunk.box));
      DDP_ASSIGN_OR_RETURN(const at::Tensor from,
                           reader.Tensor(tensor.dtype, chunk.box.sizes, part));
      CopyPart(from, Within(*common, box), {}, to);
    }
    return absl::OkStatus();
  }

  std::string path_;
  Metadata metadata_;
  Tree tree_;
  std::vector<std::string>* left_out_ = nullptr;  // not owned
  bool meta_ = false;                             // ReadRequest's
  bool only_check_ = false;                       // likewise
  bool is_unverified_ = false;                    // some item that was read has no CRC-32
};

class DcpFormat : public Format {
 public:
  explicit DcpFormat(const FormatOptions& options) : options_(options) {}

  absl::string_view name() const override { return "dcp"; }
  absl::string_view suffix() const override { return ".dcp"; }
  bool all_ranks_write() const override { return false; }

  absl::Status Write(const State&, const std::string& path, TensorSource*) override {
    return absl::UnimplementedError(absl::StrCat("writing ", path, ": dcp ", kReadOnly));
  }

  absl::StatusOr<State> Read(const std::string& path, const ReadRequest& request) override {
    return CatchStatus(absl::StrCat("reading ", path), [&]() -> absl::StatusOr<State> {
      absl::StatusOr<Folder> folder = Open(path);
      if (!folder.ok()) return folder.status();
      // Where a checkpoint of ours was written for Python, entries of single ranks are in the root.
      absl::StatusOr<State> state = folder->Read(WithPerRankEntries(request));
      if (!state.ok()) return Named(path, state.status());
      TakePerRank(*state, request.per_rank, options_.ranks);
      return state;
    });
  }

  absl::Status CheckComplete(const std::string& path) override {
    return CatchStatus(absl::StrCat("reading ", path), [&]() -> absl::Status {
      absl::StatusOr<Folder> folder = Open(path);
      if (!folder.ok()) return folder.status();
      return Named(path, folder->CheckComplete());
    });
  }

 private:
  absl::StatusOr<Folder> Open(const std::string& path) const {
    DDP_ASSIGN_OR_RETURN(Folder folder, Folder::Open(path));
    if (options_.accept_unverified) return folder;
    return absl::FailedPreconditionError(absl::StrCat(
        path, " has no checksum of ", kMetadataFile,
        ", so that damage could not be found; a run's own folder takes none of these"));
  }

  // Prefixes the path, unless the message contains it.
  static absl::Status Named(const std::string& path, const absl::Status& status) {
    if (status.ok() || absl::StrContains(status.message(), path)) return status;
    return Annotate(status, path);
  }

  FormatOptions options_;
};

std::unique_ptr<Format> Create(const FormatOptions& options) {
  return std::make_unique<DcpFormat>(options);
}

// Python's users choose the folder's name.
bool IsDcp(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(absl::StrCat(path, "/", kMetadataFile), error);
}

const Registration<FormatRegistry> kDcp("dcp", FormatEntry{.create = &Create,
                                                           .read_only = kReadOnly,
                                                           .recognises = &IsDcp});

}  // namespace
}  // namespace ddp::checkpoint::dcp
