// The format `sharded`: a folder to which every rank writes what it owns. docs/checkpoint_format.md
// describes the files.
#include <ATen/Functions.h>
#include <ATen/core/ivalue_inl.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/populate_pages.h"
#include "base/status.h"
#include "base/utf8.h"
#include "base/xxh3.h"
#include "checkpoint/consolidate.h"
#include "checkpoint/foreign.h"
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

absl::StatusOr<std::string> ReadManifestText(const std::string& folder) {
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
  DDP_RETURN_IF_ERROR(RefuseLink(path));
  absl::StatusOr<FileReader> file = FileReader::Open(path);
  if (absl::IsNotFound(file.status()) || absl::IsFailedPrecondition(file.status())) {
    return absl::DataLossError(absl::StrCat(
        folder, " has no file ", kManifestFile,
        ": it is no checkpoint in format sharded, or its save did not come to an end"));
  }
  DDP_RETURN_IF_ERROR(file.status());
  DDP_RETURN_IF_ERROR(RefusePointer(*file));
  if (file->size() > kMostManifestBytes) {
    return absl::DataLossError(absl::StrCat(path, " is too large for a manifest"));
  }
  std::string text(file->size(), '\0');
  DDP_RETURN_IF_ERROR(file->ReadAt(0, text.data(), text.size()));
  return text;
}

absl::StatusOr<Manifest> ManifestOf(const std::string& folder, absl::string_view text) {
  absl::StatusOr<Manifest> manifest = DecodeManifest(text);
  if (manifest.ok()) return manifest;
  return absl::Status(manifest.status().code(),
                      absl::StrCat(folder, " ", manifest.status().message()));
}

absl::Status Refuse(absl::string_view path, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("cannot give '", path, "', which ", what));
}

// What of a request is read: what all ranks may want, or what this rank wants for itself.
enum class Pass { kWhole, kParts };

// Which ranks need a block, and which of them reads it.
struct SharedBlock {
  uint64_t bytes = 0;
  std::vector<int> ranks;
  int reader = 0;
};
using SharedBlocks = std::map<std::pair<size_t, uint64_t>, SharedBlock>;  // by file and offset

// "FILE BEGIN END" of each run.
std::string TextOf(const std::vector<PartReader::Blocks>& runs) {
  std::string text;
  for (const auto& [file, begin, end] : runs) {
    absl::StrAppend(&text, file, " ", begin, " ", end, "\n");
  }
  return text;
}

// The blocks that two ranks or more need, of `all` ranks' texts. The same on all ranks.
absl::StatusOr<SharedBlocks> SharedBlocksOf(const std::vector<std::string>& all) {
  SharedBlocks blocks;
  std::vector<uint64_t> loads(all.size(), 0);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    for (const absl::string_view line : absl::StrSplit(all[rank], '\n', absl::SkipEmpty())) {
      const std::vector<absl::string_view> words = absl::StrSplit(line, ' ');
      uint64_t file = 0, begin = 0, end = 0;
      if (words.size() != 3 || !absl::SimpleAtoi(words[0], &file) ||
          !absl::SimpleAtoi(words[1], &begin) || !absl::SimpleAtoi(words[2], &end)) {
        return absl::InternalError("a rank's list of blocks cannot be read");
      }
      for (uint64_t at = begin; at < end; at += kBlockBytes) {
        SharedBlock& block = blocks[{file, at}];
        block.bytes = std::min(kBlockBytes, end - at);
        block.ranks.push_back(static_cast<int>(rank));
      }
    }
  }
  for (const auto& [place, block] : blocks) {
    if (block.ranks.size() == 1) loads[static_cast<size_t>(block.ranks[0])] += block.bytes;
  }
  std::erase_if(blocks, [](const auto& entry) { return entry.second.ranks.size() == 1; });
  const auto load_of = [&](int rank) -> uint64_t& { return loads[static_cast<size_t>(rank)]; };
  for (auto& [place, block] : blocks) {
    block.reader = *std::min_element(block.ranks.begin(), block.ranks.end(),
                                     [&](int a, int b) { return load_of(a) < load_of(b); });
    load_of(block.reader) += block.bytes;
  }
  return blocks;
}

