#include "checkpoint/manager.h"

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/log/absl_log.h"
#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "base/file.h"
#include "base/option_error.h"
#include "base/status.h"
#include "checkpoint/consolidate.h"
#include "checkpoint/cover.h"
#include "checkpoint/outcomes.h"
#include "checkpoint/shared_folder.h"

namespace ddp::checkpoint {
namespace {

// Payload of Save's error if all ranks know that this try failed, and the next one need not.
constexpr absl::string_view kNotSaved = "ddp.checkpoint/not_saved";

// Begins what a rank tells the others before it writes a state of a new structure.
constexpr absl::string_view kNewStructure = "new ";

// Suffixes of the linked formats in which a run may save.
std::vector<std::string> Suffixes() {
  std::vector<std::string> suffixes;
  for (const std::string& name : WritableFormats()) {
    absl::StatusOr<std::unique_ptr<Format>> format = CreateFormat(name);
    if (format.ok()) suffixes.emplace_back((*format)->suffix());
  }
  return suffixes;
}

absl::Status CheckName(absl::string_view name) {
  if (name.empty() || name[0] == '.' || absl::StrContains(name, '/')) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", name, "' is no name for a checkpoint: not empty, no leading dot, no slash"));
  }
  return absl::OkStatus();
}

// Names by epochs and names by steps alone have no common order, so one run may not have both.
absl::Status CheckUnmixed(const std::string& name, const Folder& folder) {
  const std::optional<CheckpointName> saved = ParseName(name);
  if (!saved.has_value()) return absl::OkStatus();
  const absl::StatusOr<std::vector<NamedFile>> files = folder.List();
  if (absl::IsFailedPrecondition(files.status())) return files.status();
  // What else there is about the folder, writing will say.
  if (!files.ok() || files->empty()) return absl::OkStatus();
  std::vector<NamedFile> both = {files->front(), {*saved, name}};
  return Annotate(SortByAge(both), absl::StrCat("cannot save ", name, " in ", folder.directory()));
}

std::string TextOf(const c10::IValue& key) {
  return key.isString() ? key.toStringRef() : absl::StrCat(key.toInt());
}

// Whether `path` leads to or below one of the tree's own entries. Their keys may have slashes.
bool HasEntryOf(const c10::impl::GenericDict& tree, absl::string_view path) {
  for (const auto& entry : tree) {
    absl::string_view rest = path;
    if (absl::ConsumePrefix(&rest, TextOf(entry.key())) &&
        (rest.empty() || absl::StartsWith(rest, "/"))) {
      return true;
    }
  }
  return false;
}

// Omits the components `key` and "KEY.NAME", as those of further models are called, of all ranks.
void Omit(const std::string& key, State& state) {
  const auto is_of_key = [&](absl::string_view path) {
    const absl::string_view component = path.substr(0, path.find('/'));
    return component == key || absl::StartsWith(component, absl::StrCat(key, "."));
  };
  const auto omit = [&](c10::impl::GenericDict& entries) {
    std::vector<c10::IValue> omitted;
    for (const auto& entry : entries) {
      if (is_of_key(TextOf(entry.key()))) omitted.push_back(entry.key());
    }
    for (const c10::IValue& component : omitted) (void)entries.erase(component);
  };
  omit(state.root);
  std::erase_if(state.sharded, [&](const auto& entry) { return is_of_key(entry.first); });
  for (auto& [rank, entries] : state.per_rank) omit(entries);
}

// A copy without what the options omit, of which the top level may be edited.
State Copy(const State& state, const SaveOptions& options) {
  State copy = state;
  copy.root = state.root.copy();
  for (auto& [rank, entries] : copy.per_rank) entries = entries.copy();
  if (!options.save_optimizer) Omit("optimizer", copy);
  if (!options.save_param_scheduler) Omit("scheduler", copy);
  return copy;
}

// With an entry of the root that `callback` removes go the parts of tensors below it.
void EditBy(const std::function<void(State&)>& callback, State& state) {
  const c10::impl::GenericDict before = state.root.copy();
  callback(state);
  std::erase_if(state.sharded, [&](const auto& entry) {
    return HasEntryOf(before, entry.first) && !HasEntryOf(state.root, entry.first);
  });
}

// Adds and edits as the options say.
absl::Status Edit(const SaveOptions& options, State& state) {
  if (options.extra_ckpt.has_value()) {
    for (const auto& entry : *options.extra_ckpt) {
      if (!state.root.insert(entry.key(), entry.value()).second) {
        return absl::AlreadyExistsError(absl::StrCat("extra_ckpt: key '", TextOf(entry.key()),
                                                     "' is one of the checkpoint's own"));
      }
    }
  }
  if (options.callback) EditBy(options.callback, state);
  return absl::OkStatus();
}

// Rank 0 creates the folder. Others do not: a folder that they lack is not shared.
absl::Status CheckFolder(const ManagerOptions& options, int rank) {
  absl::Status usable =
      rank == 0 ? MakeDurableDirectories(options.directory, options.files) : absl::OkStatus();
  if (usable.ok()) usable = ProveWritable(options.directory, options.files);
  if (usable.ok()) return usable;
  return OptionError("dir", options.directory, absl::StrCat("cannot be used: ", usable.message()),
                     usable.code());
}

FormatOptions FormatOptionsOf(const ManagerOptions& options, const Coordinator& ranks) {
  return {.implementations = options.implementations,
          .files = options.files,
          .ranks = &ranks,
          .accept_unverified = false,
          .broadcast = options.broadcast};
}

absl::Status WriteNotes(const Notes& notes, const std::string& path, FileSystem* files) {
  DDP_ASSIGN_OR_RETURN(FileWriter writer, FileWriter::Create(path, files));
  DDP_RETURN_IF_ERROR(writer.Append(ToText(notes)));
  return writer.Finish();
}

// The metric `text`, or of the option; InvalidArgument if there is none.
absl::StatusOr<BestMetric> MetricOf(absl::string_view text, const ManagerOptions& options) {
  if (text.empty()) text = options.keep_best;
  if (text.empty()) {
    return OptionError("keep_best", "",
                       "says by which metric a checkpoint is the best, as test/accuracy:max does");
  }
  return ParseBestMetric(text);
}

}  // namespace

