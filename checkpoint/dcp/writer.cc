#include "checkpoint/dcp/writer.h"

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>

#include <cerrno>
#include <cstdint>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "base/utf8.h"
#include "checkpoint/dcp/metadata.h"
#include "checkpoint/dcp/metadata_writer.h"
#include "checkpoint/pt/pickle_ops.h"
#include "checkpoint/pt/pickle_writer.h"
#include "checkpoint/pt/zip.h"

namespace ddp::checkpoint::dcp {
namespace {

constexpr absl::string_view kDataFile = "__0_0.distcp";

// The keys, joined by slashes as in a state's paths, or by dots as in Python's names.
std::string TextOf(const std::vector<Key>& path, absl::string_view separator = "/") {
  return absl::StrJoin(path, separator, [](std::string* out, const Key& key) {
    const auto* name = std::get_if<std::string>(&key);
    absl::StrAppend(out, name != nullptr ? *name : absl::StrCat(std::get<int64_t>(key)));
  });
}

absl::Status Refuse(const std::vector<Key>& path, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("cannot write '", TextOf(path), "': ", what));
}

struct Leaf {
  std::vector<Key> path;
  c10::IValue value;
};

// The leaves of a dict, as torch.distributed.checkpoint's traverse_state_dict finds them.
class Flattener {
 public:
  explicit Flattener(std::vector<std::string>* left_out) : left_out_(left_out) {}

  absl::StatusOr<std::vector<Leaf>> Run(const c10::impl::GenericDict& root) {
    DDP_RETURN_IF_ERROR(Visit(root));
    return std::move(leaves_);
  }

 private:
  // A list is one value if nothing in it is a tensor, or a dict, or a list that is not one value.
  static bool IsLeaf(const c10::IValue& value, int depth) {
    if (value.isGenericDict()) return false;
    if (!value.isList()) return true;
    if (depth > pt::kMaxDepth) return false;  // Visit refuses it
    for (const c10::IValue& item : value.toListRef()) {
      if (item.isTensor() || !IsLeaf(item, depth + 1)) return false;
    }
    return true;
  }

  // As what the ranks of a run have each, where they have nothing.
  static bool HasOnlyEmptyDicts(c10::ArrayRef<c10::IValue> items) {
    return !items.empty() && std::all_of(items.begin(), items.end(), [](const c10::IValue& item) {
      return item.isGenericDict() && item.toGenericDict().empty();
    });
  }

  absl::Status Visit(const c10::IValue& value) {
    if (path_.size() > static_cast<size_t>(pt::kMaxDepth)) {
      return Refuse(path_, "nested too deeply, or a container in itself");
    }
    if (value.isGenericDict()) {
      const c10::impl::GenericDict dict = value.toGenericDict();
      if (dict.empty() && !path_.empty()) return LeaveOut();
      for (const auto& entry : dict) {
        const c10::IValue& key = entry.key();
        if (!key.isString() && !key.isInt() && !key.isDouble() && !key.isBool()) {
          return Refuse(path_, "a dict key that is neither str, int, float nor bool");
        }
        path_.emplace_back(KeyText(key));
        DDP_RETURN_IF_ERROR(Visit(entry.value()));
        path_.pop_back();
      }
      return absl::OkStatus();
    }
    if (value.isList() && HasOnlyEmptyDicts(value.toListRef())) return LeaveOut();
    if (IsLeaf(value, 0)) {
      leaves_.push_back({path_, value});
      return absl::OkStatus();
    }
    int64_t index = 0;
    for (const c10::IValue& item : value.toListRef()) {
      path_.emplace_back(index++);
      DDP_RETURN_IF_ERROR(Visit(item));
      path_.pop_back();
    }
    return absl::OkStatus();
  }

  // An empty dict, or a list of these.
  absl::Status LeaveOut() const {
    for (const Key& key : path_) {
      if (!std::holds_alternative<int64_t>(key)) continue;
      return Refuse(path_, "an empty dict in a list, which Python's flattening loses");
    }
    if (left_out_ != nullptr) left_out_->push_back(TextOf(path_));
    return absl::OkStatus();
  }

  std::vector<std::string>* const left_out_;
  std::vector<Key> path_;
  std::vector<Leaf> leaves_;
};

class Writer {
 public:
  explicit Writer(FileWriter* file) : file_(file) {}

