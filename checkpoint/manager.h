// Manages the checkpoints of one run in one folder: atomic saves, resuming, removal of old ones.
//
//   DDP_ASSIGN_OR_RETURN(auto manager, Manager::Create({.directory = "runs/a"}, ranks));
//   DDP_RETURN_IF_ERROR(manager->Save(EpochName(3), state).status());
//   DDP_ASSIGN_OR_RETURN(std::optional<Loaded> newest, manager->LoadNewest());
//
// Create, Save, LoadNewest and LoadBest are collective: all ranks call them, and if one rank fails,
// every rank returns its error, as with Coordinator::Agree. For a single process, pass a
// SingleRank. name.h has the names and their order ("epoch_N", "epoch_N_step_S", "step_S"),
// folder.h what is on disk beside checkpoints, retention.h which ones are deleted.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/coordinator.h"
#include "base/file.h"
#include "base/options.h"
#include "checkpoint/folder.h"
#include "checkpoint/format.h"
#include "checkpoint/name.h"
#include "checkpoint/retention.h"
#include "checkpoint/state.h"

namespace ddp::checkpoint {

struct ManagerOptions {
  std::string directory;  // of one run; visible to all ranks
  std::string format = "pt";
  // Which checkpoints (names of name.h, of this format) a save leaves: those that any of these
  // rules keeps; all if none is set. See RetentionRules and ToDelete (retention.h) for what is kept
  // besides.
  int keep = 0;  // older name of keep_last
  int keep_last = 0;
  int keep_every = 0;
  double keep_hours = 0;
  std::string keep_best = "";  // see ParseBestMetric
  std::string verify = "never";
  std::string on_save_error = "stop";
  ImplementationOptions implementations = ImplementationOptions::From<FormatRegistry>();
  FileSystem* files = FileSystem::Default();  // not owned; tests let its calls fail
  BroadcastBytes broadcast = nullptr;         // of LoadNewest and LoadBest: see FormatOptions
  MoveToRank0 move = nullptr;                 // of Save: see Gathering (consolidate.h)

