#include "checkpoint/manager.h"

#include <ATen/core/ivalue_inl.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/log/absl_log.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/file.h"
#include "base/option_error.h"
#include "base/status.h"
#include "checkpoint/cover.h"

namespace ddp::checkpoint {
namespace {

// Of the linked formats, the one whose suffix `path` ends in; null if there is none.
std::unique_ptr<Format> FormatOf(absl::string_view path, const FormatOptions& options) {
  for (const std::string& name : FormatRegistry::Names()) {
    absl::StatusOr<std::unique_ptr<Format>> format = CreateFormat(name, options);
    if (format.ok() && absl::EndsWith(path, (*format)->suffix())) return *std::move(format);
  }
  return nullptr;
}

// Suffixes of all linked formats.
std::vector<std::string> Suffixes() {
  std::vector<std::string> suffixes;
  for (const std::string& name : FormatRegistry::Names()) {
    absl::StatusOr<std::unique_ptr<Format>> format = CreateFormat(name);
    if (format.ok()) suffixes.emplace_back((*format)->suffix());
  }
  return suffixes;
}

// The files of the folder that are named as checkpoints are, in no order.
absl::StatusOr<std::vector<NamedFile>> NamedFiles(const std::string& directory,
                                                  const std::vector<std::string>& suffixes) {
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> files, ListDirectory(directory));
  std::vector<NamedFile> found;
  for (const std::string& file : files) {
    if (std::optional<NamedFile> named = ParseFileName(file, suffixes)) {
      found.push_back(*std::move(named));
    }
  }
  return found;
}

// Renames a folder to a hidden name before deleting its files, so that no partial one is visible.
absl::Status Remove(const std::string& path, FileSystem* files) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(path, ignored)) return RemoveTree(path, files);
  const std::string hidden = TemporaryName(path);
  if (files->Rename(path.c_str(), hidden.c_str()) != 0) return FileError(errno, "removing", path);
  return RemoveTree(hidden, files);
}

void WarnOf(const std::vector<std::string>& damaged, const std::string& taken) {
  for (const std::string& reason : damaged) {
    ABSL_LOG(WARNING) << "passed over a damaged checkpoint: " << reason << "; resuming from "
                      << taken;
  }
}

// Whether `hidden` may be TemporaryName(file).
bool IsTemporaryNameOf(absl::string_view hidden, absl::string_view file) {
  return IsTemporaryName(hidden) && absl::StartsWith(hidden, absl::StrCat(".", file, ".tmp-"));
}

absl::Status CheckName(absl::string_view name) {
  if (name.empty() || name[0] == '.' || absl::StrContains(name, '/')) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", name, "' is no name for a checkpoint: not empty, no leading dot, no slash"));
  }
  return absl::OkStatus();
}

// A copy of the state with the options applied.
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

// Rank 0 creates the folder. Others do not: a folder that they lack is not shared.
absl::Status CheckFolder(const ManagerOptions& options, int rank) {
  absl::Status usable =
      rank == 0 ? MakeDirectories(options.directory, options.files) : absl::OkStatus();
  if (usable.ok()) usable = ProveWritable(options.directory, options.files);
  if (usable.ok()) return usable;
  return OptionError("dir", options.directory, absl::StrCat("cannot be used: ", usable.message()),
                     usable.code());
}

FormatOptions FormatOptionsOf(const ManagerOptions& options, const Coordinator& ranks) {
  return {.implementations = options.implementations, .files = options.files, .ranks = &ranks};
}

}  // namespace

absl::Status Validate(const ManagerOptions& options) {
  if (FormatRegistry::Find(options.format).ok()) return absl::OkStatus();
  if (options.directory.empty() && options.format == ManagerOptions().format) {
    return absl::OkStatus();
  }
  const std::vector<std::string> names = FormatRegistry::Names();
  return OptionError("format", options.format,
                     names.empty() ? "is no checkpoint format: none is linked into this program"
                                   : absl::StrCat("is none of ", absl::StrJoin(names, ", ")),
                     absl::StatusCode::kNotFound);
}

Manager::Manager(ManagerOptions options, std::unique_ptr<Format> format, const Coordinator& ranks)
    : options_(std::move(options)), format_(std::move(format)), ranks_(ranks) {}

