#include "checkpoint/manager.h"

#include <ATen/core/ivalue_inl.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <utility>
#include <vector>

#include "absl/log/absl_log.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/status.h"

namespace ddp::checkpoint {
namespace {

// A file of the folder that is named as a checkpoint is: "epoch_N" and a format's suffix.
struct Candidate {
  int64_t epoch;
  std::string file;
};

// Of the linked formats, the one whose suffix `path` ends in; null if there is none.
std::unique_ptr<Format> FormatOf(absl::string_view path) {
  for (const std::string& name : FormatRegistry::Names()) {
    absl::StatusOr<std::unique_ptr<Format>> format = CreateFormat(name);
    if (format.ok() && absl::EndsWith(path, (*format)->suffix())) return *std::move(format);
  }
  return nullptr;
}

// N of "epoch_N"; nullopt for any other name.
std::optional<int64_t> EpochOf(absl::string_view name) {
  if (!absl::ConsumePrefix(&name, "epoch_") || name.empty() ||
      !std::all_of(name.begin(), name.end(), absl::ascii_isdigit)) {
    return std::nullopt;
  }
  int64_t epoch = 0;
  return absl::SimpleAtoi(name, &epoch) ? std::optional(epoch) : std::nullopt;
}

// Oldest first; those that end in one of `suffixes`.
absl::StatusOr<std::vector<Candidate>> Candidates(const std::string& directory,
                                                  const std::vector<std::string>& suffixes) {
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> files, ListDirectory(directory));
  std::vector<Candidate> found;
  for (const std::string& file : files) {
    for (absl::string_view suffix : suffixes) {
      absl::string_view name = file;
      if (!absl::ConsumeSuffix(&name, suffix)) continue;
      if (std::optional<int64_t> epoch = EpochOf(name)) {
        found.push_back({*epoch, absl::StrCat(directory, "/", file)});
        break;
      }
    }
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Candidate& a, const Candidate& b) { return a.epoch < b.epoch; });
  return found;
}

absl::Status CheckName(absl::string_view name) {
  if (name.empty() || name[0] == '.' || absl::StrContains(name, '/')) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", name, "' is no name for a checkpoint: not empty, no leading dot, no slash"));
  }
  return absl::OkStatus();
}

// The state as the options want it. The caller's own is not touched.
absl::StatusOr<State> Selected(const State& state, const SaveOptions& options) {
  State selected{.root = state.root.copy(), .shards = state.shards};
  if (!options.save_optimizer) (void)selected.root.erase("optimizer");
  if (!options.save_param_scheduler) (void)selected.root.erase("scheduler");
  if (options.extra_ckpt.has_value()) {
    for (const auto& entry : *options.extra_ckpt) {
      if (!selected.root.insert(entry.key(), entry.value()).second) {
        return absl::AlreadyExistsError(absl::StrCat(
            "extra_ckpt: key '",
            entry.key().isString() ? entry.key().toStringRef() : absl::StrCat(entry.key().toInt()),
            "' is one of the checkpoint's own"));
      }
    }
  }
  if (options.callback) options.callback(selected);
  return selected;
}

}  // namespace

Manager::Manager(ManagerOptions options, std::unique_ptr<Format> format)
    : options_(std::move(options)), format_(std::move(format)) {}

absl::StatusOr<std::unique_ptr<Manager>> Manager::Create(ManagerOptions options) {
  if (options.directory.empty()) {
    return absl::InvalidArgumentError("a checkpoint manager needs a directory");
  }
  if (options.rank < 0 || options.keep < 0) {
    return absl::InvalidArgumentError(absl::StrCat("checkpoint manager: rank ", options.rank,
                                                   " and keep ", options.keep,
                                                   " must not be negative"));
  }
  DDP_ASSIGN_OR_RETURN(std::unique_ptr<Format> format,
                       CreateFormat(options.format, {.files = options.files}));
  if (options.rank == 0) {
    DDP_RETURN_IF_ERROR(MakeDirectories(options.directory, options.files));
    DDP_RETURN_IF_ERROR(ProveWritable(options.directory, options.files));
    RemoveLeftovers(options);
  }
  return std::unique_ptr<Manager>(new Manager(std::move(options), std::move(format)));
}

