#include "checkpoint/sharded/writer.h"

#include <ATen/Functions.h>
#include <ATen/core/ivalue_inl.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "base/json.h"
#include "base/status.h"
#include "checkpoint/outcomes.h"
#include "checkpoint/sharded/data_file.h"
#include "checkpoint/sharded/manifest.h"
#include "checkpoint/sharded/spread.h"
#include "checkpoint/tree_json.h"

namespace ddp::checkpoint::sharded {
namespace {

using nlohmann::json;
using safetensors::TensorEntry;

// Maximum size of a piece in which a tensor is copied that is not on the CPU, or not contiguous.
constexpr int64_t kMostCopied = 8 << 20;

constexpr JsonLimits kFromPeers = {.depth = 512};

// Announced instead of the contents by a rank that edits them before it writes; no JSON.
constexpr absl::string_view kEdits = "edits";

// As in Python's torch.distributed.checkpoint, whose HuggingFaceStorageReader looks for them.
constexpr char kShardingInfo[] = "DCP_SHARDING_INFO";
constexpr char kSavedOffsets[] = "saved_offsets";

Box AllOf(const std::vector<int64_t>& shape) { return {std::vector<int64_t>(shape.size()), shape}; }

absl::StatusOr<const Encoding*> EncodingFor(const std::string& path, const at::Tensor& tensor) {
  const auto refuse = [&](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat("'", path, "' is a tensor ", what));
  };
  if (!tensor.defined()) return refuse("that is undefined");
  if (tensor.layout() != at::kStrided) return refuse("that is not dense; save its dense form");
  const Encoding* encoding = EncodingOf(DtypeName(tensor.scalar_type()));
  if (encoding == nullptr) {
    return refuse(absl::StrCat("of ", c10::toString(tensor.scalar_type()),
                               ", which the format sharded cannot hold"));
  }
  if (tensor.is_meta()) return refuse("without values (on the device meta)");
  return encoding;
}

// A part that this rank writes.
struct Piece {
  std::string key;   // in the file's header
  std::string name;  // in the manifest
  const Encoding* encoding;
  std::vector<int64_t> shape;
  std::vector<int64_t> memory_order;
  Part part;
  at::Tensor values;
};

// What this rank has, under the names of the manifest.
struct Contents {
  struct Replicated {
    std::string path;
    std::string name;
    const Encoding* encoding;
    at::Tensor values;               // of a state of SpreadState: on the device meta
    const ShardedTensor* rows = {};  // likewise: what this rank writes
  };
  json tree;
  std::vector<Replicated> replicated;
  std::vector<Piece> own;               // parts of sharded tensors
  std::map<std::string, json> sharded;  // without parts, by name
  json entries;                         // of this rank
  std::vector<Piece> of_entries;
};

// Copies the dicts of a tree, so that entries can be added to them.
c10::IValue WithOwnDicts(const c10::IValue& value) {
  if (!value.isGenericDict()) return value;
  c10::impl::GenericDict copy = value.toGenericDict().copy();
  for (const auto& entry : copy) entry.setValue(WithOwnDicts(entry.value()));
  return copy;
}

// The same tree with `places`, by path, where they are; below dicts only.
c10::IValue WithPlaces(const c10::IValue& value, const std::string& path,
                       const std::map<std::string, at::Tensor>& places) {
  if (!value.isGenericDict()) {
    const auto place = places.find(path);
    return place != places.end() ? c10::IValue(place->second) : value;
  }
  c10::impl::GenericDict copy = value.toGenericDict().copy();
  for (const auto& entry : copy) {
    const std::string key = KeyText(entry.key());
    entry.setValue(
        WithPlaces(entry.value(), path.empty() ? key : absl::StrCat(path, "/", key), places));
  }
  return copy;
}

// The same values, in a storage that has nothing else: what shares it is not copied with them.
at::Tensor InOwnMemory(const at::Tensor& view) {
  if (view.numel() == 0 || view._is_zerotensor()) return view;
  at::Tensor own = at::from_blob(
      const_cast<void*>(view.const_data_ptr()), view.sizes(), view.strides(), [view](void*) {},
      view.options());
  if (view.is_conj()) own._set_conj(true);
  if (view.is_neg()) own._set_neg(true);
  return own;
}

// The path with points: "model.fc.weight". Different paths get different names.
std::string UniqueName(const std::string& path, std::set<std::string>& names) {
  const std::string name = absl::StrReplaceAll(path, {{"/", "."}});
  std::string unique = name;
  for (int i = 2; !names.insert(unique).second; ++i) unique = absl::StrCat(name, "#", i);
  return unique;
}

absl::Status CollectTree(const State& state, Contents& contents) {
  DDP_RETURN_IF_ERROR(CheckShards(state));
  // Those of SpreadState.
  std::map<const c10::TensorImpl*, const ShardedTensor*> spread;
  for (const auto& [path, tensor] : state.sharded) {
    DDP_ASSIGN_OR_RETURN(const std::optional<c10::IValue> place, FindAt(state.root, path));
    if (place) spread.emplace(place->toTensor().unsafeGetTensorImpl(), &tensor);
  }
  // Dicts that hold themselves must be found before they are copied.
  const NameOfTensor checked = [&](const std::string& path,
                                   const at::Tensor& tensor) -> absl::StatusOr<std::string> {
    if (tensor.defined() && spread.contains(tensor.unsafeGetTensorImpl())) return "";
    DDP_RETURN_IF_ERROR(EncodingFor(path, tensor).status());
    return "";
  };
  DDP_RETURN_IF_ERROR(TreeToJson(state.root, checked).status());
  const c10::impl::GenericDict root = WithOwnDicts(state.root).toGenericDict();
  std::map<const c10::TensorImpl*, const ShardedTensor*> places;
  for (const auto& [path, tensor] : state.sharded) {
    DDP_ASSIGN_OR_RETURN(const std::optional<c10::IValue> known, FindAt(root, path));
    if (known) continue;
    const at::Tensor place = at::empty({0}, at::TensorOptions().device(at::kMeta));
    DDP_RETURN_IF_ERROR(InsertAt(root, path, place));
    places.emplace(place.unsafeGetTensorImpl(), &tensor);
  }
  std::set<std::string> names;
  const NameOfTensor add = [&](const std::string& path,
                               const at::Tensor& tensor) -> absl::StatusOr<std::string> {
    const std::string name = UniqueName(path, names);
    const auto rows = spread.find(tensor.unsafeGetTensorImpl());
    const auto place = places.find(tensor.unsafeGetTensorImpl());
    if (rows == spread.end() && place == places.end()) {
      DDP_ASSIGN_OR_RETURN(const Encoding* encoding, EncodingFor(path, tensor));
      contents.replicated.push_back({path, name, encoding, tensor.detach()});
      return name;
    }
    const ShardedTensor& sharded = rows != spread.end() ? *rows->second : *place->second;
    const Encoding* encoding = EncodingOf(DtypeName(sharded.dtype));
    if (encoding == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat("sharded tensor '", path, "' has a dtype ",
                                                     "that the format sharded cannot hold"));
    }
    if (rows != spread.end()) {
      contents.replicated.push_back({path, name, encoding, tensor, &sharded});
      return name;
    }
    const StoredTensor described{
        encoding, sharded.global_shape, NormalOrder(sharded.memory_order), {}};
    contents.sharded.emplace(name, ToJson(described));
    for (const auto& [part, values] : sharded.parts) {
      DDP_RETURN_IF_ERROR(EncodingFor(path, values).status());
      contents.own.push_back({"", name, encoding, described.shape, described.memory_order,
                              std::holds_alternative<Whole>(part) ? AllOf(described.shape) : part,
                              values.detach()});
    }
    return name;
  };
  DDP_ASSIGN_OR_RETURN(contents.tree, TreeToJson(root, add));
  return absl::OkStatus();
}

