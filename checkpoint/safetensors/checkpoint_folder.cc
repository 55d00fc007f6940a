#include "checkpoint/safetensors/checkpoint_folder.h"

#include <ATen/Functions.h>
#include <ATen/core/ivalue_inl.h>
#include <limits.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <numeric>
#include <set>
#include <tuple>
#include <variant>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/json.h"
#include "base/status.h"
#include "base/utf8.h"
#include "checkpoint/foreign.h"
#include "checkpoint/safetensors/shard_name.h"
#include "checkpoint/safetensors/torch_dtype.h"
#include "checkpoint/tree_json.h"

namespace ddp::checkpoint::safetensors {
namespace {

using nlohmann::json;

// Whether an index may name this file: not out of its folder, nor what the system would cut or
// refuse.
bool IsFileName(absl::string_view name) {
  return absl::EndsWith(name, ".safetensors") && name.size() <= NAME_MAX &&
         name.find_first_of(absl::string_view("/\0", 2)) == absl::string_view::npos;
}

// Also of what an error keeps from being seen, and of a link that leads nowhere: opening it reports
// the error, which is no damage.
bool Exists(const std::string& path) {
  struct stat info;
  return ::lstat(path.c_str(), &info) == 0 || (errno != ENOENT && errno != ENOTDIR);
}

absl::Status CheckVersion(const TensorFile& file) {
  const auto version = file.metadata().find(kVersionKey);
  if (version == file.metadata().end()) {
    return absl::DataLossError(absl::StrCat(file.path(), " lacks its version"));
  }
  if (version->second == kVersion) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(file.path(), " has version '", Printable(version->second),
                   "' of our checkpoints; this program reads version ", kVersion));
}

// How much else may be read with elements that are not consecutive: one read is cheaper than many.
constexpr int64_t kMostReadPerNeeded = 2;
constexpr int64_t kSmallRead = 64 << 10;  // bytes

constexpr size_t kMostLeftOut = 1000;

// A level of dicts takes three of JSON: the object, its list, and the pair.
constexpr size_t kTreeDepth = 3 * (static_cast<size_t>(kMaxTreeDepth) + 1);

// Elements from the first to the last one of these sizes, none of which is 0, and strides.
int64_t SpanOf(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  int64_t span = 1;
  for (size_t i = 0; i < sizes.size(); ++i) span += (sizes[i] - 1) * strides[i];
  return span;
}

// Position of a box's first element.
int64_t BeginOf(const Box& box, const std::vector<int64_t>& strides) {
  return std::inner_product(box.offset.begin(), box.offset.end(), strides.begin(), int64_t{0});
}

absl::Status Refuse(absl::string_view path, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("cannot give '", path, "', which ", what));
}

}  // namespace

std::string IndexText(const std::vector<TensorEntry>& tensors) {
  json files = json::object();
  uint64_t size = 0;
  for (const TensorEntry& tensor : tensors) {
    files[tensor.name] = kModelFile;
    size += tensor.size();
  }
  json index = json::object();
  index["metadata"] = json::object();
  index["metadata"]["total_size"] = size;
  index["weight_map"] = std::move(files);
  return absl::StrCat(index.dump(2), "\n");
}

absl::StatusOr<CheckpointFolder> CheckpointFolder::Open(const std::string& path,
                                                        std::vector<std::string>* left_out) {
  CheckpointFolder folder(path);
  struct stat info;
  if (::stat(path.c_str(), &info) != 0) return FileError(errno, "opening", path);
  if (!S_ISDIR(info.st_mode)) {
    DDP_ASSIGN_OR_RETURN(TensorFile file, TensorFile::Open(path));
    if (file.metadata().contains(kTreeKey)) {
      return folder.Damaged("is the training state of a checkpoint; name its folder");
    }
    if (file.is_verified()) DDP_RETURN_IF_ERROR(CheckVersion(file));
    DDP_RETURN_IF_ERROR(folder.AddModelFile(std::move(file)));
    folder.MakeTree(left_out);
  } else if (Exists(folder.PathOf(kTrainingFile))) {
    DDP_RETURN_IF_ERROR(folder.OpenOwn());
  } else {
    DDP_RETURN_IF_ERROR(folder.OpenForeign(left_out));
  }
  return folder;
}