absl::StatusOr<std::unique_ptr<Manager>> Manager::Create(ManagerOptions options,
                                                         const Coordinator& ranks) {
  std::unique_ptr<Format> format;
  const auto prepare = [&]() -> absl::StatusOr<std::string> {
    if (options.directory.empty()) {
      return absl::InvalidArgumentError("a checkpoint manager needs a directory");
    }
    if (options.keep < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("checkpoint manager: keep ", options.keep, " must not be negative"));
    }
    DDP_RETURN_IF_ERROR(Validate(options));
    DDP_ASSIGN_OR_RETURN(format, CreateFormat(options.format, FormatOptionsOf(options, ranks)));
    if (ranks.rank() == 0) {
      DDP_RETURN_IF_ERROR(CheckFolder(options, ranks.rank()));
      RemoveLeftovers(options);
    }
    return options.format;
  };
  DDP_ASSIGN_OR_RETURN(const std::string rank_0_format, ranks.Broadcast(prepare()));
  absl::Status mine;
  if (rank_0_format != options.format) {
    mine = absl::InvalidArgumentError(absl::StrCat("checkpoint format '", options.format,
                                                   "' is not rank 0's, '", rank_0_format, "'"));
  } else if (ranks.rank() != 0 && format->all_ranks_write()) {
    mine = CheckFolder(options, ranks.rank());
  }
  DDP_RETURN_IF_ERROR(ranks.Agree(mine));
  return std::unique_ptr<Manager>(new Manager(std::move(options), std::move(format), ranks));
}

std::string Manager::PathOf(absl::string_view file) const {
  return absl::StrCat(options_.directory, "/", file);
}

FormatOptions Manager::format_options() const { return FormatOptionsOf(options_, ranks_); }

// Each Save holds a shared lock on the folder. With the exclusive lock, no process is writing a
// temporary, so all that exist belong to dead processes.
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

// The ranks agree after each step: no rank writes what another has refused, and only complete
// checkpoints are published.
absl::StatusOr<std::string> Manager::Save(const std::string& name, State state,
                                          const SaveOptions& options) {
  const std::string file = absl::StrCat(name, format_->suffix());
  const std::string path = PathOf(file);
  const std::string saving = absl::StrCat("saving checkpoint ", path);
  const bool all_write = format_->all_ranks_write();
  State selected;
  std::optional<DirectoryLock> lock;
  std::string temporary;
  absl::Cleanup remove_temporary = [&] {
    // Return the first error. A remainder is hidden and is cleaned up later.
    if (is_main() && !temporary.empty()) RemoveTree(temporary, options_.files).IgnoreError();
  };

  // Checks before anything is written. Returns the temporary's name, which rank 0 chooses.
  const auto prepare = [&]() -> absl::StatusOr<std::string> {
    DDP_RETURN_IF_ERROR(CheckName(name));
    if (is_main()) DDP_RETURN_IF_ERROR(CheckUnmixed(name));
    if (is_main() || all_write) {
      DDP_ASSIGN_OR_RETURN(selected, Selected(state, options));
      if (all_write) DDP_RETURN_IF_ERROR(CheckShards(selected));
      // On file systems without such locks (NFS) saves work, but leftovers are never removed.
      absl::StatusOr<DirectoryLock> shared = DirectoryLock::Shared(options_.directory);
      if (shared.ok()) lock.emplace(*std::move(shared));
    }
    if (!is_main()) return "";
    temporary = TemporaryName(path);
    if (all_write && options_.files->Mkdir(temporary.c_str(), 0777) != 0) {
      return FileError(errno, "making folder", temporary);
    }
    return temporary.substr(temporary.rfind('/') + 1);
  };
  DDP_ASSIGN_OR_RETURN(const std::string hidden, ranks_.Broadcast(CatchStatus(saving, prepare)));
  if (!is_main()) temporary = PathOf(hidden);
  DDP_RETURN_IF_ERROR(ranks_.Agree(
      IsTemporaryNameOf(hidden, file)
          ? absl::OkStatus()
          : absl::InvalidArgumentError(absl::StrCat(
                "saves ", file, " where rank 0 saves another checkpoint (", hidden, ")"))));
  if (all_write) DDP_RETURN_IF_ERROR(CheckCoverage(selected.shards, ranks_));

  absl::Status mine;
  if (is_main() || all_write) {
    mine =
        CatchStatus(saving, [&] { return Annotate(format_->Write(selected, temporary), saving); });
  }
  if (all_write) DDP_RETURN_IF_ERROR(ranks_.Agree(mine));
  if (is_main() && mine.ok()) {
    mine = Annotate(Publish(temporary, path), saving);
    if (mine.ok()) RemoveOld(file);
  }
  DDP_RETURN_IF_ERROR(ranks_.Agree(mine));
  return path;
}

