// The format `sharded`: a folder to which every rank writes what it owns. docs/checkpoint_format.md
// describes the files.
#include <ATen/Functions.h>
#include <ATen/core/ivalue_inl.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/status.h"
#include "base/utf8.h"
#include "base/xxh3.h"
#include "checkpoint/format.h"
#include "checkpoint/sharded/manifest.h"
#include "checkpoint/sharded/part_reader.h"
#include "checkpoint/sharded/shared_read.h"
#include "checkpoint/sharded/writer.h"
#include "checkpoint/tree_json.h"

namespace ddp::checkpoint::sharded {
namespace {

using nlohmann::json;

// Of a manifest: larger ones are not of this format.
constexpr uint64_t kMostManifestBytes = uint64_t{4} << 30;

absl::StatusOr<Manifest> ReadManifest(const std::string& folder) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(folder, error);
  if (!std::filesystem::exists(status)) {
    if (error && error != std::errc::no_such_file_or_directory) {
      return FileError(error.value(), "reading", folder);
    }
    return absl::NotFoundError(absl::StrCat("reading ", folder, ": there is no such folder"));
  }
  if (!std::filesystem::is_directory(status)) {
    return absl::DataLossError(
        absl::StrCat(folder, " is no folder, and a checkpoint in format sharded is one"));
  }
  const std::string path = absl::StrCat(folder, "/", kManifestFile);
  absl::StatusOr<FileReader> file = FileReader::Open(path);
  if (absl::IsNotFound(file.status()) || absl::IsFailedPrecondition(file.status())) {
    return absl::DataLossError(absl::StrCat(
        folder, " has no file ", kManifestFile,
        ": it is no checkpoint in format sharded, or its save did not come to an end"));
  }
  DDP_RETURN_IF_ERROR(file.status());
  if (file->size() > kMostManifestBytes) {
    return absl::DataLossError(absl::StrCat(path, " is too large for a manifest"));
  }
  std::string text(file->size(), '\0');
  DDP_RETURN_IF_ERROR(file->ReadAt(0, text.data(), text.size()));
  absl::StatusOr<Manifest> manifest = DecodeManifest(text);
  if (manifest.ok()) return manifest;
  return absl::Status(manifest.status().code(),
                      absl::StrCat(folder, " ", manifest.status().message()));
}

absl::Status Refuse(absl::string_view path, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("cannot give '", path, "', which ", what));
}

// Reads values of one checkpoint.
class Loader {
 public:
  Loader(const std::string& folder, const Manifest& manifest)
      : manifest_(manifest), reader_(folder, manifest) {}

  // Until Share, whole tensors are read by all ranks together, each its chunks.
  void BeginSharing(const Coordinator& ranks) {
    sharing_ = true;
    rank_ = ranks.rank();
    loads_.assign(static_cast<size_t>(ranks.size()), 0);
  }

  // Collective. Gives the ranks what each has read since BeginSharing.
  absl::Status Share(const BroadcastBytes& broadcast) {
    sharing_ = false;
    for (const auto& [tensor, chunks] : shared_) {
      char* const bytes = static_cast<char*>(tensor.mutable_data_ptr());
      for (const Chunk& chunk : chunks) {
        DDP_RETURN_IF_ERROR(broadcast(bytes + chunk.begin, chunk.end - chunk.begin, chunk.reader));
      }
    }
    shared_.clear();
    return absl::OkStatus();
  }

  PartReader& reader() { return reader_; }

  absl::StatusOr<c10::IValue> Tree(const json& tree) {
    return TreeFromJson(tree, [this](const std::string& name) { return WholeTensor(name); });
  }

  // Whether Tree has read every tensor.
  bool has_all() const { return whole_.size() == manifest_.tensors.size(); }