absl::Status CheckpointFolder::Damaged(absl::string_view what) const {
  return absl::DataLossError(absl::StrCat(path_, " ", what));
}

std::string CheckpointFolder::PathOf(absl::string_view file) const {
  return absl::StrCat(path_, "/", file);
}

bool CheckpointFolder::is_verified() const {
  return std::all_of(files_.begin(), files_.end(),
                     [](const TensorFile& file) { return file.is_verified(); });
}

absl::StatusOr<TensorFile> CheckpointFolder::OpenPart(absl::string_view file) const {
  absl::StatusOr<TensorFile> opened = TensorFile::Open(PathOf(file));
  if (!absl::IsNotFound(opened.status())) return opened;
  return Lacks(file);
}

// A link that leads nowhere, as to a disk that is not mounted, is no damage.
absl::Status CheckpointFolder::Lacks(absl::string_view file) const {
  std::error_code ignored;
  if (std::filesystem::is_symlink(std::filesystem::symlink_status(PathOf(file), ignored))) {
    return absl::FailedPreconditionError(
        absl::StrCat(Printable(PathOf(file)), " is a symbolic link to what is not there"));
  }
  return Damaged(absl::StrCat("lacks its file ", Printable(file)));
}

absl::StatusOr<std::string> CheckpointFolder::ReadIndex() const {
  const absl::StatusOr<FileReader> reader = FileReader::Open(PathOf(kIndexFile));
  if (absl::IsNotFound(reader.status()) || absl::IsFailedPrecondition(reader.status())) {
    return Lacks(kIndexFile);
  }
  DDP_RETURN_IF_ERROR(reader.status());
  DDP_RETURN_IF_ERROR(RefusePointer(*reader));
  if (reader->size() > kMaxHeader) {
    return absl::DataLossError(
        absl::StrCat(reader->path(), " is longer than the index of a checkpoint"));
  }
  std::string text(reader->size(), '\0');
  DDP_RETURN_IF_ERROR(reader->ReadAt(0, text.data(), text.size()));
  return text;
}

absl::Status CheckpointFolder::OpenOwn() {
  DDP_ASSIGN_OR_RETURN(TensorFile training, OpenPart(kTrainingFile));
  if (!training.is_verified()) {
    return absl::DataLossError(absl::StrCat(training.path(), " is damaged: it has no checksums"));
  }
  DDP_RETURN_IF_ERROR(CheckVersion(training));
  const auto tree = training.metadata().find(kTreeKey);
  const auto digest = training.metadata().find(kModelKey);
  if (tree == training.metadata().end() || digest == training.metadata().end()) {
    return absl::DataLossError(absl::StrCat(training.path(), " lacks its values"));
  }
  absl::StatusOr<json> values = ParseJson(tree->second, {.depth = kTreeDepth});
  if (!values.ok()) {
    return absl::DataLossError(
        absl::StrCat(training.path(), " has damaged values: its JSON ", values.status().message()));
  }
  tree_ = *std::move(values);
  DDP_ASSIGN_OR_RETURN(TensorFile model, OpenPart(kModelFile));
  if (model.digest() != digest->second) {
    return absl::DataLossError(
        absl::StrCat(model.path(), " is damaged, or not the one that was saved with ",
                     kTrainingFile, "; without that file the folder is one of weights alone"));
  }
  DDP_ASSIGN_OR_RETURN(const std::string index, ReadIndex());
  if (index != IndexText(model.tensors())) {
    return absl::DataLossError(
        absl::StrCat(PathOf(kIndexFile), " is damaged: it does not describe ", kModelFile));
  }
  DDP_RETURN_IF_ERROR(AddModelFile(std::move(model)));
  training_ = files_.size();
  files_.push_back(std::move(training));
  return absl::OkStatus();
}

