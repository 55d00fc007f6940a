// The format `safetensors`: a folder as other programs expect it, with all that a run resumes from.
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/log/absl_log.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status.h"
#include "checkpoint/consolidate.h"
#include "checkpoint/format.h"
#include "checkpoint/safetensors/checkpoint_folder.h"
#include "checkpoint/safetensors/header.h"
#include "checkpoint/safetensors/plan.h"
#include "checkpoint/safetensors/shard_name.h"
#include "checkpoint/safetensors/tensor_file.h"

namespace ddp::checkpoint::safetensors {
namespace {

// What the Python library and transformers write into each file: its tensors are torch's.
constexpr char kFormatKey[] = "format";
constexpr char kFormat[] = "pt";

// Prefixes the path, unless the message contains it.
absl::Status Named(const std::string& path, const absl::Status& status) {
  if (status.ok() || absl::StrContains(status.message(), path)) return status;
  return absl::Status(status.code(), absl::StrCat(path, " ", status.message()));
}

// That a file is one of several, and what to give instead; empty if it is not.
std::string NoticeOfPart(const std::string& path) {
  const std::optional<ShardName> shard = ParseShardName(path.substr(path.rfind('/') + 1));
  std::error_code error;
  if (!shard.has_value() || shard->of == 1 || std::filesystem::is_directory(path, error)) return "";
  return absl::StrCat(path, " is part ", shard->number, " of ", shard->of,
                      " of a model, without the tensors of the others: to read all, name the "
                      "folder, ",
                      DirectoryOf(path));
}

class SafetensorsFormat : public Format {
 public:
  explicit SafetensorsFormat(const FormatOptions& options) : options_(options) {}

  absl::string_view name() const override { return "safetensors"; }
  absl::string_view suffix() const override { return ".safetensors"; }
  bool all_ranks_write() const override { return false; }

  absl::Status Write(const State& state, const std::string& path, TensorSource* source) override {
    if (!state.sharded.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("format safetensors holds whole tensors only, and '",
                       state.sharded.begin()->first, "' is in parts; gather it first"));
    }
    if (!state.per_rank.empty()) {
      return absl::InvalidArgumentError(
          "format safetensors is written by one rank, and the state has entries of single ranks; "
          "gather them first");
    }
    return CatchStatus(absl::StrCat("writing ", path),
                       [&] { return WriteFolder(state, path, source); });
  }

  absl::StatusOr<State> Read(const std::string& path, const ReadRequest& request) override {
    return CatchStatus(absl::StrCat("reading ", path), [&]() -> absl::StatusOr<State> {
      DDP_ASSIGN_OR_RETURN(CheckpointFolder folder, Open(path, request.left_out));
      if (!folder.is_verified()) {
        ABSL_LOG(WARNING) << path
                          << " is unverified: it has no checksums, so damage in it goes unnoticed";
      }
      const std::string part = request.meta ? "" : NoticeOfPart(path);
      if (!part.empty()) ABSL_LOG(WARNING) << part;
      absl::StatusOr<State> state = folder.Read(WithPerRankEntries(request));
      if (!state.ok()) return Named(path, state.status());
      TakePerRank(*state, request.per_rank, options_.ranks);
      return state;
    });
  }

  absl::Status CheckComplete(const std::string& path) override {
    return CatchStatus(absl::StrCat("reading ", path), [&]() -> absl::Status {
      DDP_ASSIGN_OR_RETURN(CheckpointFolder folder, Open(path, nullptr));
      return Named(path, folder.Check());
    });
  }

 private:
  absl::StatusOr<CheckpointFolder> Open(const std::string& path,
                                        std::vector<std::string>* left_out) const {
    absl::StatusOr<CheckpointFolder> folder = CheckpointFolder::Open(path, left_out);
    if (!folder.ok()) return Named(path, folder.status());
    if (!folder->is_verified() && !options_.accept_unverified) {
      return absl::FailedPreconditionError(
          absl::StrCat(path,
                       " is unverified: another program wrote it, without checksums; a run does "
                       "not resume from it, but can take its weights"));
    }
    return folder;
  }

  // The caller fsyncs the folder, as where all ranks write.
  absl::Status WriteFolder(const State& state, const std::string& path, TensorSource* source) {
    DDP_ASSIGN_OR_RETURN(Plan plan, PlanOf(state.root, source));
    Metadata model = std::move(plan.model.aliases);
    model[kFormatKey] = kFormat;
    model[kVersionKey] = kVersion;
    Metadata training = {{kFormatKey, kFormat}, {kVersionKey, kVersion}};
    training[kTreeKey] = plan.tree.dump();
    // Errors that there may be, before anything is written.
    DDP_RETURN_IF_ERROR(WriteHeader(plan.model.entries, model).status());
    DDP_RETURN_IF_ERROR(WriteHeader(plan.training.entries, training).status());

    FileSystem* const files = options_.files;
    if (files->Mkdir(path.c_str(), 0777) != 0) return FileError(errno, "making folder", path);
    const auto file = [&](absl::string_view name) { return absl::StrCat(path, "/", name); };
    DDP_ASSIGN_OR_RETURN(training[kModelKey],
                         WriteTensors(plan.model, std::move(model), file(kModelFile), source));
    DDP_ASSIGN_OR_RETURN(FileWriter index, FileWriter::Create(file(kIndexFile), files));
    DDP_RETURN_IF_ERROR(index.Append(IndexText(plan.model.entries)));
    DDP_RETURN_IF_ERROR(index.Finish());
    return WriteTensors(plan.training, std::move(training), file(kTrainingFile), source).status();
  }

  // One tensor at a time is copied, those only that are not row-major or not on the CPU.
  absl::StatusOr<std::string> WriteTensors(PlannedFile& planned, Metadata metadata,
                                           const std::string& path, TensorSource* source) const {
    at::Tensor bytes;
    return WriteTensorFile(
        path, planned.entries, std::move(metadata),
        [&](const TensorEntry& entry) -> absl::StatusOr<const void*> {
          bytes = at::Tensor();  // its memory is there for the next
          at::Tensor tensor = planned.tensors.at(entry.name);
          if (tensor.is_meta()) {
            DDP_ASSIGN_OR_RETURN(tensor, source->Get(tensor.storage()));
          }
          bytes = RowMajor(tensor);
          return bytes.const_data_ptr();
        },
        options_.files);
  }

  FormatOptions options_;
};

std::unique_ptr<Format> Create(const FormatOptions& options) {
  return std::make_unique<SafetensorsFormat>(options);
}

// A folder as transformers writes it, also without its index, or ours under another name.
bool IsFolderOfThisFormat(const std::string& path) {
  std::error_code error;
  const auto has = [&](const char* file) {
    return std::filesystem::is_regular_file(absl::StrCat(path, "/", file), error);
  };
  return absl::c_any_of(std::array{kTrainingFile, kModelFile, kIndexFile}, has) ||
         !ShardsIn(path).empty();
}

const Registration<FormatRegistry> kSafetensors("safetensors",
                                                FormatEntry{.create = &Create,
                                                            .recognises = &IsFolderOfThisFormat});

}  // namespace
}  // namespace ddp::checkpoint::safetensors