absl::Status CollectEntries(const State& state, int rank, Contents& contents) {
  if (state.per_rank.empty()) return absl::OkStatus();
  const auto own = state.per_rank.find(rank);
  if (own == state.per_rank.end() || state.per_rank.size() != 1) {
    return absl::InvalidArgumentError("per-rank entries must be those of the rank itself");
  }
  std::set<std::string> names;
  const NameOfTensor add = [&](const std::string& path,
                               const at::Tensor& tensor) -> absl::StatusOr<std::string> {
    DDP_ASSIGN_OR_RETURN(const Encoding* encoding, EncodingFor(path, tensor));
    const std::string name = UniqueName(absl::StrCat("per_rank/", rank, "/", path), names);
    contents.of_entries.push_back({"",
                                   name,
                                   encoding,
                                   tensor.sizes().vec(),
                                   {},
                                   AllOf(tensor.sizes().vec()),
                                   tensor.detach()});
    return name;
  };
  DDP_ASSIGN_OR_RETURN(contents.entries, TreeToJson(own->second, add));
  return absl::OkStatus();
}

// What the ranks tell each other before they write: names, dtypes and shapes, and bytes of parts.
// Entries of ranks, whose sizes may change from save to save, do not count.
std::string Announcement(const Contents& contents) {
  json tensors = json::array();
  for (const Contents::Replicated& tensor : contents.replicated) {
    tensors.push_back({tensor.name, tensor.encoding->name, tensor.values.sizes().vec()});
  }
  uint64_t bytes = 0;
  for (const Piece& piece : contents.own) bytes += piece.values.nbytes();
  return json{{"tensors", std::move(tensors)},
              {"sharded", contents.sharded},
              {"entries", !contents.entries.is_null()},
              {"bytes", bytes}}
      .dump();
}