absl::Status CheckpointFolder::OpenForeign(std::vector<std::string>* left_out) {
  if (!Exists(PathOf(kModelFile))) {
    DDP_RETURN_IF_ERROR(Exists(PathOf(kIndexFile)) ? OpenIndexed() : OpenShards());
    MakeTree(left_out);
    return absl::OkStatus();
  }
  DDP_ASSIGN_OR_RETURN(TensorFile model, OpenPart(kModelFile));
  if (model.is_verified()) {
    return Damaged(absl::StrCat("lacks its file ", kTrainingFile, "; for the weights alone name ",
                                model.path()));
  }
  DDP_RETURN_IF_ERROR(AddModelFile(std::move(model)));
  MakeTree(left_out);
  return absl::OkStatus();
}

// Without their index their names say whether all are there.
absl::Status CheckpointFolder::OpenShards() {
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> files, AllShards(path_));
  if (files.empty()) {
    return Damaged(absl::StrCat("is a folder without ", kModelFile, " and ", kIndexFile));
  }
  for (const std::string& file : files) {
    DDP_ASSIGN_OR_RETURN(TensorFile part, OpenPart(file));
    DDP_RETURN_IF_ERROR(AddModelFile(std::move(part)));
  }
  return absl::OkStatus();
}

absl::Status CheckpointFolder::OpenIndexed() {
  const std::string path = PathOf(kIndexFile);
  const auto damaged = [&](absl::string_view what) {
    return absl::DataLossError(absl::StrCat(path, " ", what));
  };
  DDP_ASSIGN_OR_RETURN(const std::string text, ReadIndex());
  const absl::StatusOr<json> index = ParseJson(text);
  if (!index.ok()) return damaged(index.status().message());
  if (!index->is_object() || !index->contains("weight_map") ||
      !index->at("weight_map").is_object()) {
    return damaged("has no weight_map");
  }
  std::set<std::string> files;
  for (const auto& [name, file] : index->at("weight_map").items()) {
    if (!file.is_string() || !IsFileName(file.get_ref<const std::string&>())) {
      return damaged(absl::StrCat("names no file of this folder for '", Printable(name), "'"));
    }
    files.insert(file.get<std::string>());
  }
  for (const std::string& file : files) {
    DDP_ASSIGN_OR_RETURN(TensorFile part, OpenPart(file));
    DDP_RETURN_IF_ERROR(AddModelFile(std::move(part)));
  }
  for (const auto& [name, file] : index->at("weight_map").items()) {
    const auto found = model_.find(name);
    if (found == model_.end() ||
        files_[found->second.first].path() != PathOf(file.get<std::string>())) {
      return damaged(absl::StrCat("names tensor '", Printable(name), "' of file ",
                                  Printable(file.get<std::string>()), ", which lacks it"));
    }
  }
  return absl::OkStatus();
}

// Names of one tensor besides its own are in the metadata, as safetensors.torch.save_model writes.
absl::Status CheckpointFolder::AddModelFile(TensorFile added) {
  files_.push_back(std::move(added));
  const TensorFile& file = files_.back();
  const size_t index = files_.size() - 1;
  for (const TensorEntry& tensor : file.tensors()) {
    if (!model_.emplace(tensor.name, std::pair(index, &tensor)).second) {
      return Damaged(absl::StrCat("has tensor '", Printable(tensor.name), "' in two files"));
    }
  }
  for (const auto& [alias, name] : file.metadata()) {
    const TensorEntry* const tensor = file.Find(name);
    if (tensor != nullptr && alias != "format" && !absl::StartsWith(alias, kOwnPrefix)) {
      model_.emplace(alias, std::pair(index, tensor));
    }
  }
  return absl::OkStatus();
}