// Reads values of one checkpoint.
class Loader {
 public:
  Loader(const std::string& folder, const Manifest& manifest, const ReadRequest& request)
      : manifest_(manifest),
        reader_(folder, manifest),
        meta_(request.meta),
        only_check_(request.only_check) {}

  // Until Share, whole tensors get memory and no values.
  void BeginSharing(const Coordinator& ranks) {
    sharing_ = true;
    rank_ = ranks.rank();
    size_ = ranks.size();
    loads_.assign(static_cast<size_t>(ranks.size()), 0);
  }

  // Collective. Reads the whole tensors of since BeginSharing, and gives them to all ranks; then
  // this rank calls `rest`. It reads on another thread, so that it goes on while this one waits for
  // other ranks; where no thread can be started, it reads all before the first broadcast.
  // Without an error of `broadcast`, OK on all ranks or on none.
  absl::Status Share(const Coordinator& ranks, const BroadcastBytes& broadcast,
                     absl::FunctionRef<absl::Status()> rest) {
    sharing_ = false;
    std::atomic<size_t> read = 0;  // of this rank's chunks, in order
    std::atomic<bool> gives_up = false;
    absl::Status mine;
    const auto read_all = [&] {
      mine = CatchStatus("reading", [&]() -> absl::Status {
        for (const auto& [name, tensor, chunks] : shared_) {
          char* const bytes = static_cast<char*>(tensor.mutable_data_ptr());
          for (const Chunk& chunk : chunks) {
            if (gives_up) return absl::OkStatus();
            if (chunk.reader != rank_) continue;
            DDP_RETURN_IF_ERROR(reader_.Read(name, chunk.part, {}, bytes + chunk.begin));
            ++read;
            read.notify_one();
          }
        }
        return rest();
      });
      // After an error this rank takes part in the broadcasts nevertheless.
      read = std::numeric_limits<size_t>::max();
      read.notify_one();
    };
    std::thread reader;
    if (!CatchStatus("", [&] { reader = std::thread(read_all); }).ok()) read_all();
    const absl::Status given = CatchStatus("broadcast", [&]() -> absl::Status {
      size_t own = 0;
      for (const auto& [name, tensor, chunks] : shared_) {
        char* const bytes = static_cast<char*>(tensor.mutable_data_ptr());
        for (const Chunk& chunk : chunks) {
          own += chunk.reader == rank_ ? 1 : 0;
          for (size_t now = read; chunk.reader == rank_ && now < own; now = read) read.wait(now);
          if (chunk.reader != rank_) PopulatePages(bytes + chunk.begin, chunk.end - chunk.begin);
          DDP_RETURN_IF_ERROR(
              broadcast(bytes + chunk.begin, chunk.end - chunk.begin, chunk.reader));
        }
      }
      return absl::OkStatus();
    });
    gives_up = !given.ok();
    if (reader.joinable()) reader.join();
    shared_.clear();
    DDP_RETURN_IF_ERROR(given);
    return ranks.Agree(mine);
  }

  // Collective. Reads the blocks that more than one rank needs of the parts in `request`: each by
  // one rank, which gives it to the others. An error of one rank is all ranks'.
  absl::Status ShareBlocks(const ReadRequest& request, const Coordinator& ranks,
                           const BroadcastBytes& broadcast) {
    std::vector<PartReader::Blocks> mine;
    const auto plan = [&]() -> absl::Status {
      reader_.BeginPlan();
      is_planning_ = true;
      State ignored;
      const absl::Status planned = ReadParts(request, ignored);
      is_planning_ = false;
      mine = reader_.EndPlan();
      return planned;
    };
    DDP_RETURN_IF_ERROR(ranks.Agree(CatchStatus("", plan)));
    DDP_ASSIGN_OR_RETURN(const std::vector<std::string> all, ranks.AllGather(TextOf(mine)));
    DDP_ASSIGN_OR_RETURN(const SharedBlocks blocks, SharedBlocksOf(all));
    std::vector<std::vector<char>> by_reader(all.size());
    const auto read = [&]() -> absl::Status {
      for (const auto& [place, block] : blocks) {
        std::vector<char>& buffer = by_reader[static_cast<size_t>(block.reader)];
        const size_t at = buffer.size();
        buffer.resize(at + block.bytes);
        if (block.reader != ranks.rank()) continue;
        DDP_RETURN_IF_ERROR(reader_.ReadPlanned(place.first, place.second, buffer.data() + at));
      }
      return absl::OkStatus();
    };
    DDP_RETURN_IF_ERROR(ranks.Agree(CatchStatus("", read)));
    for (size_t rank = 0; rank < by_reader.size(); ++rank) {
      std::vector<char>& buffer = by_reader[rank];
      for (size_t at = 0; at < buffer.size(); at += kMostPerBroadcast) {
        DDP_RETURN_IF_ERROR(broadcast(buffer.data() + at,
                                      std::min(kMostPerBroadcast, buffer.size() - at),
                                      static_cast<int>(rank)));
      }
    }
    std::vector<size_t> at(by_reader.size(), 0);
    for (const auto& [place, block] : blocks) {
      const auto reader = static_cast<size_t>(block.reader);
      const char* const from = by_reader[reader].data() + at[reader];
      at[reader] += block.bytes;
      if (!std::binary_search(block.ranks.begin(), block.ranks.end(), ranks.rank())) continue;
      reader_.Keep(place.first, place.second, std::vector<char>(from, from + block.bytes));
    }
    return absl::OkStatus();
  }