// Rank 0's replicated tensors, and the ranks that have each.
struct Announced {
  std::vector<ReplicatedTensor> tensors;  // as rank 0 announces them
  std::vector<std::string> names;
  std::vector<uint64_t> loads;  // bytes of parts, by rank
};

absl::StatusOr<Announced> ReadAnnouncements(const std::vector<std::string>& all) {
  Announced announced;
  std::map<std::string, std::pair<size_t, json>> known;  // by name: index, announcement
  json first;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    DDP_ASSIGN_OR_RETURN(json of_rank, ParseJson(all[rank], kFromPeers));
    announced.loads.push_back(of_rank.at("bytes").get<uint64_t>());
    if (rank == 0) first = of_rank;
    for (const json& tensor : of_rank.at("tensors")) {
      const auto name = tensor[0].get<std::string>();
      if (rank == 0) {
        const auto shape = tensor[2].get<std::vector<int64_t>>();
        const Encoding* encoding = EncodingOf(tensor[1].get<std::string>());
        if (encoding == nullptr) return absl::InternalError("a rank announces an unknown dtype");
        known.emplace(name, std::pair(announced.tensors.size(), tensor));
        announced.names.push_back(name);
        announced.tensors.push_back(
            {shape, StoredTensor{encoding, shape, {}, {}}.BytesOf(Whole{}), {}});
      }
      const auto found = known.find(name);
      if (found == known.end()) continue;  // rank 0's tree counts
      if (found->second.second != tensor) {
        return absl::InvalidArgumentError(
            absl::StrCat("'", name, "' is not the same on all ranks: ", tensor[1].dump(), " ",
                         tensor[2].dump(), " on rank ", rank, " and ",
                         found->second.second[1].dump(), " ", found->second.second[2].dump(),
                         " on rank 0; save it as per-rank or as a sharded tensor"));
      }
      announced.tensors[found->second.first].holders.push_back(static_cast<int>(rank));
    }
    if (of_rank.at("sharded") != first.at("sharded")) {
      return absl::InvalidArgumentError(absl::StrCat(
          "rank ", rank, " has other sharded tensors than rank 0, or others of shape or dtype"));
    }
    if (of_rank.at("entries") != first.at("entries")) {
      return absl::InvalidArgumentError(absl::StrCat(
          "rank ", rank, " and rank 0: one has entries of its own, and the other has none"));
    }
  }
  return announced;
}

// Finds this rank's contents, and returns what it announces.
absl::StatusOr<std::string> Collect(const State& state, int rank, Contents& contents) {
  DDP_RETURN_IF_ERROR(CollectTree(state, contents));
  DDP_RETURN_IF_ERROR(CollectEntries(state, rank, contents));
  return Announcement(contents);
}

absl::StatusOr<Announced> AnnouncedIn(const Outcomes& outcomes) {
  DDP_RETURN_IF_ERROR(FirstFailure(outcomes));
  std::vector<std::string> announcements;
  for (const absl::StatusOr<std::string>& outcome : outcomes) announcements.push_back(*outcome);
  return ReadAnnouncements(announcements);
}