// Names by epochs and names by steps alone have no common order, so one run may not have both.
absl::Status Manager::CheckUnmixed(const std::string& name) const {
  const std::optional<CheckpointName> saved = ParseName(name);
  if (!saved.has_value()) return absl::OkStatus();
  DDP_ASSIGN_OR_RETURN(std::vector<NamedFile> files, NamedFiles(options_.directory, Suffixes()));
  for (NamedFile& file : files) {
    std::vector<NamedFile> both = {std::move(file), {*saved, name}};
    DDP_RETURN_IF_ERROR(
        Annotate(SortByAge(both), absl::StrCat("cannot save ", name, " in ", options_.directory)));
  }
  return absl::OkStatus();
}

// On return `temporary` is what is to be removed: empty, or the path of the replaced folder.
absl::Status Manager::Publish(std::string& temporary, const std::string& path) {
  std::error_code ignored;  // the rename reports it
  const bool is_folder = std::filesystem::is_directory(temporary, ignored);
  if (is_folder) DDP_RETURN_IF_ERROR(SyncDirectory(temporary, options_.files));
  if (is_folder && std::filesystem::exists(path, ignored)) {
    // rename(2) replaces empty folders only.
    if (options_.files->Exchange(temporary.c_str(), path.c_str()) != 0) {
      const int error = errno;
      const absl::Status failed = FileError(error, "replacing", path);
      if (error != EINVAL && error != ENOSYS && error != EOPNOTSUPP) return failed;
      return absl::FailedPreconditionError(
          absl::StrCat(failed.message(),
                       "; this file system cannot replace a folder in one step: "
                       "remove the checkpoint first, or save by another name"));
    }
  } else {
    if (options_.files->Rename(temporary.c_str(), path.c_str()) != 0) {
      return FileError(errno, absl::StrCat("renaming ", temporary, " to"), path);
    }
    temporary.clear();
  }
  return SyncDirectory(options_.directory, options_.files);
}

void Manager::RemoveOld(const std::string& saved) {
  if (options_.keep == 0) return;
  absl::StatusOr<std::vector<NamedFile>> found =
      NamedFiles(options_.directory, {std::string(format_->suffix())});
  if (!found.ok() || !SortByAge(*found).ok()) return;
  for (size_t i = 0; i + static_cast<size_t>(options_.keep) < found->size(); ++i) {
    if ((*found)[i].file == saved) continue;  // Save returns its path
    const absl::Status removed = Remove(PathOf((*found)[i].file), options_.files);
    if (!removed.ok()) {
      ABSL_LOG(WARNING) << "cannot remove an old checkpoint: " << removed.message();
    }
  }
}

// Oldest first; empty if there is no folder.
absl::StatusOr<std::vector<NamedFile>> Manager::Checkpoints() const {
  absl::StatusOr<std::vector<NamedFile>> found = NamedFiles(options_.directory, Suffixes());
  if (absl::IsNotFound(found.status())) return std::vector<NamedFile>();
  DDP_RETURN_IF_ERROR(found.status());
  DDP_RETURN_IF_ERROR(Annotate(SortByAge(*found), options_.directory));
  return found;
}

// Pops files from the end of `files` until one is complete, and returns its name; "" if there is
// none. Adds the reasons of incomplete ones to `damaged`.
absl::StatusOr<std::string> Manager::NextComplete(std::vector<NamedFile>& files,
                                                  std::vector<std::string>& damaged) const {
  while (!files.empty()) {
    const std::string file = std::move(files.back().file);
    files.pop_back();
    const std::string path = PathOf(file);
    const absl::Status complete = FormatOf(path, format_options())->CheckComplete(path);
    if (complete.ok()) return file;
    if (absl::IsNotFound(complete)) continue;  // removed since the folder was listed
    // Other errors (no permission, a failing disk) may be temporary: do not skip the checkpoint.
    if (!absl::IsDataLoss(complete)) return complete;
    damaged.emplace_back(complete.message());
  }
  if (damaged.empty()) return "";
  return absl::DataLossError(absl::StrCat("every checkpoint in ", options_.directory,
                                          " is damaged: ", absl::StrJoin(damaged, "; ")));
}