  absl::StatusOr<Metadata> Run(const std::vector<Leaf>& leaves) {
    Metadata metadata;
    std::unordered_set<std::string> names;
    for (const Leaf& leaf : leaves) {
      Entry entry{.name = TextOf(leaf.path, "."), .path = leaf.path, .value = Item{}};
      if (!IsUtf8(entry.name, Surrogates::kAccept))
        return Refuse(leaf.path, "a name that is not UTF-8");
      if (entry.name.size() > kMaxName) return Refuse(leaf.path, "a name of more than 4096 bytes");
      if (!names.insert(entry.name).second) {
        return Refuse(leaf.path, absl::StrCat("another value has the name '", entry.name,
                                              "' in Python, where levels are joined by dots"));
      }
      if (leaf.value.isTensor()) {
        DDP_ASSIGN_OR_RETURN(entry.value, Tensor(leaf.value.toTensor(), leaf.path));
      } else {
        DDP_ASSIGN_OR_RETURN(entry.value, Value(leaf.value, leaf.path));
      }
      metadata.entries.push_back(std::move(entry));
    }
    return metadata;
  }

 private:
  absl::StatusOr<TensorInfo> Tensor(const at::Tensor& given, const std::vector<Key>& path) {
    if (!given.defined() || given.layout() != at::kStrided || given.is_meta() ||
        given.is_quantized()) {
      return Refuse(path, "only dense tensors that have their values in memory can be written");
    }
    if (pt::FindDtype(given.scalar_type()) == nullptr) {
      return Refuse(path, absl::StrCat("element type ", c10::toString(given.scalar_type())));
    }
    const at::Tensor tensor = given.detach().resolve_conj().resolve_neg().cpu().contiguous();
    TensorInfo info{.dtype = tensor.scalar_type(), .shape = tensor.sizes().vec(), .chunks = {}};
    DDP_ASSIGN_OR_RETURN(Item item, Value(tensor, path));
    info.chunks.push_back(
        {.box = {.offset = std::vector<int64_t>(info.shape.size()), .sizes = info.shape},
         .item = std::move(item)});
    return info;
  }

  // What torch.save writes for the value.
  absl::StatusOr<Item> Value(const c10::IValue& value, const std::vector<Key>& path) {
    absl::StatusOr<pt::Pickled> pickled = pt::WritePickle(value);
    if (!pickled.ok()) return Annotate(pickled.status(), absl::StrCat("'", TextOf(path), "'"));
    const uint64_t begin = file_->size();
    pt::ZipWriter zip(file_);
    const auto add = [&zip](absl::string_view name, absl::string_view text) {
      return zip.Add(absl::StrCat("archive/", name), text.data(), text.size());
    };
    DDP_RETURN_IF_ERROR(add("data.pkl", pickled->bytes));
    DDP_RETURN_IF_ERROR(add("byteorder", "little"));
    for (size_t i = 0; i < pickled->records.size(); ++i) {
      const pt::Record& record = pickled->records[i];
      const at::Tensor data = pt::OnCpu(record);
      DDP_RETURN_IF_ERROR(
          zip.Add(absl::StrCat("archive/data/", i), data.const_data_ptr(), record.size));
    }
    DDP_RETURN_IF_ERROR(add("version", "3\n"));
    DDP_RETURN_IF_ERROR(zip.Finish());
    return Item{std::string(kDataFile), begin, file_->size() - begin};
  }

  FileWriter* file_;
};

absl::Status Write(const State& state, const std::string& path, FileSystem* files,
                   std::vector<std::string>* left_out) {
  DDP_ASSIGN_OR_RETURN(const std::vector<Leaf> leaves, Flattener(left_out).Run(state.root));
  if (files->Mkdir(path.c_str(), 0777) != 0) return FileError(errno, "making folder", path);
  DDP_ASSIGN_OR_RETURN(FileWriter data,
                       FileWriter::Create(absl::StrCat(path, "/", kDataFile), files));
  DDP_ASSIGN_OR_RETURN(const Metadata metadata, Writer(&data).Run(leaves));
  DDP_RETURN_IF_ERROR(data.Finish());
  // Last, as Python does: a folder without it is none.
  DDP_ASSIGN_OR_RETURN(FileWriter index,
                       FileWriter::Create(absl::StrCat(path, "/", kMetadataFile), files));
  DDP_RETURN_IF_ERROR(index.Append(WriteMetadata(metadata)));
  DDP_RETURN_IF_ERROR(index.Finish());
  return SyncDirectory(path, files);
}

}  // namespace

absl::Status WriteCheckpoint(const State& state, const std::string& path, FileSystem* files,
                             std::vector<std::string>* left_out) {
  if (!state.sharded.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("dcp is written of whole tensors only, and '",
                                                   state.sharded.begin()->first,
                                                   "' is in parts; gather it first"));
  }
  if (!state.per_rank.empty()) {
    return absl::InvalidArgumentError(
        "dcp is written by one rank, and the state has entries of single ranks; gather them first");
  }
  return CatchStatus(absl::StrCat("writing ", path),
                     [&] { return Write(state, path, files, left_out); });
}

}  // namespace ddp::checkpoint::dcp