// Gives the bytes of `tensor`, row-major, to `append`, without a copy of all of it.
template <typename Append>
absl::Status Stream(const at::Tensor& tensor, const Append& append) {
  const bool plain = !tensor.is_conj() && !tensor.is_neg();
  if (plain && tensor.device().is_cpu() && tensor.is_contiguous()) {
    return append(tensor.const_data_ptr(), tensor.nbytes());
  }
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  if (bytes <= kMostCopied || tensor.dim() == 0) {
    const at::Tensor dense = tensor.resolve_conj().resolve_neg().cpu().contiguous();
    return append(dense.const_data_ptr(), dense.nbytes());
  }
  const int64_t rows = tensor.size(0);
  const int64_t at_once = std::max<int64_t>(1, kMostCopied / (bytes / rows));
  for (int64_t row = 0; row < rows; row += at_once) {
    const int64_t count = std::min(at_once, rows - row);
    DDP_RETURN_IF_ERROR(
        Stream(count == 1 ? tensor.select(0, row) : tensor.narrow(0, row, count), append));
  }
  return absl::OkStatus();
}

// What a rank has written, for the manifest.
struct Written {
  std::vector<StoredFile> files;
  std::map<std::string, StoredTensor> tensors;  // with its parts; files are indices of `files`
};

absl::Status WriteFile(const std::string& folder, const std::string& name,
                       const std::vector<Piece>& pieces, const safetensors::Metadata& metadata,
                       FileSystem* files, Written& written) {
  if (pieces.empty()) return absl::OkStatus();
  std::map<std::string, const Piece*> by_key;
  std::vector<TensorEntry> entries;
  for (const Piece& piece : pieces) {
    TensorEntry entry;
    entry.name = piece.key;
    entry.dtype = piece.encoding->dtype;
    entry.shape = piece.values.sizes().vec();
    if (piece.encoding->width > 1) entry.shape.push_back(piece.encoding->width);
    entries.push_back(std::move(entry));
    by_key.emplace(piece.key, &piece);
  }
  DDP_ASSIGN_OR_RETURN(DataFile file, DataFile::Create(folder, name, entries, metadata, files));
  for (const TensorEntry& entry : entries) {
    const Piece& piece = *by_key.at(entry.name);
    StoredPart stored{written.files.size(), file.header_bytes() + entry.begin, piece.part, {}};
    DDP_RETURN_IF_ERROR(Stream(
        piece.values, [&](const void* data, size_t size) { return file.Append(data, size); }));
    DDP_ASSIGN_OR_RETURN(stored.digests, file.EndTensor());
    StoredTensor& tensor =
        written.tensors
            .emplace(piece.name, StoredTensor{piece.encoding, piece.shape, piece.memory_order, {}})
            .first->second;
    tensor.parts.push_back(std::move(stored));
  }
  DDP_ASSIGN_OR_RETURN(StoredFile stored, file.Finish());
  written.files.push_back(std::move(stored));
  return absl::OkStatus();
}

// The rows of a replicated tensor that this rank writes.
absl::StatusOr<at::Tensor> RowsOf(const Contents::Replicated& tensor, const Box& box) {
  if (tensor.rows == nullptr) return PartOf(tensor.values, box, {});
  for (const auto& [part, values] : tensor.rows->parts) {
    const auto* own = std::get_if<Box>(&part);
    if (own != nullptr && *own == box) return values.detach();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("'", tensor.name, "' has changed since its rows were given to the ranks"));
}