absl::Status Validate(const ManagerOptions& options) {
  if (!options.keep_best.empty()) {
    if (const absl::Status metric = ParseBestMetric(options.keep_best).status(); !metric.ok()) {
      return OptionError("keep_best", options.keep_best,
                         "must be METRIC:max or METRIC:min, or with a number METRIC:max:3",
                         metric.code());
    }
  }
  if (options.keep != 0 && options.keep_last != 0 && options.keep != options.keep_last) {
    return OptionError("keep", absl::StrCat(options.keep),
                       absl::StrCat("is the older name of keep_last, which is ", options.keep_last),
                       absl::StatusCode::kInvalidArgument);
  }
  if (const auto entry = FormatRegistry::Find(options.format); entry.ok()) {
    if (entry->read_only.empty()) return absl::OkStatus();
    return OptionError("format", options.format, entry->read_only,
                       absl::StatusCode::kUnimplemented);
  }
  if (options.directory.empty() && options.format == ManagerOptions().format) {
    return absl::OkStatus();
  }
  const std::vector<std::string> names = WritableFormats();
  return OptionError("format", options.format,
                     names.empty() ? "is no checkpoint format: none is linked into this program"
                                   : absl::StrCat("is none of ", absl::StrJoin(names, ", ")),
                     absl::StatusCode::kNotFound);
}

Manager::Manager(ManagerOptions options, std::unique_ptr<Format> format, const Coordinator& ranks)
    : options_(std::move(options)),
      format_(std::move(format)),
      ranks_(ranks),
      folder_(FolderAt(options_.directory, options_.files)),
      rules_{.last = std::max(options_.keep, options_.keep_last),
             .every = options_.keep_every,
             .hours = options_.keep_hours} {
  if (!options_.keep_best.empty()) rules_.best = ParseBestMetric(options_.keep_best).value();
}

Folder Manager::FolderAt(const std::string& directory, FileSystem* files) {
  return Folder(directory, Suffixes(), files);
}

absl::StatusOr<std::unique_ptr<Manager>> Manager::Create(ManagerOptions options,
                                                         const Coordinator& ranks) {
  std::unique_ptr<Format> format;
  const bool writes = !options.read_only;
  const std::string mode =
      absl::StrCat("checkpoint format '", options.format, "'", writes ? "" : ", only read,");
  const auto prepare = [&]() -> absl::StatusOr<std::string> {
    if (options.directory.empty()) {
      return absl::InvalidArgumentError("a checkpoint manager needs a directory");
    }
    DDP_RETURN_IF_ERROR(ValidateOptions(options));
    DDP_RETURN_IF_ERROR(Validate(options));
    DDP_ASSIGN_OR_RETURN(format, CreateFormat(options.format, FormatOptionsOf(options, ranks)));
    if (ranks.rank() == 0 && writes) {
      DDP_RETURN_IF_ERROR(CheckFolder(options, ranks.rank()));
      // Each Save holds a shared lock on the folder. With the exclusive lock, no process is writing
      // a temporary, so all that exist belong to dead processes.
      absl::StatusOr<DirectoryLock> alone = DirectoryLock::TryExclusive(options.directory);
      if (alone.ok()) FolderAt(options.directory, options.files).RemoveLeftovers();
    }
    return mode;
  };
  absl::StatusOr<std::string> prepared = prepare();
  // Before the ranks agree, which may print the error.
  if (!prepared.ok()) prepared = InGroup(options.group, prepared.status());
  DDP_ASSIGN_OR_RETURN(const std::string of_rank_0, ranks.Broadcast(prepared));
  DDP_RETURN_IF_ERROR(ranks.Agree(of_rank_0 == mode ? absl::OkStatus()
                                                    : absl::InvalidArgumentError(absl::StrCat(
                                                          mode, " is not rank 0's, ", of_rank_0))));
  if (writes) {
    DDP_RETURN_IF_ERROR(
        ProveShared(options.directory, ranks, {options.folder_limit, options.files}));
    const bool is_another_writer = ranks.rank() != 0 && format->all_ranks_write();
    const absl::Status usable =
        is_another_writer ? CheckFolder(options, ranks.rank()) : absl::OkStatus();
    DDP_RETURN_IF_ERROR(ranks.Agree(InGroup(options.group, usable)));
  }
  return std::unique_ptr<Manager>(new Manager(std::move(options), std::move(format), ranks));
}