  // The requested values with the dicts above them; `prefix` is the path of `tree` with a slash.
  absl::StatusOr<c10::IValue> Below(const json& tree, const std::string& prefix,
                                    const ReadRequest& request, State& state,
                                    std::set<std::string>& found) {
    const json* pairs = MemberOf(tree, "dict");
    if (pairs == nullptr || !ArePairs(*pairs)) {
      return Refuse(absl::StripSuffix(prefix, "/"), "is no dict that could be read in part");
    }
    c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
    for (const json& pair : *pairs) {
      const bool text = pair[0].is_string();
      const std::string key = text ? pair[0].get<std::string>() : pair[0].dump();
      const std::string path = absl::StrCat(prefix, key);
      const auto wanted = request.parts.find(path);
      c10::IValue value;
      if (wanted != request.parts.end()) {
        found.insert(path);
        if (!wanted->second.whole()) {
          DDP_RETURN_IF_ERROR(AddParts(pair[1], path, wanted->second, state));
          continue;
        }
        DDP_ASSIGN_OR_RETURN(value, Tree(pair[1]));
      } else {
        const std::string below = absl::StrCat(path, "/");
        const auto next = request.parts.lower_bound(below);
        if (next == request.parts.end() || !absl::StartsWith(next->first, below)) continue;
        // What is optional may not be there, however far the way to it goes.
        if (next->second.optional && MemberOf(pair[1], "dict") == nullptr) continue;
        DDP_ASSIGN_OR_RETURN(value, Below(pair[1], below, request, state, found));
      }
      DDP_ASSIGN_OR_RETURN(const c10::IValue read_key, TreeFromJson(pair[0], nullptr));
      dict.insert_or_assign(read_key, std::move(value));
    }
    return c10::IValue(std::move(dict));
  }

 private:
  absl::StatusOr<const StoredTensor*> Find(const std::string& name) const {
    const auto found = manifest_.tensors.find(name);
    if (found != manifest_.tensors.end()) return &found->second;
    return absl::DataLossError(absl::StrCat("has a state that names the tensor '", Printable(name),
                                            "', which is not there"));
  }

  absl::StatusOr<c10::IValue> WholeTensor(const std::string& name) {
    const auto known = whole_.find(name);
    if (known != whole_.end()) return c10::IValue(known->second);
    DDP_ASSIGN_OR_RETURN(const StoredTensor* stored, Find(name));
    // Before memory is taken for what files may not have.
    DDP_RETURN_IF_ERROR(CheckSizes());
    const at::Tensor tensor =
        at::empty(stored->shape, at::TensorOptions().dtype(DtypeOfName(stored->encoding->name)));
    if (sharing_) {
      std::vector<Chunk> chunks = SpreadReads(*stored, loads_);
      char* const bytes = static_cast<char*>(tensor.mutable_data_ptr());
      for (const Chunk& chunk : chunks) {
        if (chunk.reader != rank_) continue;
        DDP_RETURN_IF_ERROR(reader_.Read(name, chunk.part, {}, bytes + chunk.begin));
      }
      shared_.emplace_back(tensor, std::move(chunks));
    } else if (tensor.numel() > 0) {
      DDP_RETURN_IF_ERROR(reader_.Read(name, Whole{}, {}, tensor.mutable_data_ptr()));
    }
    whole_.emplace(name, tensor);
    return c10::IValue(tensor);
  }

  absl::Status AddParts(const json& value, const std::string& path, const Wanted& wanted,
                        State& state) {
    const json* name = MemberOf(value, "tensor");
    if (name == nullptr || !name->is_string()) {
      return Refuse(path, "is no tensor that could be cut");
    }
    DDP_ASSIGN_OR_RETURN(const StoredTensor* stored, Find(name->get<std::string>()));
    ShardedTensor tensor{.global_shape = stored->shape,
                         .dtype = DtypeOfName(stored->encoding->name),
                         .memory_order = wanted.memory_order};
    Shard shard{stored->shape, FlatRange{}, wanted.memory_order};
    const std::string what = absl::StrCat("cannot give '", path, "'");
    DDP_RETURN_IF_ERROR(Annotate(CheckPart(shard), what));
    DDP_RETURN_IF_ERROR(CheckSizes());
    for (const Part& part : wanted.parts) {
      shard.part = part;
      DDP_RETURN_IF_ERROR(Annotate(CheckPart(shard), what));
      const at::Tensor values =
          at::empty(LocalShape(shard), at::TensorOptions().dtype(tensor.dtype));
      if (values.numel() > 0) {
        DDP_RETURN_IF_ERROR(reader_.Read(name->get<std::string>(), part, wanted.memory_order,
                                         values.mutable_data_ptr()));
      }
      tensor.parts.push_back({part, values});
    }
    state.sharded.emplace(path, std::move(tensor));
    return absl::OkStatus();
  }