// {"model": {name: tensor}}
void CheckpointFolder::MakeTree(std::vector<std::string>* left_out) {
  const auto pair = [](const std::string& key, json value) {
    json both = json::array();
    both.push_back(key);
    both.push_back(std::move(value));
    return both;
  };
  const auto only = [](const char* kind, json value) {
    json object = json::object();
    object[kind] = std::move(value);
    return object;
  };
  json tensors = json::array();
  for (const auto& [name, place] : model_) {
    const Dtype dtype = place.second->dtype;
    if (left_out != nullptr && !ScalarTypeOf(dtype).has_value()) {
      if (left_out->size() < kMostLeftOut) {
        left_out->push_back(absl::StrCat("'model/", Printable(name), "' has element type ",
                                         DtypeName(dtype), ", which LibTorch lacks"));
      }
      continue;
    }
    tensors.push_back(pair(name, only("tensor", absl::StrCat(kModelFile, "/", name))));
  }
  json root = json::array();
  root.push_back(pair("model", only("dict", std::move(tensors))));
  tree_ = only("dict", std::move(root));
}

// `reference` is a tensor's text in the tree.
absl::StatusOr<CheckpointFolder::Found> CheckpointFolder::Find(const std::string& reference) const {
  Found found;
  absl::string_view name = reference;
  if (absl::ConsumePrefix(&name, absl::StrCat(kModelFile, "/"))) {
    const auto known = model_.find(std::string(name));
    if (known != model_.end()) std::tie(found.file, found.entry) = known->second;
  } else if (training_.has_value() &&
             absl::ConsumePrefix(&name, absl::StrCat(kTrainingFile, "/"))) {
    found.file = *training_;
    found.entry = files_[*training_].Find(name);
  }
  if (found.entry == nullptr) {
    return Damaged(absl::StrCat("lacks tensor '", Printable(reference), "'"));
  }
  const TensorEntry& entry = *found.entry;
  const std::optional<c10::ScalarType> dtype = ScalarTypeOf(entry.dtype);
  if (!dtype.has_value()) {
    return absl::UnimplementedError(absl::StrCat(path_, ": tensor '", Printable(entry.name),
                                                 "' has element type ", DtypeName(entry.dtype),
                                                 ", which LibTorch lacks"));
  }
  const auto sizes = TorchShape(entry.dtype, entry.shape);
  if (!sizes.has_value()) {
    return Damaged(absl::StrCat("has tensor '", Printable(entry.name),
                                "' of 4-bit numbers whose last size is odd"));
  }
  found.sizes = *sizes;
  found.dtype = *dtype;
  return found;
}

// The value that `tree` describes; with `only_check`, None for tensors.
absl::StatusOr<c10::IValue> CheckpointFolder::Value(const json& tree, bool only_check) {
  return TreeFromJson(tree, [&](const std::string& name) -> absl::StatusOr<c10::IValue> {
    DDP_ASSIGN_OR_RETURN(const Found found, Find(name));
    if (only_check) return c10::IValue();
    DDP_ASSIGN_OR_RETURN(at::Tensor tensor, ReadWhole(found));
    return c10::IValue(std::move(tensor));
  });
}

absl::Status CheckpointFolder::Check() {
  DDP_ASSIGN_OR_RETURN(const c10::IValue root, Value(tree_, true));
  return root.isGenericDict() ? absl::OkStatus() : Damaged("holds no dict at its top");
}

absl::StatusOr<State> CheckpointFolder::Read(const ReadRequest& request) {
  DDP_RETURN_IF_ERROR(CheckRequest(request));
  meta_ = request.meta || request.only_check;
  only_check_ = request.only_check;
  if (request.parts.empty()) {
    DDP_ASSIGN_OR_RETURN(const c10::IValue root, Value(tree_, false));
    if (!root.isGenericDict()) return Damaged("holds no dict at its top");
    return State{.root = root.toGenericDict()};
  }
  State state;
  std::set<std::string> given;
  DDP_ASSIGN_OR_RETURN(const c10::IValue root, Below(tree_, "", request, state, given));
  for (const auto& [path, wanted] : request.parts) {
    if (!wanted.optional && !given.contains(path)) {
      return Refuse(path, "is not in the checkpoint");
    }
  }
  state.root = root.toGenericDict();
  return state;
}