FormatOptions Manager::format_options() const { return FormatOptionsOf(options_, ranks_); }

absl::StatusOr<State> Manager::WhatThisRankWrites(State state, const SaveOptions& options) {
  if (!format_->all_ranks_write()) return state;
  // What one rank adds or edits may change which rank writes what.
  const bool edits = options.extra_ckpt.has_value() || options.callback != nullptr;
  DDP_ASSIGN_OR_RETURN(std::optional<State> mine,
                       format_->WhatThisRankWrites(Copy(state, options), edits));
  has_new_structure_ = !mine.has_value();
  return mine.has_value() ? *std::move(mine) : std::move(state);
}

std::string Manager::PathOf(const std::string& name) const {
  return folder_.PathOf(absl::StrCat(name, format_->suffix()));
}

// A save that is going on, on one rank.
struct Manager::Attempt {
  std::string file;
  std::string path;
  std::string temporary = {};  // to be removed
  std::string notes = {};      // likewise
  std::string old_notes = {};  // likewise
  State state = {};            // on ranks that write
  std::optional<DirectoryLock> lock = {};
};

// The ranks agree after each step: no rank writes what another has refused, and only complete
// checkpoints are published.
absl::StatusOr<std::string> Manager::Save(const std::string& name, State state,
                                          const SaveOptions& options) {
  const std::string file = absl::StrCat(name, format_->suffix());
  Attempt attempt{.file = file, .path = PathOf(name)};
  const std::string saving = absl::StrCat("saving checkpoint ", attempt.path);
  const bool all_write = format_->all_ranks_write();
  const bool writes = is_main() || all_write;
  // On all ranks, as Create has made sure.
  if (options_.read_only) {
    return absl::FailedPreconditionError(
        absl::StrCat(saving, ": this checkpoint manager only reads"));
  }
  attempt.state = Copy(state, options);
  std::unique_ptr<Gathering> gathering;
  if (!all_write) {
    DDP_ASSIGN_OR_RETURN(gathering, Gather(std::move(attempt.state), options, saving));
    attempt.state = gathering->TakeState();
  }
  const bool gathers = gathering != nullptr && gathering->has_parts();
  absl::Cleanup tidy = [&] {
    if (!is_main()) return;
    // Save returns the first error. A remainder is hidden, and goes after the next save or at the
    // next start.
    for (const std::string& path : {attempt.old_notes, attempt.notes, attempt.temporary}) {
      if (!path.empty() && !RemoveTree(path, options_.files).ok()) leftovers_.push_back(path);
    }
  };

  const auto check = [&]() -> absl::StatusOr<std::string> {
    DDP_RETURN_IF_ERROR(CheckName(name));
    if (is_main()) DDP_RETURN_IF_ERROR(CheckUnmixed(name, folder_));
    if (!writes) return "";
    DDP_RETURN_IF_ERROR(Edit(options, attempt.state));
    if (all_write) DDP_RETURN_IF_ERROR(CheckShards(attempt.state));
    return file;
  };
  DDP_ASSIGN_OR_RETURN(const std::string of_rank_0, ranks_.Broadcast(CatchStatus(saving, check)));

  const auto begin = [&]() -> absl::StatusOr<std::string> {
    if (file != of_rank_0) {
      return absl::InvalidArgumentError(
          absl::StrCat("saves ", file, " where rank 0 saves ", of_rank_0));
    }
    if (writes) {
      // On file systems without such locks (NFS) saves work, but leftovers are never removed.
      absl::StatusOr<DirectoryLock> shared = DirectoryLock::Shared(options_.directory);
      if (shared.ok()) attempt.lock.emplace(*std::move(shared));
    }
    const bool is_new = std::exchange(has_new_structure_, false);
    if (is_main()) DDP_RETURN_IF_ERROR(Begin(attempt));
    return absl::StrCat(is_new ? kNewStructure : "",
                        attempt.temporary.substr(attempt.temporary.rfind('/') + 1));
  };
  DDP_ASSIGN_OR_RETURN(const Outcomes begun, GatherOutcomes(ranks_, CatchStatus(saving, begin)));
  if (absl::Status failed = FirstFailure(begun); !failed.ok()) return NotSaved(std::move(failed));
  DDP_RETURN_IF_ERROR(Annotate(CheckStructure(begun), saving));
  if (!is_main()) {
    attempt.temporary =
        folder_.PathOf(std::string(absl::StripPrefix(*begun.front(), kNewStructure)));
  }
  if (all_write) DDP_RETURN_IF_ERROR(CheckCoverage(PartsOf(attempt.state), ranks_));

  absl::Status mine;
  const auto result = [&]() -> absl::StatusOr<std::string> {
    if (!mine.ok()) return mine;
    return "";
  };
  const auto write = [&](TensorSource* source) {
    return format_->Write(attempt.state, attempt.temporary, source);
  };
  if (writes && !gathers) {
    mine = CatchStatus(saving, [&] { return Annotate(write(nullptr), saving); });
  }
  if (all_write || gathers) {
    DDP_ASSIGN_OR_RETURN(const Outcomes written, gathers ? gathering->Run(write, saving)
                                                         : GatherOutcomes(ranks_, result()));
    if (absl::Status failed = FirstFailure(written); !failed.ok()) {
      return NotSaved(std::move(failed));
    }
  }
  if (is_main() && mine.ok()) {
    mine = CatchStatus(saving, [&] { return Annotate(Publish(attempt, options.metrics), saving); });
    if (mine.ok()) {
      WarnOfUnknownMetric(options.metrics);
      RemoveOld(file);
    }
  }
  DDP_ASSIGN_OR_RETURN(const Outcomes published, GatherOutcomes(ranks_, result()));
  if (absl::Status failed = FirstFailure(published); !failed.ok()) {
    return NotSaved(std::move(failed));
  }
  return attempt.path;
}

