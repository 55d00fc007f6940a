// An open checkpoint of format safetensors: a folder, or a single file.
//
//   DDP_ASSIGN_OR_RETURN(CheckpointFolder folder,
//   CheckpointFolder::Open("runs/a/epoch_3.safetensors")); DDP_ASSIGN_OR_RETURN(State state,
//   ReadTree(folder.tree(), folder));
//
// What may be opened:
//
//   a folder of ours        model.safetensors, model.safetensors.index.json, training_state
//   another's folder        model.safetensors, or model.safetensors.index.json and the files that
//   it
//                           names, as transformers writes them; or, without an index, all of
//                           model-00001-of-00002.safetensors, …; gives {"model": {name: tensor}}
//   a file                  of ours or another's; gives {"model": {name: tensor}}
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/format.h"
#include "checkpoint/parts.h"
#include "checkpoint/safetensors/header.h"
#include "checkpoint/safetensors/plan.h"
#include "checkpoint/safetensors/tensor_file.h"
#include "checkpoint/state.h"
#include "nlohmann/json.hpp"

namespace ddp::checkpoint::safetensors {

inline constexpr char kIndexFile[] = "model.safetensors.index.json";

// Keys of the metadata.
inline constexpr char kVersionKey[] = "ddp.version";   // "1", in both files
inline constexpr char kModelKey[] = "ddp.model_xxh3";  // training state: the model file's digest
inline constexpr char kTreeKey[] = "ddp.state";        // training state: see tree_json.h
inline constexpr char kVersion[] = "1";

// The text of kIndexFile for a model in the one file kModelFile.
std::string IndexText(const std::vector<TensorEntry>& tensors);

// Thread-compatible. Movable.
class CheckpointFolder {
 public:
  // Reads what describes the tensors, and checks it. NotFound: there is nothing at `path`.
  // DataLoss: damaged, incomplete or of another format. FailedPrecondition: written by a newer
  // version. `left_out` is ReadRequest's, for tensors of types that torch lacks.
  static absl::StatusOr<CheckpointFolder> Open(const std::string& path,
                                               std::vector<std::string>* left_out = nullptr);

  // Whether all tensors have checksums.
  bool is_verified() const;

  // Reads as Format::Read does. Names of one tensor share it. A part
  // is read with at most twice its size of other elements, plus 64 KiB for each piece, and the
  // blocks of checksums in which these lie. Unimplemented names a tensor of a type that torch
  // lacks.
  absl::StatusOr<State> Read(const ReadRequest& request);

  // Whether Read would find all tensors, without reading them.
  absl::Status Check();

 private:
  // A tensor's file, as an index into files_, and its place there.
  struct Found {
    size_t file = 0;
    const TensorEntry* entry = nullptr;
    // Sizes and dtype are as torch sees them.
    std::vector<int64_t> sizes = {};
    c10::ScalarType dtype = c10::ScalarType::Undefined;
  };

  explicit CheckpointFolder(std::string path) : path_(std::move(path)) {}

  absl::Status Damaged(absl::string_view what) const;
  absl::Status Lacks(absl::string_view file) const;
  std::string PathOf(absl::string_view file) const;
  absl::StatusOr<TensorFile> OpenPart(absl::string_view file) const;
  absl::StatusOr<std::string> ReadIndex() const;
  absl::Status OpenOwn();
  absl::Status OpenForeign(std::vector<std::string>* left_out);
  absl::Status OpenIndexed();
  absl::Status OpenShards();
  absl::Status AddModelFile(TensorFile file);
  void MakeTree(std::vector<std::string>* left_out);
  absl::StatusOr<Found> Find(const std::string& name) const;
  absl::StatusOr<c10::IValue> Value(const nlohmann::json& tree, bool only_check);
  absl::StatusOr<c10::IValue> Below(const nlohmann::json& tree, const std::string& prefix,
                                    const ReadRequest& request, State& state,
                                    std::set<std::string>& given);
  bool Has(const nlohmann::json& tree, const Wanted& wanted) const;
  absl::Status AddParts(const nlohmann::json& tree, const std::string& path, const Wanted& wanted,
                        State& state);
  absl::StatusOr<at::Tensor> ReadWhole(const Found& found);
  absl::StatusOr<at::Tensor> ReadPart(const Found& found, const Part& part,
                                      const std::vector<int64_t>& memory_order);
  absl::Status CheckData(const Found& found);
  absl::Status ReadElements(const Found& found, int64_t begin, const at::Tensor& to);
  absl::Status Fill(const Found& found, const at::Tensor& to, int64_t begin,
                    std::vector<int64_t> strides);

  std::string path_;
  std::vector<TensorFile> files_;   // the model's; then the training state, if there is one
  std::optional<size_t> training_;  // its index
  std::map<std::string, std::pair<size_t, const TensorEntry*>> model_;  // aliases too
  std::map<const TensorEntry*, at::Tensor> whole_;
  bool meta_ = false;        // what whole_ gets
  bool only_check_ = false;  // ReadRequest's
  nlohmann::json tree_;
};

}  // namespace ddp::checkpoint::safetensors