// The requested values in the dict `tree`, with the dicts above them; `prefix` is its path with a
// trailing slash.
absl::StatusOr<c10::IValue> CheckpointFolder::Below(const json& tree, const std::string& prefix,
                                                    const ReadRequest& request, State& state,
                                                    std::set<std::string>& given) {
  const json* const pairs = MemberOf(tree, "dict");
  if (pairs == nullptr || !ArePairs(*pairs)) {
    return Refuse(absl::StripSuffix(prefix, "/"), "is no dict that could be read in part");
  }
  c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
  for (const json& pair : *pairs) {
    DDP_ASSIGN_OR_RETURN(const c10::IValue key, Value(pair[0], true));
    const std::string path =
        absl::StrCat(prefix, key.isInt() ? absl::StrCat(key.toInt()) : key.toStringRef());
    const auto wanted = request.parts.find(path);
    c10::IValue value;
    if (wanted != request.parts.end()) {
      given.insert(path);
      if (!wanted->second.whole() && !(request.all_else && !Has(pair[1], wanted->second))) {
        DDP_RETURN_IF_ERROR(AddParts(pair[1], path, wanted->second, state));
        continue;
      }
      DDP_ASSIGN_OR_RETURN(value, Value(pair[1], false));
    } else {
      if (LeadsOn(request, path, MemberOf(pair[1], "dict") != nullptr)) {
        DDP_ASSIGN_OR_RETURN(value, Below(pair[1], absl::StrCat(path, "/"), request, state, given));
      } else if (request.all_else) {
        DDP_ASSIGN_OR_RETURN(value, Value(pair[1], false));
      } else {
        continue;
      }
    }
    dict.insert_or_assign(key, std::move(value));
  }
  return c10::IValue(std::move(dict));
}

// Whether `tree` is a tensor that has all of the parts.
bool CheckpointFolder::Has(const json& tree, const Wanted& wanted) const {
  const json* const name = MemberOf(tree, "tensor");
  if (name == nullptr || !name->is_string()) return false;
  const absl::StatusOr<Found> found = Find(name->get<std::string>());
  return found.ok() && Fits(wanted, found->sizes);
}

absl::Status CheckpointFolder::AddParts(const json& tree, const std::string& path,
                                        const Wanted& wanted, State& state) {
  const json* const name = MemberOf(tree, "tensor");
  if (name == nullptr || !name->is_string()) return Refuse(path, "is no tensor that could be cut");
  DDP_ASSIGN_OR_RETURN(const Found found, Find(name->get<std::string>()));
  const std::string what = absl::StrCat("cannot give '", path, "'");
  Shard shard{found.sizes, FlatRange{}, wanted.memory_order};
  DDP_RETURN_IF_ERROR(Annotate(CheckPart(shard), what));
  ShardedTensor tensor{
      .global_shape = found.sizes, .dtype = found.dtype, .memory_order = wanted.memory_order};
  for (const Part& part : wanted.parts) {
    shard.part = part;
    DDP_RETURN_IF_ERROR(Annotate(CheckPart(shard), what));
    DDP_ASSIGN_OR_RETURN(at::Tensor values, ReadPart(found, part, wanted.memory_order));
    tensor.parts.push_back({part, std::move(values)});
  }
  state.sharded.emplace(path, std::move(tensor));
  return absl::OkStatus();
}

// Fills `to`, which is contiguous and as wide as the tensor's type, with the elements from `begin`
// on, in the order of the file.
absl::Status CheckpointFolder::ReadElements(const Found& found, int64_t begin,
                                            const at::Tensor& to) {
  const uint64_t width = to.element_size();
  return files_[found.file].Read(*found.entry, static_cast<uint64_t>(begin) * width,
                                 static_cast<uint64_t>(to.numel()) * width, to.data_ptr());
}

absl::StatusOr<at::Tensor> CheckpointFolder::ReadWhole(const Found& found) {
  at::Tensor& whole = whole_[found.entry];
  if (!whole.defined()) {
    const auto device = meta_ ? at::kMeta : at::kCPU;
    at::Tensor read = at::empty(found.sizes, at::TensorOptions().dtype(found.dtype).device(device));
    if (!meta_) DDP_RETURN_IF_ERROR(ReadElements(found, 0, read));
    if (only_check_) DDP_RETURN_IF_ERROR(CheckData(found));
    whole = std::move(read);
  }
  return whole;
}