// Collective: a state for rank 0.
absl::StatusOr<std::unique_ptr<Gathering>> Manager::Gather(State state, const SaveOptions& options,
                                                           absl::string_view saving) const {
  absl::StatusOr<std::unique_ptr<Gathering>> begun =
      Gathering::Begin(std::move(state), ranks_, options_.move);
  if (!begun.ok()) return Annotate(begun.status(), saving);
  if (!(*begun)->has_parts()) return begun;
  // A callback may look at tensors, and change them.
  DDP_ASSIGN_OR_RETURN(const std::string whole, ranks_.Broadcast(options.callback ? "whole" : ""));
  if (whole.empty()) return begun;
  const absl::Status made = (*begun)->MakeWhole();
  if (!made.ok()) return Annotate(made, saving);
  return begun;
}

absl::Status Manager::AgreeToSave(const Coordinator& ranks, const absl::Status& mine) const {
  const auto outcome = [&]() -> absl::StatusOr<std::string> {
    if (!mine.ok()) return mine;
    return "";
  };
  DDP_ASSIGN_OR_RETURN(const Outcomes outcomes, GatherOutcomes(ranks, outcome()));
  absl::Status failed = FirstFailure(outcomes);
  return failed.ok() ? failed : NotSaved(std::move(failed));
}

absl::Status Manager::NotSaved(absl::Status failed) const {
  // What is wrong with the state will be wrong at the next save.
  if (absl::IsInvalidArgument(failed)) return failed;
  failed.SetPayload(kNotSaved, absl::Cord("1"));
  if (is_main() && GoesOnAfter(failed)) {
    ABSL_LOG(WARNING) << "a checkpoint was not saved (on_save_error=continue): "
                      << failed.message();
  }
  return failed;
}

bool Manager::GoesOnAfter(const absl::Status& saved) const {
  return saved.ok() ||
         (options_.on_save_error == "continue" && saved.GetPayload(kNotSaved).has_value());
}

// On rank 0: makes sure that there is a folder with room, and makes the temporary if it is a
// folder.
absl::Status Manager::Begin(Attempt& attempt) {
  if (absl::IsNotFound(IdentityOf(options_.directory).status())) {
    return absl::NotFoundError(
        absl::StrCat("the checkpoint folder ", options_.directory,
                     ", which was there when the run began, is gone; make it again to go on"));
  }
  if (!bytes_.has_value()) {
    uint64_t bytes = EstimateBytes(attempt.state, format_->all_ranks_write() ? ranks_.size() : 1);
    const absl::StatusOr<std::vector<NamedFile>> before = OwnFolder().List();
    if (before.ok() && !before->empty()) {
      bytes = std::min(bytes, BytesOnDisk(folder_.PathOf(before->back().file)));
    }
    bytes_ = bytes;
  }
  if (absl::IsResourceExhausted(folder_.CheckRoom(*bytes_))) MakeRoom();
  DDP_RETURN_IF_ERROR(folder_.CheckRoom(*bytes_));
  attempt.temporary = TemporaryName(attempt.path);
  if (format_->all_ranks_write() && options_.files->Mkdir(attempt.temporary.c_str(), 0777) != 0) {
    return FileError(errno, "making folder", std::exchange(attempt.temporary, ""));
  }
  return absl::OkStatus();
}

// What all ranks have begun with, which they all know: whether their states are of the structure
// that the format has planned for, or all of a new one.
absl::Status Manager::CheckStructure(const Outcomes& begun) {
  std::optional<size_t> changed, same;
  for (size_t rank = begun.size(); rank-- > 0;) {
    (absl::StartsWith(*begun[rank], kNewStructure) ? changed : same) = rank;
  }
  if (!changed) return absl::OkStatus();
  format_->ForgetPlan();
  if (!same) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("since an earlier save, the state of rank ", *changed,
                   " has other tensors, or others of shape or dtype, and that of rank ", *same,
                   " has not: they must change on all ranks before the same save"));
}

