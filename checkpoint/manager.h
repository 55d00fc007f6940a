// The checkpoints of one run in one folder: named, written atomically, found again.
//
//   DDP_ASSIGN_OR_RETURN(auto manager, Manager::Create({.directory = "runs/a"}, ranks));
//   DDP_RETURN_IF_ERROR(manager->Save(EpochName(3), state).status());
//   DDP_ASSIGN_OR_RETURN(std::optional<Loaded> newest, manager->LoadNewest());
//
// Create, Save and LoadNewest are collective: all ranks call them, and the failure of one rank is
// every rank's result, as Coordinator::Agree gives it. SingleRank makes them calls of one process.
// Names and their order are name.h's: "epoch_N", "epoch_N_step_S", "step_S".
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
  std::string directory;  // of one run; seen by all ranks
  std::string format = "pt";
  int keep = 0;  // of the names of name.h, how many of the newest to keep; 0 keeps all
  ImplementationOptions implementations = ImplementationOptions::From<FormatRegistry>();
  FileSystem* files = FileSystem::Default();  // not owned; tests let its calls fail
};

constexpr auto OptionsOf(const ManagerOptions&) {
  return Options(Option("dir", &ManagerOptions::directory, "folder of checkpoints; empty: none"),
                 Option("format", &ManagerOptions::format, "of checkpoints")
                     .OneOfThese(&FormatRegistry::Names),
                 Option("keep", &ManagerOptions::keep, "newest checkpoints to keep; 0: all")
                     .Alias("keep_checkpoints")
                     .AtLeast(0)
                     .AtMost(1e9),
                 Inline(&ManagerOptions::implementations));
}

// mmengine's save_checkpoint options.
struct SaveOptions {
  bool save_optimizer = true;        // else the key "optimizer" is left out
  bool save_param_scheduler = true;  // else the key "scheduler" is left out
  // Entries added at the top level. AlreadyExists if a key is taken.
  std::optional<c10::impl::GenericDict> extra_ckpt = std::nullopt;
  // May edit the state before it is written; called last, on the ranks that write. What it adds to
  // or removes from the top level does not reach the caller's state; values are shared with it.
  std::function<void(State&)> callback = nullptr;
};

constexpr auto OptionsOf(const SaveOptions&) {
  return Options(
      Option("save_optimizer", &SaveOptions::save_optimizer, "hold the optimizer's state"),
      Option("save_param_scheduler", &SaveOptions::save_param_scheduler, "hold the schedule"));
}

// A checkpoint, and where it was found.
struct Loaded {
  std::string path;
  State state;
};

// Thread-compatible.
class Manager {
 public:
  // Collective. Rank 0 makes the folder and proves that it can write there (every rank does, for
  // formats that all ranks write): PermissionDenied or the like, with path and reason, at the start
  // and not after an epoch. It also removes what interrupted saves left behind, unless a save into
  // this folder is under way in any process. `ranks` outlives the manager.
  static absl::StatusOr<std::unique_ptr<Manager>> Create(ManagerOptions options,
                                                         const Coordinator& ranks);
  static void Create(ManagerOptions options, const Coordinator&& temporary) = delete;

  // Collective, with one name and equal `options` on all ranks. Writes DIRECTORY/NAME + suffix:
  // a temporary file or folder, fsync, rename, fsync of the folder. A reader sees the old
  // checkpoint or the new one, never a part. If anything fails on any rank, the temporary is
  // removed and what was there stays (if only the last fsync fails, the new one is in place). Then
  // removes the oldest that are more than `keep`. Returns the path.
  //
  // Only the ranks that write look at `state` (see Format::all_ranks_write). InvalidArgument: a
  // name with a slash or a leading dot, not the same on all ranks, shards that do not fit their
  // tensors or that leave elements out. FailedPrecondition: `name` is by steps alone and the
  // folder's are by epochs, or the reverse; a folder that this file system cannot replace in one
  // step (NFS).
  absl::StatusOr<std::string> Save(const std::string& name, State state,
                                   const SaveOptions& options = {});

  // Collective. The newest checkpoint of the folder, by name.h's order, that every rank can read;
  // each rank reads it once, with its own `request`. Rank 0 chooses among the complete ones. One
  // that turns out damaged, on any rank, is passed over by all with a warning that names file and
  // reason, unless nothing else is left: then DataLoss. nullopt if the folder is absent or has
  // none. FailedPrecondition if it has names by epochs beside names by steps alone.
  absl::StatusOr<std::optional<Loaded>> LoadNewest(const ReadRequest& request = {});

  // Path of the newest complete checkpoint. Not collective, and cheap: Format::CheckComplete tells
  // what was cut off, not damage inside a tensor, so LoadNewest may come to an older one. Errors as
  // LoadNewest.
  absl::StatusOr<std::optional<std::string>> Newest() const;

  // Reads a checkpoint of any linked format, chosen by suffix; a file of another suffix is of the
  // first format that can read it. NotFound, DataLoss, InvalidArgument as Format::Read. Not
  // collective.
  static absl::StatusOr<State> Load(const std::string& path, const ReadRequest& request = {});

 private:
  Manager(ManagerOptions options, std::unique_ptr<Format> format, const Coordinator& ranks);

  bool is_main() const { return ranks_.rank() == 0; }
  std::string PathOf(absl::string_view file) const;
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