// Each Save holds the folder's lock, shared: who gets it alone knows that no temporary file is
// being written, by this or any other process, and that those present belong to dead ones.
void Manager::RemoveLeftovers(const ManagerOptions& options) {
  absl::StatusOr<DirectoryLock> alone = DirectoryLock::TryExclusive(options.directory);
  if (!alone.ok()) return;
  absl::StatusOr<std::vector<std::string>> files = ListDirectory(options.directory);
  if (!files.ok()) return;
  for (const std::string& file : *files) {
    if (!IsTemporaryName(file)) continue;
    const std::string path = absl::StrCat(options.directory, "/", file);
    const absl::Status removed = RemoveTree(path, options.files);
    if (removed.ok()) {
      ABSL_LOG(INFO) << "removed " << path << ", which an interrupted save left behind";
    } else {
      ABSL_LOG(WARNING) << "cannot remove what an interrupted save left behind: "
                        << removed.message();
    }
  }
}

absl::StatusOr<std::string> Manager::Save(const std::string& name, State state,
                                          const SaveOptions& options) {
  DDP_RETURN_IF_ERROR(CheckName(name));
  const std::string path = absl::StrCat(options_.directory, "/", name, format_->suffix());
  if (options_.rank != 0 && !format_->all_ranks_write()) return path;
  DDP_ASSIGN_OR_RETURN(const State selected, Selected(state, options));
  // Without such locks (NFS) a save still works; leftovers are not removed then.
  const absl::StatusOr<DirectoryLock> lock = DirectoryLock::Shared(options_.directory);
  DDP_RETURN_IF_ERROR(Annotate(
      ReplaceAtomically(
          path, [&](const std::string& temporary) { return format_->Write(selected, temporary); },
          options_.files),
      absl::StrCat("saving checkpoint ", path)));
  RemoveOld();
  return path;
}

void Manager::RemoveOld() {
  if (options_.keep == 0) return;
  const absl::StatusOr<std::vector<Candidate>> found =
      Candidates(options_.directory, {std::string(format_->suffix())});
  if (!found.ok()) return;
  for (size_t i = 0; i + static_cast<size_t>(options_.keep) < found->size(); ++i) {
    const absl::Status removed = RemoveTree((*found)[i].file, options_.files);
    if (!removed.ok())
      ABSL_LOG(WARNING) << "cannot remove an old checkpoint: " << removed.message();
  }
}

absl::StatusOr<std::optional<std::string>> Manager::Newest() const {
  DDP_ASSIGN_OR_RETURN(std::optional<Loaded> newest, LoadNewest());
  if (!newest.has_value()) return std::nullopt;
  return std::move(newest->path);
}

absl::StatusOr<std::optional<Loaded>> Manager::LoadNewest() const {
  std::vector<std::string> suffixes;
  for (const std::string& name : FormatRegistry::Names()) {
    DDP_ASSIGN_OR_RETURN(const std::unique_ptr<Format> format, CreateFormat(name));
    suffixes.emplace_back(format->suffix());
  }
  absl::StatusOr<std::vector<Candidate>> found = Candidates(options_.directory, suffixes);
  if (absl::IsNotFound(found.status())) return std::nullopt;
  DDP_RETURN_IF_ERROR(found.status());
  std::vector<std::string> damaged;
  for (auto candidate = found->rbegin(); candidate != found->rend(); ++candidate) {
    absl::StatusOr<State> state = Load(candidate->file);
    if (state.ok()) {
      for (const std::string& reason : damaged) {
        ABSL_LOG(WARNING) << "passed over a damaged checkpoint: " << reason << "; resuming from "
                          << candidate->file;
      }
      return Loaded{candidate->file, *std::move(state)};
    }
    if (absl::IsNotFound(state.status())) continue;  // removed since the folder was listed
    // Anything but damage (no permission, a failing disk) may pass: no reason to lose an epoch.
    if (!absl::IsDataLoss(state.status())) return state.status();
    damaged.emplace_back(state.status().message());
  }
  if (damaged.empty()) return std::nullopt;
  return absl::DataLossError(absl::StrCat("every checkpoint in ", options_.directory,
                                          " is damaged: ", absl::StrJoin(damaged, "; ")));
}

absl::StatusOr<State> Manager::Load(const std::string& path) {
  if (std::unique_ptr<Format> format = FormatOf(path)) return format->Read(path);
  // Python's users call their files model.pth, model.bin, …: the content decides.
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    return absl::NotFoundError(absl::StrCat(path, " is no checkpoint file; name one, or say auto"));
  }
  absl::Status refused;
  for (const std::string& name : FormatRegistry::Names()) {
    DDP_ASSIGN_OR_RETURN(const std::unique_ptr<Format> format, CreateFormat(name));
    absl::StatusOr<State> state = format->Read(path);
    if (state.ok()) return state;
    refused.Update(state.status());
  }
  return refused;
}

}  // namespace ddp::checkpoint