// On rank 0. The order of the calls makes it safe against loss of power: whatever gets a name is
// durable before, and what is replaced is deleted only when its replacement is durable. Notes may
// be lost, but never say of one checkpoint what is true of another of this name.
absl::Status Manager::Publish(Attempt& attempt, const std::map<std::string, double>& metrics) {
  FileSystem* const files = options_.files;
  const char* const temporary = attempt.temporary.c_str();
  const char* const path = attempt.path.c_str();
  std::error_code ignored;  // the rename reports it
  const bool is_folder = std::filesystem::is_directory(temporary, ignored);
  if (is_folder) DDP_RETURN_IF_ERROR(SyncDirectory(attempt.temporary, files));

  Notes notes{.time = absl::Now(), .metrics = metrics};
  if (options_.verify == "saved") {
    DropFromCache(attempt.temporary);
    // On this rank alone.
    DDP_ASSIGN_OR_RETURN(const std::unique_ptr<Format> reader,
                         CreateFormat(options_.format, {.implementations = options_.implementations,
                                                        .files = options_.files}));
    DDP_RETURN_IF_ERROR(Annotate(reader->Read(attempt.temporary, {.only_check = true}).status(),
                                 "reading back what was written"));
    notes.verified = true;
  }
  attempt.notes = TemporaryName(folder_.NotesPathOf(attempt.file));
  DDP_RETURN_IF_ERROR(WriteNotes(notes, attempt.notes, files));

  // Not of what a link leads to: the link itself is replaced.
  const std::filesystem::file_status there = std::filesystem::symlink_status(path, ignored);
  if (!is_folder && std::filesystem::is_directory(there)) {
    return absl::FailedPreconditionError(
        absl::StrCat(attempt.path, " is a folder, and a checkpoint of format ", format_->name(),
                     " is a file: rename the folder, or save by another name"));
  }
  const std::string notes_path = folder_.NotesPathOf(attempt.file);
  const bool has_notes =
      std::filesystem::exists(std::filesystem::symlink_status(notes_path, ignored));
  absl::Cleanup put_back = [&] {
    const std::string old_notes = std::exchange(attempt.old_notes, "");
    if (!old_notes.empty()) (void)files->Rename(old_notes.c_str(), notes_path.c_str());
  };
  if (has_notes) {
    const std::string hidden = TemporaryName(notes_path);
    if (files->Rename(notes_path.c_str(), hidden.c_str()) != 0) {
      return FileError(errno, absl::StrCat("renaming ", notes_path, " to"), hidden);
    }
    attempt.old_notes = hidden;
    DDP_RETURN_IF_ERROR(SyncDirectory(options_.directory, files));
  }
  const bool exchanges = is_folder && std::filesystem::exists(there);
  if (exchanges) {
    // rename(2) replaces empty folders only.
    if (files->Exchange(temporary, path) != 0) {
      const int error = errno;
      const absl::Status failed = FileError(error, "replacing", attempt.path);
      if (error != EINVAL && error != ENOSYS && error != EOPNOTSUPP) return failed;
      return absl::FailedPreconditionError(
          absl::StrCat(failed.message(),
                       "; this file system cannot replace a folder in one step: "
                       "remove the checkpoint first, or save by another name"));
    }
  } else if (files->Rename(temporary, path) != 0) {
    return FileError(errno, absl::StrCat("renaming ", attempt.temporary, " to"), attempt.path);
  }
  std::move(put_back).Cancel();
  // From here on the temporary is the replaced folder. It is what a power failure may bring back.
  std::string replaced = exchanges ? attempt.temporary : "";
  attempt.temporary.clear();
  absl::Cleanup keep = [&] {
    if (!replaced.empty()) leftovers_.push_back(std::move(replaced));
  };
  if (has_notes) DDP_RETURN_IF_ERROR(SyncDirectory(options_.directory, files));
  if (files->Rename(attempt.notes.c_str(), notes_path.c_str()) != 0) {
    return FileError(errno, absl::StrCat("renaming ", attempt.notes, " to"), notes_path);
  }
  attempt.notes.clear();
  DDP_RETURN_IF_ERROR(SyncDirectory(options_.directory, files));
  attempt.temporary = std::move(replaced);
  replaced.clear();
  bytes_ = BytesOnDisk(attempt.path);
  return absl::OkStatus();
}

// On rank 0. A metric that is misspelt keeps nothing, and what it should have kept is deleted.
void Manager::WarnOfUnknownMetric(const std::map<std::string, double>& metrics) {
  const bool is_known = !rules_.best || metrics.empty() || metrics.contains(rules_.best->metric);
  if (is_known || std::exchange(has_warned_of_metric_, true)) return;
  std::vector<std::string> names;
  for (const auto& [name, value] : metrics) names.push_back(name);
  ABSL_LOG(WARNING) << "keep_best finds no " << rules_.best->metric
                    << " in this checkpoint, which has " << absl::StrJoin(names, ", ");
}

// The checkpoints of this run's format: those of others are not deleted.
Folder Manager::OwnFolder() const {
  return Folder(options_.directory, {std::string(format_->suffix())}, options_.files);
}

// On rank 0. `saved` is durable.
void Manager::RemoveOld(const std::string& saved) {
  for (const std::string& path : std::exchange(leftovers_, {})) {
    if (!RemoveTree(path, options_.files).ok()) leftovers_.push_back(path);
  }
  unusable_.erase(saved);
  if (rules_.keep_all()) return;
  const Folder own = OwnFolder();
  absl::StatusOr<std::vector<Candidate>> found = own.Candidates();
  if (!found.ok()) return;
  std::erase_if(*found, [&](const Candidate& candidate) { return IsUnusable(candidate.file); });
  for (const std::string& file : ToDelete(*std::move(found), rules_, saved)) {
    const absl::Status removed = own.Remove(file);
    if (!removed.ok()) {
      ABSL_LOG(WARNING) << "cannot remove an old checkpoint: " << removed.message();
    }
  }
}