absl::StatusOr<Written> WriteFiles(Contents& contents, const Announced& announced,
                                   const std::string& folder, const Coordinator& ranks,
                                   FileSystem* files) {
  // What other programs can read, at most one box of a tensor; and the rest.
  std::vector<Piece> boxes, rest;
  std::set<std::string> in_boxes;
  const auto add = [&](Piece piece, bool own_file_only) {
    const auto* box = std::get_if<Box>(&piece.part);
    if (box != nullptr && piece.encoding->is_plain && !own_file_only &&
        in_boxes.insert(piece.name).second) {
      piece.key = piece.name;
      boxes.push_back(std::move(piece));
      return;
    }
    const std::string where = ToString({piece.shape, piece.part, piece.memory_order});
    piece.key = absl::StrCat(piece.name, ": ", where);
    rest.push_back(std::move(piece));
  };
  std::map<std::string, const Contents::Replicated*> by_name;
  for (const Contents::Replicated& tensor : contents.replicated) {
    by_name.emplace(tensor.name, &tensor);
  }
  const auto shares = Spread(announced.tensors, announced.loads);
  for (const auto& [index, box] : shares[static_cast<size_t>(ranks.rank())]) {
    const Contents::Replicated& tensor = *by_name.at(announced.names[index]);
    DDP_ASSIGN_OR_RETURN(at::Tensor rows, RowsOf(tensor, box));
    add({"", tensor.name, tensor.encoding, tensor.values.sizes().vec(), {}, box, std::move(rows)},
        /*own_file_only=*/false);
  }
  for (Piece& piece : contents.own) add(std::move(piece), /*own_file_only=*/false);
  for (Piece& piece : contents.of_entries) add(std::move(piece), /*own_file_only=*/true);
  json info = json::object();
  for (const Piece& piece : boxes) {
    info[piece.name][kSavedOffsets] = std::get<Box>(piece.part).offset;
  }
  Written written;
  DDP_RETURN_IF_ERROR(WriteFile(
      folder, FileName(ranks.rank(), /*ranges=*/false), boxes,
      {{kShardingInfo, info.dump()}, {"DCP_VERSION", "1.0"}, {"format", "pt"}}, files, written));
  DDP_RETURN_IF_ERROR(WriteFile(folder, FileName(ranks.rank(), /*ranges=*/true), rest,
                                {{"format", "libtorch_ddp.sharded"}}, files, written));
  return written;
}

std::string Report(const Written& written, const Contents& contents) {
  json files = json::array();
  for (const StoredFile& file : written.files) files.push_back(ToJson(file));
  json tensors = json::object();
  for (const auto& [name, tensor] : written.tensors) tensors[name] = ToJson(tensor);
  return json{
      {"files", std::move(files)}, {"tensors", std::move(tensors)}, {"entries", contents.entries}}
      .dump();
}

absl::Status WriteManifest(const std::vector<std::string>& reports, const Contents& contents,
                           const std::string& folder, FileSystem* files) {
  Manifest manifest;
  manifest.world_size = static_cast<int>(reports.size());
  manifest.state = contents.tree;
  for (const auto& [name, described] : contents.sharded) {
    DDP_ASSIGN_OR_RETURN(StoredTensor tensor, TensorFromJson(described));
    manifest.tensors.emplace(name, std::move(tensor));
  }
  for (const std::string& text : reports) {
    DDP_ASSIGN_OR_RETURN(const json report, ParseJson(text, kFromPeers));
    const size_t before = manifest.files.size();
    for (const json& one : report.at("files")) {
      DDP_ASSIGN_OR_RETURN(StoredFile file, FileFromJson(one));
      manifest.files.push_back(std::move(file));
    }
    for (const auto& [name, one] : report.at("tensors").items()) {
      DDP_ASSIGN_OR_RETURN(StoredTensor tensor, TensorFromJson(one));
      for (StoredPart& part : tensor.parts) part.file += before;
      const auto [known, is_new] = manifest.tensors.emplace(name, tensor);
      if (is_new) continue;
      std::vector<StoredPart>& parts = known->second.parts;
      parts.insert(parts.end(), tensor.parts.begin(), tensor.parts.end());
    }
    if (!report.at("entries").is_null()) manifest.per_rank.push_back(report.at("entries"));
  }
  const std::string text = EncodeManifest(manifest);
  // What is written can be read: parts that do not make up a tensor are found here.
  const absl::StatusOr<Manifest> read = DecodeManifest(text);
  if (!read.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the parts of the ranks do not make up the state: it ", read.status().message()));
  }
  DDP_ASSIGN_OR_RETURN(FileWriter file,
                       FileWriter::Create(absl::StrCat(folder, "/", kManifestFile), files));
  DDP_RETURN_IF_ERROR(file.Append(text));
  return file.Finish();
}

}  // namespace