absl::StatusOr<std::optional<std::string>> Manager::Newest() const {
  DDP_ASSIGN_OR_RETURN(std::vector<NamedFile> files, Checkpoints());
  std::vector<std::string> damaged;
  DDP_ASSIGN_OR_RETURN(const std::string newest, NextComplete(files, damaged));
  if (newest.empty()) return std::nullopt;
  WarnOf(damaged, PathOf(newest));
  return PathOf(newest);
}

absl::StatusOr<std::optional<Loaded>> Manager::LoadNewest(const ReadRequest& request) {
  std::vector<NamedFile> files;  // on rank 0: those not tried yet
  std::vector<std::string> damaged;
  absl::Status listed;
  if (is_main()) {
    absl::StatusOr<std::vector<NamedFile>> found = Checkpoints();
    listed = found.status();
    if (found.ok()) files = *std::move(found);
  }
  for (;;) {
    const auto choose = [&]() -> absl::StatusOr<std::string> {
      DDP_RETURN_IF_ERROR(listed);
      if (!is_main()) return "";
      return NextComplete(files, damaged);
    };
    DDP_ASSIGN_OR_RETURN(const std::string file, ranks_.Broadcast(choose()));
    if (file.empty()) return std::nullopt;
    const std::string path = PathOf(file);
    absl::StatusOr<State> state = CatchStatus(
        absl::StrCat("reading ", path), [&] { return Load(path, request, format_options()); });
    DDP_ASSIGN_OR_RETURN(const std::optional<std::string> reason, Unusable(state.status(), path));
    if (!reason.has_value()) {
      if (is_main()) WarnOf(damaged, path);
      return Loaded{path, *std::move(state)};
    }
    if (!reason->empty()) damaged.push_back(*reason);
  }
}

// Collective. Combines the ranks' results of reading `path`. nullopt: every rank has read it. A
// string: skip it, since some rank found it damaged (the reason) or it was removed (""). An error:
// any other failure.
absl::StatusOr<std::optional<std::string>> Manager::Unusable(const absl::Status& mine,
                                                             const std::string& path) const {
  DDP_ASSIGN_OR_RETURN(
      const std::vector<std::string> all,
      ranks_.AllGather(absl::StrCat(static_cast<int>(mine.code()), " ", mine.message())));
  std::optional<std::string> reason;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const size_t blank = all[rank].find(' ');
    int code = 0;
    if (!absl::SimpleAtoi(absl::string_view(all[rank]).substr(0, blank), &code)) code = -1;
    if (code == static_cast<int>(absl::StatusCode::kOk)) continue;
    const bool damaged = code == static_cast<int>(absl::StatusCode::kDataLoss);
    // Rank 0 has just seen it, so if rank 0 does not find it, it was removed. If only other ranks
    // do not find it, they see another folder.
    const bool removed = rank == 0 && code == static_cast<int>(absl::StatusCode::kNotFound);
    if (!damaged && !removed) {
      const bool elsewhere = absl::IsNotFound(mine) && !is_main();
      return ranks_.Agree(
          elsewhere                ? Annotate(mine, absl::StrCat(path,
                                                                 " is not there, where rank 0 has it: the "
                                                                                "folder must be one that all ranks see"))
          : absl::IsDataLoss(mine) ? absl::OkStatus()  // not what stops the others
                                   : mine);
    }
    if (reason.has_value()) continue;
    reason = removed          ? ""
             : all.size() > 1 ? absl::StrCat("rank ", rank, ": ", all[rank].substr(blank + 1))
                              : all[rank].substr(blank + 1);
    if (removed) break;
  }
  return reason;
}

absl::StatusOr<State> Manager::Load(const std::string& path, const ReadRequest& request,
                                    const FormatOptions& options) {
  if (std::unique_ptr<Format> format = FormatOf(path, options)) return format->Read(path, request);
  // Python's users call their files model.pth, model.bin, …: the content decides.
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    return absl::NotFoundError(absl::StrCat(path, " is no checkpoint file; name one, or say auto"));
  }
  absl::Status refused;
  for (const std::string& name : FormatRegistry::Names()) {
    DDP_ASSIGN_OR_RETURN(const std::unique_ptr<Format> format, CreateFormat(name, options));
    absl::StatusOr<State> state = format->Read(path, request);
    if (state.ok()) return state;
    refused.Update(state.status());
  }
  return refused;
}

}  // namespace ddp::checkpoint