// On rank 0: deletes what the rules do not keep, as after a save. The run may have been started
// again with rules that keep fewer, for want of room.
void Manager::MakeRoom() {
  if (rules_.keep_all() && leftovers_.empty()) return;
  absl::StatusOr<std::vector<std::string>> files = ByAge();
  if (!files.ok() || !unusable_.empty()) return;
  std::vector<Damage> damaged;
  const absl::StatusOr<std::string> newest = NextComplete(*files, damaged, nullptr);
  if (!newest.ok() || newest->empty() || !damaged.empty()) return;
  // The save that made it may have failed to make its name durable.
  if (SyncDirectory(options_.directory, options_.files).ok()) RemoveOld(*newest);
}

// Of all, the newest last, or of those with this metric the best last; empty if there is no folder.
absl::StatusOr<std::vector<std::string>> Manager::InOrder(
    std::optional<absl::string_view> metric) const {
  return metric ? ByMetric(*metric) : ByAge();
}

absl::StatusOr<std::vector<std::string>> Manager::ByAge() const {
  const absl::StatusOr<std::vector<NamedFile>> found = folder_.List();
  std::vector<std::string> files;
  if (absl::IsNotFound(found.status())) return files;
  DDP_RETURN_IF_ERROR(found.status());
  for (const NamedFile& named : *found) files.push_back(named.file);
  return files;
}

absl::StatusOr<std::vector<std::string>> Manager::ByMetric(absl::string_view metric) const {
  DDP_ASSIGN_OR_RETURN(const BestMetric best, MetricOf(metric, options_));
  const absl::StatusOr<std::vector<Candidate>> found = folder_.Candidates();
  std::vector<std::string> files;
  if (absl::IsNotFound(found.status())) return files;
  DDP_RETURN_IF_ERROR(found.status());
  for (const Candidate& candidate : BestFirst(*found, best)) files.push_back(candidate.file);
  std::reverse(files.begin(), files.end());
  if (!files.empty() || found->empty()) return files;
  std::set<std::string> present;
  for (const Candidate& candidate : *found) {
    if (!candidate.metrics.has_value()) continue;
    for (const auto& [name, value] : *candidate.metrics) present.insert(name);
  }
  return absl::NotFoundError(
      absl::StrCat("no checkpoint in ", options_.directory, " has a value of ", best.metric,
                   present.empty() ? "; none has any metric"
                   : present.count(best.metric) > 0
                       ? ": it is nan in each that has it"
                       : absl::StrCat("; there are ", absl::StrJoin(present, ", "))));
}

// Pops files from the end of `files` until one is complete, and returns its name; "" if there is
// none. Adds incomplete ones to `damaged`, but sets `changed`, if it is not null, for one that
// another process has replaced or removed meanwhile.
absl::StatusOr<std::string> Manager::NextComplete(std::vector<std::string>& files,
                                                  std::vector<Damage>& damaged,
                                                  bool* changed) const {
  while (!files.empty()) {
    const std::string file = std::move(files.back());
    files.pop_back();
    const std::string path = folder_.PathOf(file);
    const absl::StatusOr<FileIdentity> seen = IdentityOf(path);
    const absl::Status complete = FormatBySuffix(path, format_options())->CheckComplete(path);
    if (complete.ok()) return file;
    const bool is_gone = absl::IsNotFound(complete);
    std::error_code ignored;
    // Of a disk that is not mounted, for example: the run must not begin anew.
    if (is_gone && std::filesystem::is_symlink(path, ignored)) {
      return absl::FailedPreconditionError(
          absl::StrCat(path,
                       " is a symbolic link to what is not there; remove it to go on "
                       "without this checkpoint"));
    }
    // Other errors (no permission, a failing disk) may be temporary: do not skip the checkpoint.
    if (!is_gone && !absl::IsDataLoss(complete)) return complete;
    if (changed != nullptr && HasChanged(path, seen)) {
      *changed = true;
    } else if (!is_gone) {
      damaged.push_back({file, std::string(complete.message()), seen.value_or(FileIdentity())});
    }
  }
  return "";
}

// OK if there never was a checkpoint.
absl::Status Manager::NoneLeft(std::optional<absl::string_view> metric,
                               const std::vector<Damage>& damaged) const {
  std::vector<std::string> reasons;
  for (const Damage& damage : damaged) reasons.push_back(damage.reason);
  const absl::StatusOr<std::vector<std::string>> renamed = folder_.Damaged();
  if (damaged.empty() && renamed.ok() && !renamed->empty()) {
    reasons.push_back(absl::StrCat(absl::StrJoin(*renamed, ", "), " of earlier starts"));
  }
  const absl::StatusOr<std::vector<std::string>> abandoned = folder_.Abandoned();
  const bool has_abandoned = abandoned.ok() && !abandoned->empty();
  if (has_abandoned) {
    reasons.push_back(absl::StrCat("a run has rolled back past ", absl::StrJoin(*abandoned, ", ")));
  }
  if (reasons.empty()) return absl::OkStatus();
  const std::string with =
      metric ? absl::StrCat(" with a value of ", MetricOf(*metric, options_).value().metric) : "";
  return absl::DataLossError(absl::StrCat("every checkpoint", with, " in ", options_.directory,
                                          " is damaged", has_abandoned ? " or abandoned: " : ": ",
                                          absl::StrJoin(reasons, "; "),
                                          "; put an intact one there, or begin in another folder"));
}