  // The values of the checkpoint that `request` wants whole, with the dicts above them.
  absl::Status ReadWhole(const ReadRequest& request, State& state) {
    if ((request.parts.empty() || request.all_else) && !meta_) {
      DDP_RETURN_IF_ERROR(CheckSizes());
      const size_t step = sharing_ ? static_cast<size_t>(size_) : 1;
      DDP_RETURN_IF_ERROR(reader_.CheckHeaders(sharing_ ? static_cast<size_t>(rank_) : 0, step));
    }
    if (request.parts.empty()) {
      DDP_ASSIGN_OR_RETURN(const c10::IValue root, Tree(manifest_.state));
      if (!root.isGenericDict()) return absl::DataLossError("has a state that is no dict");
      state.root = root.toGenericDict();
      return absl::OkStatus();
    }
    std::set<std::string> found;
    DDP_ASSIGN_OR_RETURN(const c10::IValue root,
                         Below(manifest_.state, "", request, Pass::kWhole, state, found));
    for (const auto& [path, wanted] : request.parts) {
      if (!wanted.optional && !found.contains(path)) {
        return Refuse(path, "is not in the checkpoint");
      }
    }
    state.root = root.toGenericDict();
    return absl::OkStatus();
  }

  // The parts of tensors that `request` wants.
  absl::Status ReadParts(const ReadRequest& request, State& state) {
    if (request.parts.empty()) return absl::OkStatus();
    std::set<std::string> found;
    return Below(manifest_.state, "", request, Pass::kParts, state, found).status();
  }

  // The entries of the ranks from `first` on, before `last`.
  absl::Status ReadEntries(size_t first, size_t last, State& state) {
    for (size_t rank = first; rank < last; ++rank) {
      DDP_ASSIGN_OR_RETURN(const c10::IValue entries, Tree(manifest_.per_rank[rank]));
      if (!entries.isGenericDict()) return absl::DataLossError("has entries that are no dict");
      state.per_rank.emplace(static_cast<int>(rank), entries.toGenericDict());
    }
    return absl::OkStatus();
  }

  // Whether every tensor was read whole.
  bool has_all() const { return whole_.size() == manifest_.tensors.size(); }

 private:
  static constexpr size_t kMostPerBroadcast = 64 << 20;

  absl::StatusOr<c10::IValue> Tree(const json& tree) {
    return TreeFromJson(tree, [this](const std::string& name) { return WholeTensor(name); });
  }

