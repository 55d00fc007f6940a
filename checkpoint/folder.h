// A run's folder of checkpoints on disk: which there are, what is known of each, damaged ones.
// Needs no torch; checkpoints are files or folders whose contents are their format's business.
//
//   Folder folder("runs/a", {".pt"});
//   DDP_ASSIGN_OR_RETURN(std::vector<NamedFile> newest_last, folder.List());
//   DDP_RETURN_IF_ERROR(folder.Pin("epoch_3.pt"));
//   DDP_RETURN_IF_ERROR(folder.Remove("epoch_2.pt"));
//
// Beside a checkpoint "epoch_3.pt" there may be
//   .epoch_3.pt.json     its notes: when it was saved, metrics, whether it was read back
//   .epoch_3.pt.pinned   an empty file: it is never deleted
// Both may be lost, as when someone copies the visible files only; then the time is the file's, no
// metrics are known, and it is not pinned. They are files of their own because the same state
// must give the same checkpoint, byte by byte; and two, because a tool may pin while a run saves.
//
// A checkpoint that was found to be damaged is "epoch_3.pt.damaged", or "epoch_3.pt.damaged.2" if
// there is one of that name; one that a run has rolled back past is "epoch_3.pt.abandoned"
// likewise. Neither counts as a checkpoint.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "checkpoint/name.h"
#include "checkpoint/retention.h"

namespace ddp::checkpoint {

// A dry run saves into a folder of this template (mkdtemp) in the run's folder.
inline constexpr absl::string_view kDryRunFolder = ".dry_run.XXXXXX";

// What a run notes about a checkpoint beside it.
struct Notes {
  absl::Time time = absl::InfinitePast();  // of the save
  std::map<std::string, double> metrics = {};
  bool verified = false;  // was read back after it was written

  friend bool operator==(const Notes&, const Notes&) = default;
};

// JSON: {"time": "2026-01-31T12:00:00.5+00:00", "metrics": {"test/accuracy": 0.9}, "verified":
// true}
std::string ToText(const Notes& notes);

// nullopt if `text` is something else. Entries that it does not know are ignored.
std::optional<Notes> ParseNotes(absl::string_view text);

// "epoch_3.pt" of "epoch_3.pt.damaged" and "epoch_3.pt.damaged.2", as Folder::Quarantine names
// them; "" of any other name.
std::string DamagedOf(absl::string_view file);
// The same of "epoch_3.pt.abandoned", as Folder::Abandon names them.
std::string AbandonedOf(absl::string_view file);

// A file or folder on disk, by which to tell later whether it was replaced.
struct FileIdentity {
  dev_t device = 0;
  ino_t inode = 0;
  absl::Time changed = absl::InfinitePast();  // its contents, or entries of the folder itself

  friend bool operator==(const FileIdentity&, const FileIdentity&) = default;
};

// The errors of errno where there is no such file.
absl::StatusOr<FileIdentity> IdentityOf(const std::string& path);

// Whether what was `seen` there was replaced, or removed, or began to be removed, since.
bool HasChanged(const std::string& path, const absl::StatusOr<FileIdentity>& seen);

// Bytes of a file, or of all files below a folder; 0 for what cannot be read.
uint64_t BytesOnDisk(const std::string& path);

// Asks the system to forget what it holds in memory of a file, or of all files below a folder, that
// was fsynced, so that the next read is of the disk. It may not do so.
void DropFromCache(const std::string& path);

// Creates `path` and its parents, as MakeDirectories does, so that they survive a power failure.
absl::Status MakeDurableDirectories(const std::string& path,
                                    FileSystem* files = FileSystem::Default());

// Thread-safe. `files` must outlive it. File names are last path components, with the suffix.
class Folder {
 public:
  // `suffixes`: of the formats whose files count as checkpoints.
  Folder(std::string directory, std::vector<std::string> suffixes,
         FileSystem* files = FileSystem::Default())
      : directory_(std::move(directory)), suffixes_(std::move(suffixes)), files_(files) {}

  const std::string& directory() const { return directory_; }
  std::string PathOf(absl::string_view file) const;

  // Files and folders that are named as checkpoints are, oldest first; of one name in several
  // formats the one that was saved first. Errors of SortByAge and of ListDirectory: NotFound if
  // there is no such folder.
  absl::StatusOr<std::vector<NamedFile>> List() const;

  // The same, with what is known of each.
  absl::StatusOr<std::vector<Candidate>> Candidates() const;

  // Names of what Quarantine, and Abandon, has renamed.
  absl::StatusOr<std::vector<std::string>> Damaged() const;
  absl::StatusOr<std::vector<std::string>> Abandoned() const;

  // nullopt: there are none, or they cannot be read.
  std::optional<Notes> NotesOf(absl::string_view file) const;
  std::string NotesPathOf(absl::string_view file) const;

  // A pinned checkpoint is not deleted by any rule. OK if it is pinned, or not pinned, already. Pin
  // is durable. NotFound if there is no such checkpoint.
  absl::Status Pin(absl::string_view file) const;
  absl::Status Unpin(absl::string_view file) const;
  // It is also true if it cannot be told.
  bool IsPinned(absl::string_view file) const;

  // Deletes a checkpoint and then what is beside it. A folder is hidden first, durably, so that a
  // half deleted one is never seen. OK if there is none.
  absl::Status Remove(absl::string_view file) const;

  // Renames a checkpoint to "FILE.damaged" and returns that name. The file stays as it was and ""
  // is returned if it is not `seen` any more, since another job has renamed or replaced it, or if
  // another process is saving into the folder.
  absl::StatusOr<std::string> Quarantine(absl::string_view file, const FileIdentity& seen) const;

  // Renames a checkpoint to "FILE.abandoned" and returns that name; "" if there is none.
  absl::StatusOr<std::string> Abandon(absl::string_view file) const;

  // Removes temporaries of interrupted saves, notes and pins without a checkpoint, and folders of
  // dry runs that were killed, which are a day old and held by no process. The caller makes sure
  // that nobody is saving.
  void RemoveLeftovers() const;

  // ResourceExhausted, with the numbers, if the file system has less than `bytes` free for this
  // user. OK where it does not say.
  absl::Status CheckRoom(uint64_t bytes) const;

 private:
  std::string PinPathOf(absl::string_view file) const;
  absl::StatusOr<std::vector<std::string>> SetAsideAs(absl::string_view suffix) const;
  absl::StatusOr<std::string> SetAside(absl::string_view file, absl::string_view suffix) const;
  void RemoveBeside(absl::string_view file) const;

  std::string directory_;
  std::vector<std::string> suffixes_;
  FileSystem* files_;
};

}  // namespace ddp::checkpoint