// A file that has been replaced since a load found it damaged is another one.
bool Manager::IsUnusable(const std::string& file) const {
  const auto found = unusable_.find(file);
  if (found == unusable_.end()) return false;
  const absl::StatusOr<FileIdentity> now = IdentityOf(folder_.PathOf(file));
  return !now.ok() || *now == found->second.seen;
}

absl::StatusOr<std::optional<std::string>> Manager::First(
    std::optional<absl::string_view> metric) const {
  DDP_ASSIGN_OR_RETURN(std::vector<std::string> files, InOrder(metric));
  std::vector<Damage> known, damaged;
  bool changed = false;  // then it is as if it had not been listed
  std::erase_if(files, [&](const std::string& file) {
    if (!IsUnusable(file)) return false;
    known.push_back(unusable_.at(file));
    return true;
  });
  DDP_ASSIGN_OR_RETURN(const std::string file, NextComplete(files, damaged, &changed));
  if (file.empty()) {
    damaged.insert(damaged.end(), known.rbegin(), known.rend());
    DDP_RETURN_IF_ERROR(NoneLeft(metric, damaged));
    return std::nullopt;
  }
  for (const Damage& damage : damaged) {
    ABSL_LOG(WARNING) << "passed over a damaged checkpoint: " << damage.reason;
  }
  return folder_.PathOf(file);
}

absl::StatusOr<std::optional<std::string>> Manager::Newest() const { return First(std::nullopt); }

absl::StatusOr<std::optional<std::string>> Manager::Best(absl::string_view metric) const {
  return First(metric);
}

absl::StatusOr<std::optional<Loaded>> Manager::LoadNewest(const ReadRequest& request,
                                                          const LoadOptions& options) {
  return LoadFirst(std::nullopt, request, options);
}

absl::StatusOr<std::optional<Loaded>> Manager::LoadBest(absl::string_view metric,
                                                        const ReadRequest& request,
                                                        const LoadOptions& options) {
  return LoadFirst(metric, request, options);
}

absl::StatusOr<std::optional<Loaded>> Manager::LoadFirst(std::optional<absl::string_view> metric,
                                                         const ReadRequest& request,
                                                         const LoadOptions& options) {
  // On rank 0:
  absl::StatusOr<std::vector<std::string>> files = std::vector<std::string>();  // not tried yet
  if (is_main()) files = InOrder(metric);
  std::vector<Damage> damaged;
  // A run that saves there removes old checkpoints, perhaps all that were listed, and a copy into
  // the folder may be under way.
  bool changed = false;
  int lists_left = 100;
  const auto choose = [&]() -> absl::StatusOr<std::string> {
    if (!is_main()) return "";
    for (;; files = InOrder(metric)) {
      DDP_RETURN_IF_ERROR(files.status());
      DDP_ASSIGN_OR_RETURN(std::string file,
                           NextComplete(*files, damaged, lists_left > 0 ? &changed : nullptr));
      if (!std::exchange(changed, false) || --lists_left < 0) return file;
      damaged.clear();
      absl::SleepFor(absl::Milliseconds(10));
    }
  };
  for (;;) {
    DDP_ASSIGN_OR_RETURN(const std::string file, ranks_.Broadcast(choose()));
    if (file.empty()) {
      const absl::Status none = is_main() ? NoneLeft(metric, damaged) : absl::OkStatus();
      if (is_main()) Quarantine(damaged);
      DDP_RETURN_IF_ERROR(ranks_.Agree(none));
      return std::nullopt;
    }
    const std::string path = folder_.PathOf(file);
    const absl::StatusOr<FileIdentity> seen = IdentityOf(path);
    absl::StatusOr<State> state = CatchStatus(absl::StrCat("reading ", path), [&] {
      return Load(path, request, format_options(), options);
    });
    DDP_ASSIGN_OR_RETURN(const std::optional<std::string> reason, Unusable(state.status(), path));
    if (!reason.has_value()) {
      for (const Damage& damage : damaged) {
        ABSL_LOG(WARNING) << "passed over a damaged checkpoint: " << damage.reason
                          << "; resuming from " << path;
      }
      if (is_main()) Quarantine(damaged);
      return Loaded{path, *std::move(state)};
    }
    const bool is_other = lists_left > 0 && HasChanged(path, seen);
    changed = changed || is_other;
    if (is_main() && !is_other && !reason->empty()) {
      damaged.push_back({file, *reason, seen.value_or(FileIdentity())});
    }
  }
}