  // What `pass` gives of the request in a dict, `tree`; `prefix` is its path with a slash.
  absl::StatusOr<c10::IValue> Below(const json& tree, const std::string& prefix,
                                    const ReadRequest& request, Pass pass, State& state,
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
        // What has another shape than the reader thinks: its own check says so.
        const bool alone =
            request.all_else && !wanted->second.whole() && !Has(pair[1], wanted->second);
        const bool whole = wanted->second.whole() || alone;
        if (whole != (pass == Pass::kWhole)) continue;
        if (!whole) {
          DDP_RETURN_IF_ERROR(AddParts(pair[1], path, wanted->second, state));
          continue;
        }
        const bool sharing = std::exchange(sharing_, sharing_ && !alone);
        absl::StatusOr<c10::IValue> read = Tree(pair[1]);
        sharing_ = sharing;
        DDP_ASSIGN_OR_RETURN(value, std::move(read));
      } else if (LeadsOn(request, path, MemberOf(pair[1], "dict") != nullptr)) {
        DDP_ASSIGN_OR_RETURN(value,
                             Below(pair[1], absl::StrCat(path, "/"), request, pass, state, found));
      } else if (request.all_else && pass == Pass::kWhole) {
        DDP_ASSIGN_OR_RETURN(value, Tree(pair[1]));
      } else {
        continue;
      }
      DDP_ASSIGN_OR_RETURN(const c10::IValue read_key, TreeFromJson(pair[0], nullptr));
      dict.insert_or_assign(read_key, std::move(value));
    }
    return c10::IValue(std::move(dict));
  }

  absl::StatusOr<const StoredTensor*> Find(const std::string& name) const {
    const auto found = manifest_.tensors.find(name);
    if (found != manifest_.tensors.end()) return &found->second;
    return absl::DataLossError(absl::StrCat("has a state that names the tensor '", Printable(name),
                                            "', which is not there"));
  }

  // Whether `value` is a tensor that has all of the parts.
  bool Has(const json& value, const Wanted& wanted) const {
    const json* name = MemberOf(value, "tensor");
    if (name == nullptr || !name->is_string()) return false;
    const absl::StatusOr<const StoredTensor*> stored = Find(name->get<std::string>());
    return stored.ok() && Fits(wanted, (*stored)->shape);
  }

  absl::StatusOr<c10::IValue> WholeTensor(const std::string& name) {
    const auto known = whole_.find(name);
    if (known != whole_.end()) return c10::IValue(known->second);
    DDP_ASSIGN_OR_RETURN(const StoredTensor* stored, Find(name));
    // Before memory is taken for what files may not have.
    DDP_RETURN_IF_ERROR(CheckSizes());
    const at::ScalarType dtype = DtypeOfName(stored->encoding->name);
    const at::Tensor tensor =
        meta_ || only_check_
            ? at::empty(stored->shape, at::TensorOptions().dtype(dtype).device(at::kMeta))
            : at::empty(stored->shape, dtype);
    if (only_check_) DDP_RETURN_IF_ERROR(reader_.Check(name));
    if (tensor.is_meta()) return c10::IValue(whole_.emplace(name, tensor).first->second);
    if (sharing_) {
      shared_.push_back({name, tensor, SpreadReads(*stored, loads_)});
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
      const std::vector<int64_t> shape = LocalShape(shard);
      if (*NumElements(shape) > 0 && is_planning_) {
        char nothing = 0;  // a plan writes no values
        DDP_RETURN_IF_ERROR(
            reader_.Read(name->get<std::string>(), part, wanted.memory_order, &nothing));
      }
      if (is_planning_) continue;
      const at::Tensor values = at::empty(shape, tensor.dtype);
      if (values.numel() > 0) {
        DDP_RETURN_IF_ERROR(reader_.Read(name->get<std::string>(), part, wanted.memory_order,
                                         values.mutable_data_ptr()));
      }
      tensor.parts.push_back({part, values});
    }
    if (!is_planning_) state.sharded.emplace(path, std::move(tensor));
    return absl::OkStatus();
  }

  absl::Status CheckSizes() {
    if (!has_checked_sizes_) DDP_RETURN_IF_ERROR(reader_.CheckSizes());
    has_checked_sizes_ = true;
    return absl::OkStatus();
  }

  const Manifest& manifest_;
  PartReader reader_;
  const bool meta_;
  const bool only_check_;
  std::map<std::string, at::Tensor> whole_;
  bool has_checked_sizes_ = false;
  bool sharing_ = false;
  bool is_planning_ = false;
  int rank_ = 0;
  int size_ = 1;
  std::vector<uint64_t> loads_;  // bytes by rank
  struct SharedTensor {
    std::string name;
    at::Tensor values;
    std::vector<Chunk> chunks;
  };
  std::vector<SharedTensor> shared_;
};