  // The following are set by the program, not by its user.
  // Only loads, and changes nothing on disk: the folder may be one in which this user cannot write.
  bool read_only = false;
  // The group in which these options stand in the program's, for errors of Create: "checkpoint".
  std::string group = {};
  // Create looks this long for rank 0's file in the folder (shared_folder.h).
  absl::Duration folder_limit = absl::Seconds(10);
};

constexpr auto OptionsOf(const ManagerOptions&) {
  return Options(
      Option("dir", &ManagerOptions::directory, "folder of checkpoints; empty: none")
          .OnAllRanksOrNone(),
      Option("format", &ManagerOptions::format, "checkpoint format").Lists(&WritableFormats),
      Option("keep", &ManagerOptions::keep, "older name of keep_last")
          .Incidental()
          .Alias("keep_checkpoints")
          .AtLeast(0)
          .AtMost(1e9),
      Option("keep_last", &ManagerOptions::keep_last,
             "number of newest checkpoints to keep, beside those that other keep_ options keep; "
             "all 0: keep all")
          .Incidental()
          .AtLeast(0)
          .AtMost(1e9),
      Option("keep_every", &ManagerOptions::keep_every,
             "keep checkpoints whose epoch (of a name that ends in a step: whose step) is a "
             "multiple of this; 0: none")
          .Incidental()
          .AtLeast(0)
          .AtMost(1e9),
      Option("keep_hours", &ManagerOptions::keep_hours,
             "keep one checkpoint per so many hours; 0: none")
          .Incidental()
          .AtLeast(0)
          .AtMost(1e6),
      Option("keep_best", &ManagerOptions::keep_best,
             "keep the checkpoint with the best value of a metric, or so many of them: "
             "test/accuracy:max, test/loss:min:3")
          .Incidental(),
      Option("verify", &ManagerOptions::verify,
             "read each checkpoint back before it gets its name: saved; or never")
          .Incidental()
          .OneOf("never", "saved"),
      Option("on_save_error", &ManagerOptions::on_save_error,
             "whether a run goes on after a checkpoint could not be written: stop, or continue")
          .Incidental()
          .OneOf("stop", "continue"),
      Inline(&ManagerOptions::implementations));
}

// OptionError: NotFound, with the linked formats, if `format` is not linked (but the default format
// may be missing where there is no directory); Unimplemented, with what to do instead, if it is
// only read; InvalidArgument if keep_best is no metric, or keep and keep_last differ. Programs call
// this beside ValidateOptions; Create calls it.
absl::Status Validate(const ManagerOptions& options);

// The options of mmengine's save_checkpoint, for every format.
struct SaveOptions {
  bool save_optimizer = true;        // false: omit the key "optimizer"
  bool save_param_scheduler = true;  // false: omit the key "scheduler"
  // Entries to add at the top level. Save returns AlreadyExists if a key exists.
  std::optional<c10::impl::GenericDict> extra_ckpt = std::nullopt;
  // May edit the state before it is written. Called last, on the ranks that write. Changes at the
  // top level do not affect the caller's state; nested values and tensors are shared with it.
  std::function<void(State&)> callback = nullptr;
  // Values at this moment, by name ("test/accuracy"), for ManagerOptions::keep_best. Rank 0's
  // count; they are not part of the checkpoint.
  std::map<std::string, double> metrics = {};
};

constexpr auto OptionsOf(const SaveOptions&) {
  return Options(Option("save_optimizer", &SaveOptions::save_optimizer,
                        "include the optimizer's state in checkpoints"),
                 Option("save_param_scheduler", &SaveOptions::save_param_scheduler,
                        "include the learning-rate schedule in checkpoints"));
}

struct LoadOptions {
  // May edit the state that was read. Called on each rank that reads, with what its ReadRequest
  // asks for: of tensors that it reads in parts, these are in State::sharded, and go with an entry
  // of the root that is removed. If it throws, loading fails; the checkpoint does not count as
  // damaged.
  std::function<void(State&)> callback = nullptr;
};

class Gathering;

// A checkpoint and its path.
struct Loaded {
  std::string path;
  State state;
};

// Thread-compatible.
class Manager {
 public:
  // Collective. Rank 0 creates the folder. The ranks that write test that they can write there, so
  // that PermissionDenied and the like, with path and reason, come at the start and not after an
  // epoch. Rank 0 also removes what interrupted saves left, unless a process is saving into this
  // folder. FailedPrecondition, naming rank and host, if a rank does not see rank 0's folder.
  // InvalidArgument: no directory, or different formats on the ranks. Errors of Validate. `ranks`
  // must outlive the manager.
  static absl::StatusOr<std::unique_ptr<Manager>> Create(ManagerOptions options,
                                                         const Coordinator& ranks);
  static void Create(ManagerOptions options, const Coordinator&& temporary) = delete;

  // Collective, with the same `name` and `options` on all ranks. Writes DIRECTORY/NAME + suffix
  // atomically: a temporary file or folder, fsync, rename, fsync of DIRECTORY. Readers see the old
  // or the new checkpoint. If any rank fails, the temporary is removed and an existing checkpoint
  // of that name stays (if only what comes after the rename fails, the new one is in place). With
  // verify=saved, rank 0 reads the temporary before it is renamed. Afterwards deletes old
  // checkpoints as ManagerOptions say. Where the disk has no room, it first deletes what they do
  // not keep, if the newest checkpoint is complete. Returns the path.
  //
  // If rank 0 alone writes (see Format::all_ranks_write), its `root` counts. It gets the per-rank
  // entries of all ranks, and tensors in parts one by one as it writes them (consolidate.h); where
  // it has a SaveOptions::callback, all of them before that is called. InvalidArgument: `name` has
  // a slash or a leading dot or differs between ranks; parts do not fit their tensors, overlap or
  // leave elements out. FailedPrecondition: `name` is by steps alone and the folder's names are by
  // epochs, or the reverse; the file system cannot replace a folder atomically (NFS); read_only.
  // AlreadyExists: see SaveOptions::extra_ckpt. ResourceExhausted: the disk is full, or, before
  // anything is written, has less room than the last checkpoint took. DataLoss: it was read back
  // with other contents. Otherwise errors of Format::Write.
  //
  // With on_save_error=continue, rank 0 also logs a warning that the checkpoint was not written.
  absl::StatusOr<std::string> Save(const std::string& name, State state,
                                   const SaveOptions& options = {});