// Collective. Combines the ranks' results of reading `path`. nullopt: every rank has read it. A
// string: skip it, since some rank found it damaged (the reason) or it was removed (""). An error:
// any other failure.
absl::StatusOr<std::optional<std::string>> Manager::Unusable(absl::Status mine,
                                                             const std::string& path) const {
  // Rank 0 has just seen it, so if rank 0 does not find it, it was removed. If only other ranks do
  // not find it, they see another folder.
  if (absl::IsNotFound(mine) && !is_main()) {
    mine = Annotate(mine, absl::StrCat(path,
                                       " is not there, where rank 0 has it: the folder must be one "
                                       "that all ranks see"));
  }
  const auto result = [&]() -> absl::StatusOr<std::string> {
    if (!mine.ok()) return mine;
    return "";
  };
  DDP_ASSIGN_OR_RETURN(Outcomes outcomes, GatherOutcomes(ranks_, result()));
  if (absl::IsNotFound(outcomes.front().status())) return "";
  const absl::Status first = FirstFailure(outcomes);
  for (absl::StatusOr<std::string>& outcome : outcomes) {
    if (absl::IsDataLoss(outcome.status())) outcome = "";  // not what stops the others
  }
  DDP_RETURN_IF_ERROR(FirstFailure(outcomes));
  if (first.ok()) return std::nullopt;
  return std::string(first.message());
}

// On rank 0, when the ranks have agreed on what to use instead.
void Manager::Quarantine(const std::vector<Damage>& damaged) {
  for (const Damage& damage : damaged) {
    unusable_.insert_or_assign(damage.file, damage);
    if (options_.read_only) continue;
    const absl::StatusOr<std::string> renamed = folder_.Quarantine(damage.file, damage.seen);
    if (!renamed.ok()) {
      ABSL_LOG(WARNING) << "cannot rename a damaged checkpoint: " << renamed.status().message();
    } else if (renamed->empty()) {
      ABSL_LOG(INFO) << damage.file << " was not renamed: another process has changed it, or saves";
    } else {
      ABSL_LOG(WARNING) << "renamed " << folder_.PathOf(damage.file) << " to " << *renamed;
      unusable_.erase(damage.file);
    }
  }
}

absl::StatusOr<bool> Manager::AbandonNewerThan(const CheckpointName& newest) {
  const auto rename = [&]() -> absl::StatusOr<std::string> {
    if (!is_main()) return "";
    DDP_ASSIGN_OR_RETURN(const std::vector<NamedFile> files, folder_.List());
    std::vector<std::string> others;
    for (const NamedFile& named : files) {
      if (!(named.name > newest)) others.push_back(named.file);
    }
    std::vector<Damage> damaged;
    DDP_ASSIGN_OR_RETURN(std::string found, NextComplete(others, damaged, nullptr));
    if (found.empty()) return found;
    // If this process is killed meanwhile, the next one does not go on from the newest of them.
    for (auto named = files.rbegin(); named != files.rend() && named->name > newest; ++named) {
      DDP_ASSIGN_OR_RETURN(const std::string renamed, folder_.Abandon(named->file));
      if (renamed.empty()) continue;
      ABSL_LOG(WARNING) << "renamed " << folder_.PathOf(named->file) << " to " << renamed
                        << ": the run goes on from an older one";
    }
    return found;
  };
  DDP_ASSIGN_OR_RETURN(const std::string found,
                       ranks_.Broadcast(CatchStatus("setting checkpoints aside", rename)));
  return !found.empty();
}

absl::StatusOr<State> Manager::Load(const std::string& path, const ReadRequest& request,
                                    const FormatOptions& formats, const LoadOptions& options) {
  absl::StatusOr<State> state = Read(path, request, formats);
  if (state.ok() && options.callback) {
    const absl::Status edited = CatchStatus(absl::StrCat("callback after reading ", path),
                                            [&] { EditBy(options.callback, *state); });
    if (!edited.ok()) return edited;
  }
  return state;
}

absl::StatusOr<State> Manager::Read(const std::string& given, const ReadRequest& request,
                                    const FormatOptions& given_options) {
  const std::string path = WithoutSlashes(given);
  FormatOptions options = given_options;
  std::optional<TryingRanks> ranks;
  if (options.ranks != nullptr) options.ranks = &ranks.emplace(*options.ranks);
  bool together =
      options.broadcast != nullptr && options.ranks != nullptr && options.ranks->size() > 1;
  std::unique_ptr<Format> format = FormatBySuffix(path, options);
  if (format == nullptr) {  // Python's users call their files model.pth, model.bin, …
    std::string name;
    if (together) {
      const auto look = [&]() -> absl::StatusOr<std::string> {
        return options.ranks->rank() == 0 ? FormatByContent(path) : "";
      };
      DDP_ASSIGN_OR_RETURN(name, options.ranks->Broadcast(CatchStatus("", look)));
    }
    if (name.empty()) {  // rank 0 sees no checkpoint; other ranks may
      together = false;
      options.broadcast = nullptr;
      name = FormatByContent(path);
    }
    if (!name.empty()) {
      DDP_ASSIGN_OR_RETURN(format, CreateFormat(name, options));
    }
  }
  if (format != nullptr) {
    if (together && !format->all_ranks_write()) {
      DDP_ASSIGN_OR_RETURN(std::optional<State> read,
                           ReadByRank0(*format, path, request, *options.ranks, options.broadcast));
      if (read.has_value()) return *std::move(read);
    }
    return format->Read(path, request);
  }
  return ReadUnknown(path, request, options);
}

}  // namespace ddp::checkpoint