  absl::Status CheckSizes() {
    if (!has_checked_sizes_) DDP_RETURN_IF_ERROR(reader_.CheckSizes());
    has_checked_sizes_ = true;
    return absl::OkStatus();
  }

  const Manifest& manifest_;
  PartReader reader_;
  std::map<std::string, at::Tensor> whole_;
  bool has_checked_sizes_ = false;
  bool sharing_ = false;
  int rank_ = 0;
  std::vector<uint64_t> loads_;  // bytes by rank
  std::vector<std::pair<at::Tensor, std::vector<Chunk>>> shared_;
};

// The values that `request` wants whole, as text: equal where all ranks ask for the same.
std::string WholeOnes(const ReadRequest& request, const Manifest& manifest) {
  std::string text = request.parts.empty() ? "all" : "";
  for (const auto& [path, wanted] : request.parts) {
    if (wanted.whole()) absl::StrAppend(&text, path, wanted.optional ? "?" : "", "\n");
  }
  return HexOf(Xxh3(absl::StrCat(text, EncodeManifest(manifest))));
}

class ShardedFormat : public Format {
 public:
  explicit ShardedFormat(const FormatOptions& options)
      : files_(options.files),
        ranks_(options.ranks != nullptr ? *options.ranks : alone_),
        broadcast_(options.broadcast) {}

  absl::string_view name() const override { return "sharded"; }
  absl::string_view suffix() const override { return ".sharded"; }
  bool all_ranks_write() const override { return true; }

  absl::Status Write(const State& state, const std::string& path) override {
    return WriteSharded(state, path, ranks_, files_);
  }

  absl::StatusOr<State> Read(const std::string& path, const ReadRequest& request) override {
    absl::StatusOr<State> state =
        CatchStatus(absl::StrCat("reading ", path), [&] { return ReadFolder(path, request); });
    if (state.ok() || absl::StrContains(state.status().message(), path)) return state;
    return absl::Status(state.status().code(), absl::StrCat(path, " ", state.status().message()));
  }

  absl::Status CheckComplete(const std::string& path) override {
    return CatchStatus(absl::StrCat("reading ", path), [&]() -> absl::Status {
      DDP_ASSIGN_OR_RETURN(const Manifest manifest, ReadManifest(path));
      return PartReader(path, manifest).CheckSizes();
    });
  }

 private:
  absl::StatusOr<State> ReadFolder(const std::string& path, const ReadRequest& request) {
    const auto prepare = [&]() -> absl::StatusOr<Manifest> {
      DDP_RETURN_IF_ERROR(CheckRequest(request));
      return ReadManifest(path);
    };
    const absl::StatusOr<Manifest> manifest = CatchStatus(absl::StrCat("reading ", path), prepare);
    if (broadcast_ == nullptr || ranks_.size() == 1) {
      DDP_RETURN_IF_ERROR(manifest.status());
      Loader loader(path, *manifest);
      State state;
      DDP_RETURN_IF_ERROR(ReadWhole(loader, *manifest, request, state));
      DDP_RETURN_IF_ERROR(ReadRest(loader, *manifest, request, state));
      return state;
    }
    // An error of one rank must not leave the others waiting: all have it, with its code.
    DDP_RETURN_IF_ERROR(ranks_.Agree(manifest.status()));
    DDP_ASSIGN_OR_RETURN(const std::vector<std::string> wanted,
                         ranks_.AllGather(WholeOnes(request, *manifest)));
    const bool same = std::all_of(wanted.begin(), wanted.end(),
                                  [&](const std::string& other) { return other == wanted[0]; });
    Loader loader(path, *manifest);
    State state;
    if (same) loader.BeginSharing(ranks_);
    absl::Status mine = CatchStatus(absl::StrCat("reading ", path),
                                    [&] { return ReadWhole(loader, *manifest, request, state); });
    if (same) {
      DDP_RETURN_IF_ERROR(ranks_.Agree(mine));
      DDP_RETURN_IF_ERROR(loader.Share(broadcast_));
    }
    if (mine.ok()) mine = ReadRest(loader, *manifest, request, state);
    DDP_RETURN_IF_ERROR(mine);
    return state;
  }