  // What this rank needs to keep of the state for the next Save, with these options, which writes
  // the same: where all ranks write, without what others write. All of it where any rank has
  // extra_ckpt or a callback. Shares memory with `state`.
  //
  // All ranks call it, with the same `options`, and then Save, unless AgreeToSave says that a rank
  // cannot. The first call is collective; errors of Format::Write. Later calls ask no other rank,
  // and do not fail. If the state then has other tensors than at the first call, or others of shape
  // or dtype, the result is all of it, and Save compares the ranks before anything is written: if
  // it has changed on all, the next call is again collective; if not on all, Save returns
  // InvalidArgument on all.
  absl::StatusOr<State> WhatThisRankWrites(State state, const SaveOptions& options);

  // Collective, over `ranks`: those of this manager, or a coordinator of the same ranks where this
  // thread has another. Whether all ranks have what they need for a Save, such as the memory for a
  // copy of the state; `mine`: whether this one has. If one has not, the result on all is the error
  // of the lowest such rank, which is one of Save: rank 0 logs the warning, and GoesOnAfter says
  // whether the run goes on.
  absl::Status AgreeToSave(const Coordinator& ranks, const absl::Status& mine) const;

  // Whether a run goes on after Save or AgreeToSave returned `saved`: true if it is OK, or if
  // on_save_error is continue and all ranks know that this try failed. False where another try
  // would fail, too, as with state that the format cannot hold, and where a rank does not answer.
  // The same on all ranks.
  //
  //   const absl::Status saved = manager->Save(name, state).status();
  //   if (!manager->GoesOnAfter(saved)) return saved;
  bool GoesOnAfter(const absl::Status& saved) const;

  // Collective. The newest checkpoint in the folder that is intact on every rank; each rank reads
  // it with its own `request`. All ranks skip a checkpoint that any rank finds damaged, with a
  // warning that names file and reason, and rank 0 renames it (Folder::Quarantine), unless
  // read_only. DataLoss if all are damaged or abandoned, also if they were renamed earlier. Any
  // other failure ends the search: it may be temporary. nullopt if the folder does not exist or has
  // no checkpoints. FailedPrecondition if it has names by epochs and names by steps alone.
  absl::StatusOr<std::optional<Loaded>> LoadNewest(const ReadRequest& request = {},
                                                   const LoadOptions& options = {});

  // Whether each rank writes what it has (Format::all_ranks_write), or rank 0 the whole. Not
  // collective.
  bool all_ranks_write() const { return format_->all_ranks_write(); }

  // Collective. The same, in the order of a metric: "test/accuracy:max"; empty: of keep_best.
  // InvalidArgument if there is none or it has another form; NotFound, with the metrics that there
  // are, if there are checkpoints but none with this metric.
  absl::StatusOr<std::optional<Loaded>> LoadBest(absl::string_view metric = "",
                                                 const ReadRequest& request = {},
                                                 const LoadOptions& options = {});

  // Collective. A run that goes back calls it. Renames the checkpoints that are newer than
  // `newest`, so that they do not count any more (Folder::Abandon), with a warning for each, the
  // newest first. They may have the format of another run. False, and nothing is renamed: there is
  // no other that passes Format::CheckComplete.
  absl::StatusOr<bool> AbandonNewerThan(const CheckpointName& newest);

  // Returns where Save puts the checkpoint of this name. Not collective.
  std::string PathOf(const std::string& name) const;