class ShardedFormat : public Format {
 public:
  explicit ShardedFormat(const FormatOptions& options)
      : files_(options.files),
        ranks_(options.ranks != nullptr ? *options.ranks : alone_),
        broadcast_(options.broadcast) {}

  absl::string_view name() const override { return "sharded"; }
  absl::string_view suffix() const override { return ".sharded"; }
  bool all_ranks_write() const override { return true; }

  absl::Status Write(const State& state, const std::string& path, TensorSource*) override {
    return WriteSharded(state, path, ranks_, files_);
  }

  absl::StatusOr<std::optional<State>> WhatThisRankWrites(State state, bool edits) override {
    if (!plan_) {
      DDP_ASSIGN_OR_RETURN(plan_, PlanSpread(state, edits, ranks_));
    }
    return SpreadState(std::move(state), edits, *plan_, ranks_.rank());
  }
  void ForgetPlan() override { plan_.reset(); }

  absl::StatusOr<State> Read(const std::string& path, const ReadRequest& request) override {
    absl::StatusOr<State> state =
        CatchStatus(absl::StrCat("reading ", path), [&] { return ReadFolder(path, request); });
    if (state.ok() || absl::StrContains(state.status().message(), path)) return state;
    return absl::Status(state.status().code(), absl::StrCat(path, " ", state.status().message()));
  }

  absl::Status CheckComplete(const std::string& path) override {
    return CatchStatus(absl::StrCat("reading ", path), [&]() -> absl::Status {
      DDP_ASSIGN_OR_RETURN(const std::string text, ReadManifestText(path));
      DDP_ASSIGN_OR_RETURN(const Manifest manifest, ManifestOf(path, text));
      return PartReader(path, manifest).CheckSizes();
    });
  }

 private:
  absl::StatusOr<State> ReadFolder(const std::string& path, const ReadRequest& request) {
    if (broadcast_ != nullptr && ranks_.size() > 1) return ReadTogether(path, request);
    DDP_RETURN_IF_ERROR(CheckRequest(request));
    DDP_ASSIGN_OR_RETURN(const std::string text, ReadManifestText(path));
    DDP_ASSIGN_OR_RETURN(const Manifest manifest, ManifestOf(path, text));
    return ReadAlone(path, manifest, request);
  }

  // A checkpoint that one process has converted has the ranks' entries in its root.
  static ReadRequest WithEntries(const Manifest& manifest, const ReadRequest& request) {
    return manifest.per_rank.empty() ? WithPerRankEntries(request) : request;
  }
  void TakeEntries(const Manifest& manifest, const ReadRequest& request, State& state) const {
    if (manifest.per_rank.empty()) TakePerRank(state, request.per_rank, &ranks_);
  }

  absl::StatusOr<State> ReadAlone(const std::string& path, const Manifest& manifest,
                                  const ReadRequest& given) {
    const ReadRequest request = WithEntries(manifest, given);
    Loader loader(path, manifest, request);
    State state;
    DDP_RETURN_IF_ERROR(ReadCommon(loader, manifest, request, state));
    DDP_RETURN_IF_ERROR(ReadOwn(loader, manifest, request, state));
    TakeEntries(manifest, request, state);
    return state;
  }

  // Collective. Each byte is read once, by one of the ranks. An error that leaves others waiting is
  // all ranks', with its code.
  absl::StatusOr<State> ReadTogether(const std::string& path, const ReadRequest& given) {
    const std::string reading = absl::StrCat("reading ", path);
    DDP_ASSIGN_OR_RETURN(const std::string text, ShareManifest(path));
    const absl::StatusOr<Manifest> manifest =
        CatchStatus(reading, [&]() -> absl::StatusOr<Manifest> {
          DDP_RETURN_IF_ERROR(CheckRequest(given));
          return ManifestOf(path, text);
        });
    DDP_RETURN_IF_ERROR(ranks_.Agree(manifest.status()));
    const ReadRequest request = WithEntries(*manifest, given);
    DDP_ASSIGN_OR_RETURN(const std::vector<std::string> wanted,
                         ranks_.AllGather(HexOf(Xxh3(InCommon(request)))));
    const bool same = std::all_of(wanted.begin(), wanted.end(),
                                  [&](const std::string& other) { return other == wanted[0]; });
    if (!same) return ReadAlone(path, *manifest, request);
    Loader loader(path, *manifest, request);
    State state;
    loader.BeginSharing(ranks_);
    DDP_RETURN_IF_ERROR(ranks_.Agree(
        CatchStatus(reading, [&] { return ReadCommon(loader, *manifest, request, state); })));
    if (!request.parts.empty()) {
      DDP_RETURN_IF_ERROR(loader.ShareBlocks(request, ranks_, broadcast_));
    }
    DDP_RETURN_IF_ERROR(loader.Share(ranks_, broadcast_,
                                     [&] { return ReadOwn(loader, *manifest, request, state); }));
    TakeEntries(*manifest, request, state);
    return state;
  }