  // What is to be whole, of the tree.
  absl::Status ReadWhole(Loader& loader, const Manifest& manifest, const ReadRequest& request,
                         State& state) {
    if (!request.parts.empty()) {
      ReadRequest whole;
      for (const auto& [wanted_path, wanted] : request.parts) {
        if (wanted.whole()) whole.parts.emplace(wanted_path, wanted);
      }
      return ReadParts(loader, manifest, whole, state);
    }
    DDP_RETURN_IF_ERROR(loader.reader().CheckSizes());
    DDP_RETURN_IF_ERROR(loader.reader().CheckHeaders());
    DDP_ASSIGN_OR_RETURN(const c10::IValue root, loader.Tree(manifest.state));
    if (!root.isGenericDict()) return absl::DataLossError("has a state that is no dict");
    state.root = root.toGenericDict();
    return absl::OkStatus();
  }

  // Parts of tensors, and entries of ranks.
  absl::Status ReadRest(Loader& loader, const Manifest& manifest, const ReadRequest& request,
                        State& state) {
    ReadRequest parts;
    for (const auto& [wanted_path, wanted] : request.parts) {
      if (!wanted.whole()) parts.parts.emplace(wanted_path, wanted);
    }
    State ignored;  // the dicts above the parts
    DDP_RETURN_IF_ERROR(ReadParts(loader, manifest, parts, ignored));
    state.sharded = std::move(ignored.sharded);
    DDP_RETURN_IF_ERROR(ReadEntries(loader, manifest, request.per_rank, state));
    const bool all = request.parts.empty() && request.per_rank == PerRank::kAll;
    if (all && !loader.has_all()) {
      return absl::DataLossError("has a tensor that its state does not name");
    }
    return absl::OkStatus();
  }

  absl::Status ReadParts(Loader& loader, const Manifest& manifest, const ReadRequest& request,
                         State& state) {
    std::set<std::string> found;
    DDP_ASSIGN_OR_RETURN(const c10::IValue root,
                         loader.Below(manifest.state, "", request, state, found));
    for (const auto& [wanted_path, wanted] : request.parts) {
      if (!wanted.optional && !found.contains(wanted_path)) {
        return Refuse(wanted_path, "is not in the checkpoint");
      }
    }
    state.root = root.toGenericDict();
    return absl::OkStatus();
  }

  absl::Status ReadEntries(Loader& loader, const Manifest& manifest, PerRank which, State& state) {
    const bool same_world = static_cast<int>(manifest.per_rank.size()) == ranks_.size();
    for (size_t i = 0; i < manifest.per_rank.size() && which != PerRank::kNone; ++i) {
      const int rank = static_cast<int>(i);
      if (which == PerRank::kOwn && same_world && rank != ranks_.rank()) continue;
      DDP_ASSIGN_OR_RETURN(const c10::IValue entries, loader.Tree(manifest.per_rank[i]));
      if (!entries.isGenericDict()) return absl::DataLossError("has entries that are no dict");
      state.per_rank.emplace(rank, entries.toGenericDict());
    }
    return absl::OkStatus();
  }

  const SingleRank alone_;
  FileSystem* files_;
  const Coordinator& ranks_;
  BroadcastBytes broadcast_;
};

std::unique_ptr<Format> Create(const FormatOptions& options) {
  return std::make_unique<ShardedFormat>(options);
}

const Registration<FormatRegistry> kSharded("sharded", FormatEntry{.create = &Create});

}  // namespace
}  // namespace ddp::checkpoint::sharded
