// Manages the checkpoints of one run in one folder: atomic saves, resuming, removal of old ones.
//
//   DDP_ASSIGN_OR_RETURN(auto manager, Manager::Create({.directory = "runs/a"}, ranks));
//   DDP_RETURN_IF_ERROR(manager->Save(EpochName(3), state).status());
//   DDP_ASSIGN_OR_RETURN(std::optional<Loaded> newest, manager->LoadNewest());
//
// Create, Save and LoadNewest are collective: all ranks call them, and if one rank fails, every
// rank returns its error, as with Coordinator::Agree. For a single process, pass a SingleRank.
// name.h has the names and their order: "epoch_N", "epoch_N_step_S", "step_S".
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/coordinator.h"
#include "base/file.h"
#include "base/options.h"
#include "checkpoint/format.h"
#include "checkpoint/name.h"
#include "checkpoint/state.h"

namespace ddp::checkpoint {

struct ManagerOptions {
  std::string directory;  // of one run; visible to all ranks
  std::string format = "pt";
  int keep = 0;  // how many of the newest checkpoints (names of name.h) to keep; 0: all
  ImplementationOptions implementations = ImplementationOptions::From<FormatRegistry>();
  FileSystem* files = FileSystem::Default();  // not owned; tests let its calls fail
};

constexpr auto OptionsOf(const ManagerOptions&) {
  return Options(
      Option("dir", &ManagerOptions::directory, "folder of checkpoints; empty: none")
          .OnAllRanksOrNone(),
      Option("format", &ManagerOptions::format, "checkpoint format").Lists(&FormatRegistry::Names),
      Option("keep", &ManagerOptions::keep, "number of newest checkpoints to keep; 0: all")
          .Alias("keep_checkpoints")
          .AtLeast(0)
          .AtMost(1e9),
      Inline(&ManagerOptions::implementations));
}

// OptionError, NotFound, with the linked formats, if `format` is not linked; but the default format
// may be missing where there is no directory. Programs call this beside ValidateOptions; Create
// calls it.
absl::Status Validate(const ManagerOptions& options);

// The options of mmengine's save_checkpoint.
struct SaveOptions {
  bool save_optimizer = true;        // false: omit the key "optimizer"
  bool save_param_scheduler = true;  // false: omit the key "scheduler"
  // Entries to add at the top level. Save returns AlreadyExists if a key exists.
  std::optional<c10::impl::GenericDict> extra_ckpt = std::nullopt;
  // May edit the state before it is written. Called last, on the ranks that write. Changes at the
  // top level do not affect the caller's state; nested values and tensors are shared with it.
  std::function<void(State&)> callback = nullptr;
};

constexpr auto OptionsOf(const SaveOptions&) {
  return Options(Option("save_optimizer", &SaveOptions::save_optimizer,
                        "include the optimizer's state in checkpoints"),
                 Option("save_param_scheduler", &SaveOptions::save_param_scheduler,
                        "include the learning-rate schedule in checkpoints"));
}

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
  // epoch. Rank 0 also removes temporaries of interrupted saves, unless a process is saving into
  // this folder. InvalidArgument: no directory, or different formats on the ranks. Errors of
  // Validate. `ranks` must outlive the manager.
  static absl::StatusOr<std::unique_ptr<Manager>> Create(ManagerOptions options,
                                                         const Coordinator& ranks);
  static void Create(ManagerOptions options, const Coordinator&& temporary) = delete;

  // Collective, with the same `name` and `options` on all ranks. Writes DIRECTORY/NAME + suffix
  // atomically: a temporary file or folder, fsync, rename, fsync of DIRECTORY. Readers see the old
  // or the new checkpoint. If any rank fails, the temporary is removed and an existing checkpoint
  // of that name stays (if only the last fsync fails, the new one is in place). Afterwards removes
  // the oldest checkpoints beyond `keep`. Returns the path.
  //
  // Only the ranks that write use `state` (see Format::all_ranks_write). InvalidArgument: `name`
  // has a slash or a leading dot or differs between ranks; shards do not fit their tensors, overlap
  // or leave elements out. FailedPrecondition: `name` is by steps alone and the folder's names are
  // by epochs, or the reverse; the file system cannot replace a folder atomically (NFS).
  // AlreadyExists: see SaveOptions::extra_ckpt. Otherwise errors of Format::Write.
  absl::StatusOr<std::string> Save(const std::string& name, State state,
                                   const SaveOptions& options = {});

  // Collective. The newest checkpoint in the folder that is intact on every rank; each rank reads
  // it with its own `request`. All ranks skip a checkpoint that any rank finds damaged, with a
  // warning that names file and reason. DataLoss if all are damaged. nullopt if the folder does not
  // exist or has no checkpoints. FailedPrecondition if it has names by epochs and names by steps
  // alone.
  absl::StatusOr<std::optional<Loaded>> LoadNewest(const ReadRequest& request = {});

  // Path of the newest checkpoint that passes Format::CheckComplete. Cheap: does not read tensors,
  // so LoadNewest may return an older one. Errors as LoadNewest. Not collective.
  absl::StatusOr<std::optional<std::string>> Newest() const;

  // Reads a checkpoint of any linked format, chosen by the suffix of `path`; a file with another
  // suffix is tried with each format. `options` are the formats'. Errors as Format::Read. Not
  // collective. Thread-safe.
  static absl::StatusOr<State> Load(const std::string& path, const ReadRequest& request = {},
                                    const FormatOptions& options = {});

 private:
  Manager(ManagerOptions options, std::unique_ptr<Format> format, const Coordinator& ranks);

  bool is_main() const { return ranks_.rank() == 0; }
  std::string PathOf(absl::string_view file) const;
  FormatOptions format_options() const;
  static void RemoveLeftovers(const ManagerOptions& options);
  absl::Status CheckUnmixed(const std::string& name) const;
  absl::Status Publish(std::string& temporary, const std::string& path);
  void RemoveOld(const std::string& saved);
  absl::StatusOr<std::vector<NamedFile>> Checkpoints() const;
  absl::StatusOr<std::string> NextComplete(std::vector<NamedFile>& files,
                                           std::vector<std::string>& damaged) const;
  absl::StatusOr<std::optional<std::string>> Unusable(const absl::Status& mine,
                                                      const std::string& path) const;

  ManagerOptions options_;
  std::unique_ptr<Format> format_;
  const Coordinator& ranks_;
};

}  // namespace ddp::checkpoint