absl::StatusOr<SpreadPlan> PlanSpread(const State& state, bool edits, const Coordinator& ranks) {
  SpreadPlan plan;
  // What is to be edited may not be fit to be written yet.
  const auto collect = [&]() -> absl::StatusOr<std::string> {
    if (edits) return std::string(kEdits);
    Contents contents;
    DDP_ASSIGN_OR_RETURN(plan.structure, Collect(state, ranks.rank(), contents));
    return plan.structure;
  };
  DDP_ASSIGN_OR_RETURN(
      const Outcomes outcomes,
      GatherOutcomes(ranks, CatchStatus("dividing the state among the ranks", collect)));
  plan.is_whole = std::any_of(outcomes.begin(), outcomes.end(), [](const auto& outcome) {
    return outcome.ok() && *outcome == kEdits;
  });
  if (plan.is_whole) return plan;
  DDP_ASSIGN_OR_RETURN(const Announced announced, AnnouncedIn(outcomes));
  for (size_t i = 0; i < announced.tensors.size(); ++i) {
    const size_t holders = announced.tensors[i].holders.size();
    if (holders == announced.loads.size()) plan.rows.try_emplace(announced.names[i]);
  }
  const auto shares = Spread(announced.tensors, announced.loads);
  for (const auto& [index, box] : shares[static_cast<size_t>(ranks.rank())]) {
    const auto rows = plan.rows.find(announced.names[index]);
    if (rows != plan.rows.end()) rows->second.push_back(box);
  }
  return plan;
}

std::optional<State> SpreadState(State state, bool edits, const SpreadPlan& plan, int rank) {
  if (plan.is_whole) return state;
  if (edits) return std::nullopt;
  const absl::Status divided = CatchStatus("", [&]() -> absl::Status {
    Contents contents;
    DDP_ASSIGN_OR_RETURN(const std::string structure, Collect(state, rank, contents));
    if (structure != plan.structure) return absl::FailedPreconditionError("another structure");
    std::map<std::string, at::Tensor> places;
    for (const Contents::Replicated& tensor : contents.replicated) {
      const auto boxes = plan.rows.find(tensor.name);
      if (tensor.rows != nullptr || boxes == plan.rows.end()) continue;
      // A tensor in a list, or below a key with a slash, has no path of State::sharded.
      const auto found = FindAt(state.root, tensor.path);
      if (!found.ok() || !*found || !(*found)->isTensor()) continue;
      ShardedTensor rows{.global_shape = tensor.values.sizes().vec(),
                         .dtype = tensor.values.scalar_type()};
      for (const Box& box : boxes->second) {
        rows.parts.push_back({box, InOwnMemory(PartOf(tensor.values, box, {}))});
      }
      places.emplace(
          tensor.path,
          at::empty(rows.global_shape, at::TensorOptions().dtype(rows.dtype).device(at::kMeta)));
      state.sharded.emplace(tensor.path, std::move(rows));
    }
    state.root = WithPlaces(state.root, "", places).toGenericDict();
    return absl::OkStatus();
  });
  // What is wrong with the state, Write says, once all ranks know that it has changed.
  if (!divided.ok()) return std::nullopt;
  return state;
}

absl::Status WriteSharded(const State& state, const std::string& folder, const Coordinator& ranks,
                          FileSystem* files) {
  const std::string where = absl::StrCat("writing ", folder);
  Contents contents;
  const auto collect = [&] { return Collect(state, ranks.rank(), contents); };
  DDP_ASSIGN_OR_RETURN(const Outcomes outcomes, GatherOutcomes(ranks, CatchStatus(where, collect)));
  DDP_ASSIGN_OR_RETURN(const Announced announced, AnnouncedIn(outcomes));
  const absl::StatusOr<Written> written =
      CatchStatus(where, [&] { return WriteFiles(contents, announced, folder, ranks, files); });
  DDP_RETURN_IF_ERROR(ranks.Agree(written.status()));
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> reports,
                       ranks.Gather(Report(*written, contents)));
  if (ranks.rank() != 0) return absl::OkStatus();
  return CatchStatus(where, [&] { return WriteManifest(reports, contents, folder, files); });
}

}  // namespace ddp::checkpoint::sharded