  // Collective: rank 0's.
  absl::StatusOr<std::string> ShareManifest(const std::string& path) {
    absl::StatusOr<std::string> text = std::string();
    if (ranks_.rank() == 0) {
      text = CatchStatus(absl::StrCat("reading ", path), [&] { return ReadManifestText(path); });
    }
    const auto size = [&]() -> absl::StatusOr<std::string> {
      DDP_RETURN_IF_ERROR(text.status());
      return absl::StrCat(text->size());
    };
    DDP_ASSIGN_OR_RETURN(const std::string of_rank_0, ranks_.Broadcast(size()));
    uint64_t bytes = 0;
    if (!absl::SimpleAtoi(of_rank_0, &bytes)) return absl::InternalError("rank 0 gives no size");
    text->resize(bytes);
    if (bytes > 0) DDP_RETURN_IF_ERROR(broadcast_(text->data(), bytes, /*from=*/0));
    return text;
  }

  // The ranks whose entries all readers want: all or none.
  size_t EntriesInCommon(const Manifest& manifest, PerRank which) const {
    const size_t saved = manifest.per_rank.size();
    const bool own = which == PerRank::kOwn && static_cast<int>(saved) == ranks_.size();
    return which == PerRank::kNone || own ? 0 : saved;
  }

  // What all ranks want whole, of the tree and of the ranks' entries.
  absl::Status ReadCommon(Loader& loader, const Manifest& manifest, const ReadRequest& request,
                          State& state) {
    DDP_RETURN_IF_ERROR(loader.ReadWhole(request, state));
    return loader.ReadEntries(0, EntriesInCommon(manifest, request.per_rank), state);
  }

  // Parts of tensors, and this rank's entries.
  absl::Status ReadOwn(Loader& loader, const Manifest& manifest, const ReadRequest& request,
                       State& state) {
    DDP_RETURN_IF_ERROR(loader.ReadParts(request, state));
    const bool own = request.per_rank == PerRank::kOwn && !manifest.per_rank.empty() &&
                     EntriesInCommon(manifest, request.per_rank) == 0;
    const auto rank = static_cast<size_t>(ranks_.rank());
    if (own) DDP_RETURN_IF_ERROR(loader.ReadEntries(rank, rank + 1, state));
    const bool all = request.parts.empty() && request.per_rank == PerRank::kAll;
    if (all && !loader.has_all()) {
      return absl::DataLossError("has a tensor that its state does not name");
    }
    return absl::OkStatus();
  }

  const SingleRank alone_;
  FileSystem* files_;
  const Coordinator& ranks_;
  BroadcastBytes broadcast_;
  std::optional<SpreadPlan> plan_;
};

std::unique_ptr<Format> Create(const FormatOptions& options) {
  return std::make_unique<ShardedFormat>(options);
}

// A folder of ours under another name. Any rank's file will do: rank 0's may be what is missing.
bool IsFolderOfThisFormat(const std::string& path) {
  std::error_code error, ignored;
  std::filesystem::directory_iterator file(path, error);
  for (; !error && file != std::filesystem::directory_iterator(); file.increment(error)) {
    if (IsFileName(file->path().filename().string()) && file->is_regular_file(ignored)) return true;
  }
  return false;
}

const Registration<FormatRegistry> kSharded("sharded",
                                            FormatEntry{.create = &Create,
                                                        .recognises = &IsFolderOfThisFormat});

}  // namespace
}  // namespace ddp::checkpoint::sharded