  // Path of the checkpoint that LoadNewest, or LoadBest, would try first among those that pass
  // Format::CheckComplete; on rank 0 without those that a load of this manager has found damaged.
  // Cheap: does not read tensors, so loading may return another one. Renames nothing. Errors as
  // there. Not collective.
  absl::StatusOr<std::optional<std::string>> Newest() const;
  absl::StatusOr<std::optional<std::string>> Best(absl::string_view metric = "") const;

  // Reads a checkpoint of any linked format, chosen by the suffix of `path`; a file with another
  // suffix is tried with each format. `formats` are the formats' options. Errors as Format::Read.
  // Not collective, but for FormatOptions::broadcast, with which all ranks give paths of one name.
  // Thread-safe.
  static absl::StatusOr<State> Load(const std::string& path, const ReadRequest& request = {},
                                    const FormatOptions& formats = {},
                                    const LoadOptions& options = {});

  // A run's folder, with the suffixes of all linked formats: to list, pin and unpin.
  static Folder FolderAt(const std::string& directory, FileSystem* files = FileSystem::Default());

 private:
  // A checkpoint that is damaged, as it was when that was found.
  struct Damage {
    std::string file;
    std::string reason;
    FileIdentity seen;
  };
  struct Attempt;  // one Save

  Manager(ManagerOptions options, std::unique_ptr<Format> format, const Coordinator& ranks);

  bool is_main() const { return ranks_.rank() == 0; }
  FormatOptions format_options() const;
  Folder OwnFolder() const;
  absl::StatusOr<std::unique_ptr<Gathering>> Gather(State state, const SaveOptions& options,
                                                    absl::string_view saving) const;
  absl::Status Begin(Attempt& attempt);
  absl::Status CheckStructure(const std::vector<absl::StatusOr<std::string>>& begun);
  absl::Status Publish(Attempt& attempt, const std::map<std::string, double>& metrics);
  absl::Status NotSaved(absl::Status failed) const;
  void WarnOfUnknownMetric(const std::map<std::string, double>& metrics);
  void RemoveOld(const std::string& saved);
  void MakeRoom();
  bool IsUnusable(const std::string& file) const;
  absl::StatusOr<std::vector<std::string>> InOrder(std::optional<absl::string_view> metric) const;
  absl::StatusOr<std::vector<std::string>> ByAge() const;
  absl::StatusOr<std::vector<std::string>> ByMetric(absl::string_view metric) const;
  absl::StatusOr<std::string> NextComplete(std::vector<std::string>& files,
                                           std::vector<Damage>& damaged, bool* changed) const;
  absl::Status NoneLeft(std::optional<absl::string_view> metric,
                        const std::vector<Damage>& damaged) const;
  absl::StatusOr<std::optional<std::string>> First(std::optional<absl::string_view> metric) const;
  absl::StatusOr<std::optional<Loaded>> LoadFirst(std::optional<absl::string_view> metric,
                                                  const ReadRequest& request,
                                                  const LoadOptions& options);
  absl::StatusOr<std::optional<std::string>> Unusable(absl::Status mine,
                                                      const std::string& path) const;
  void Quarantine(const std::vector<Damage>& damaged);
  static absl::StatusOr<State> Read(const std::string& path, const ReadRequest& request,
                                    const FormatOptions& options);

  ManagerOptions options_;
  std::unique_ptr<Format> format_;
  const Coordinator& ranks_;
  Folder folder_;  // all formats
  // Of the state for the next Save: it is not what the format has planned for.
  bool has_new_structure_ = false;
  // The following are used on rank 0.
  RetentionRules rules_;
  std::map<std::string, Damage> unusable_;  // not renamed; by name
  std::vector<std::string> leftovers_;      // temporaries to remove once it is safe
  std::optional<uint64_t> bytes_ = {};      // of the last save
  bool has_warned_of_metric_ = false;
};

}  // namespace ddp::checkpoint
