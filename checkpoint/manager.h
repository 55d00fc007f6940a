// The checkpoints of one run in one folder: named, written atomically, found again.
//
//   DDP_ASSIGN_OR_RETURN(auto manager, Manager::Create({.directory = "runs/a/checkpoints"}));
//   DDP_RETURN_IF_ERROR(manager->Save("epoch_3", state).status());
//   DDP_ASSIGN_OR_RETURN(std::optional<Loaded> newest, manager->LoadNewest());
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file.h"
#include "base/options.h"
#include "checkpoint/format.h"
#include "checkpoint/state.h"

namespace ddp::checkpoint {

struct ManagerOptions {
  std::string directory;
  std::string format = "pt";
  int rank = 0;  // of this process; rank 0 writes (see Format::all_ranks_write)
  int keep = 0;  // of the names "epoch_N", how many of the newest to keep; 0 keeps all
  FileSystem* files = FileSystem::Default();  // not owned; tests let its calls fail
};

constexpr auto OptionsOf(const ManagerOptions&) {
  return Options(Option("dir", &ManagerOptions::directory, "folder of checkpoints; empty: none"),
                 Option("format", &ManagerOptions::format, "of checkpoints")
                     .OneOfThese(&FormatRegistry::Names),
                 Option("keep", &ManagerOptions::keep, "newest checkpoints to keep; 0: all")
                     .Alias("keep_checkpoints")
                     .AtLeast(0)
                     .AtMost(1e9));
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
  // Rank 0 makes the folder and proves that it can write there: PermissionDenied or the like, with
  // path and reason, at the start and not after an epoch. It also removes what interrupted saves
  // left behind, unless a save into this folder is under way in any process.
  static absl::StatusOr<std::unique_ptr<Manager>> Create(ManagerOptions options);

  // Writes DIRECTORY/NAME + suffix: temporary file, fsync, rename, fsync of the folder. A reader
  // sees the old file or the new one, never a part; on failure the temporary file is gone and what
  // was there stays. Returns the path. On ranks that do not write it returns at once with the path:
  // not collective. InvalidArgument for a name with a slash or a leading dot.
  absl::StatusOr<std::string> Save(const std::string& name, State state,
                                   const SaveOptions& options = {});

  // Path of the newest complete checkpoint of the folder: of the names "epoch_N" the greatest N.
  // Files that are damaged are passed over with a warning that names file and reason, unless
  // nothing else is left: then DataLoss. nullopt if the folder is absent or has none. To know that
  // it is complete, all of it is read; use LoadNewest to have it as well. Not collective: ranks
  // that must agree take rank 0's answer.
  absl::StatusOr<std::optional<std::string>> Newest() const;
  absl::StatusOr<std::optional<Loaded>> LoadNewest() const;

  // Reads a checkpoint of any linked format, chosen by suffix; a file of another suffix is of the
  // first format that can read it. NotFound, DataLoss as Format::Read.
  static absl::StatusOr<State> Load(const std::string& path);

 private:
  Manager(ManagerOptions options, std::unique_ptr<Format> format);
  static void RemoveLeftovers(const ManagerOptions& options);
  void RemoveOld();

  ManagerOptions options_;
  std::unique_ptr<Format> format_;
};

}  // namespace ddp::checkpoint