// Reads the tensor piece by piece.
absl::Status CheckpointFolder::CheckData(const Found& found) {
  constexpr uint64_t kMost = 8 << 20;  // whole blocks of checksums
  const uint64_t size = found.entry->size();
  std::vector<char> piece(std::min(kMost, size));
  for (uint64_t at = 0; at < size; at += kMost) {
    DDP_RETURN_IF_ERROR(
        files_[found.file].Read(*found.entry, at, std::min(kMost, size - at), piece.data()));
  }
  return absl::OkStatus();
}

// Fills `to` with the elements that lie at `begin` of the file's tensor with these strides: in one
// read with what is between them, if that is little, else dimension by dimension.
absl::Status CheckpointFolder::Fill(const Found& found, const at::Tensor& to, int64_t begin,
                                    std::vector<int64_t> strides) {
  if (to.numel() == 0) return absl::OkStatus();
  const std::vector<int64_t> sizes = to.sizes().vec();
  const int64_t span = SpanOf(sizes, strides);
  if (span <= kMostReadPerNeeded * to.numel() ||
      span * static_cast<int64_t>(to.element_size()) <= kSmallRead) {
    const at::Tensor around = at::empty({span}, to.options());
    DDP_RETURN_IF_ERROR(ReadElements(found, begin, around));
    to.copy_(around.as_strided(sizes, strides));
    return absl::OkStatus();
  }
  size_t widest = 0;
  for (size_t i = 1; i < sizes.size(); ++i) {
    if (sizes[i] > 1 && (sizes[widest] == 1 || strides[i] > strides[widest])) widest = i;
  }
  const int64_t stride = strides[widest];
  strides.erase(strides.begin() + static_cast<ptrdiff_t>(widest));
  for (int64_t i = 0; i < sizes[widest]; ++i) {
    DDP_RETURN_IF_ERROR(
        Fill(found, to.select(static_cast<int64_t>(widest), i), begin + i * stride, strides));
  }
  return absl::OkStatus();
}

absl::StatusOr<at::Tensor> CheckpointFolder::ReadPart(const Found& found, const Part& part,
                                                      const std::vector<int64_t>& memory_order) {
  const std::vector<int64_t>& sizes = found.sizes;
  const at::Tensor read = at::empty(LocalShape({sizes, part, memory_order}),
                                    at::TensorOptions().dtype(BitsTypeOf(found.dtype)));
  const auto* const range = std::get_if<FlatRange>(&part);
  if (range == nullptr || NormalOrder(memory_order).empty()) {
    if (const std::optional<FlatRange> consecutive = FlatRangeOf({sizes, part})) {
      DDP_RETURN_IF_ERROR(ReadElements(found, consecutive->begin, read));
      return read.view(found.dtype);
    }
  }
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) {
    strides[i - 1] = strides[i] * std::max<int64_t>(sizes[i], 1);
  }
  if (range == nullptr) {
    const Box& box = std::get<Box>(part);
    DDP_RETURN_IF_ERROR(Fill(found, read, BeginOf(box, strides), strides));
    return read.view(found.dtype);
  }
  // In the order of dimensions that the range counts in.
  std::vector<int64_t> ordered_sizes, ordered_strides;
  for (const int64_t dimension : memory_order) {
    ordered_sizes.push_back(sizes[static_cast<size_t>(dimension)]);
    ordered_strides.push_back(strides[static_cast<size_t>(dimension)]);
  }
  int64_t done = 0;
  for (const Box& piece : BoxesOf(ordered_sizes, *range)) {
    const int64_t elements =
        std::accumulate(piece.sizes.begin(), piece.sizes.end(), int64_t{1}, std::multiplies<>());
    DDP_RETURN_IF_ERROR(Fill(found, read.narrow(0, done, elements).view(piece.sizes),
                             BeginOf(piece, ordered_strides), ordered_strides));
    done += elements;
  }
  return read.view(found.dtype);
}

}  // namespace ddp::checkpoint::safetensors
