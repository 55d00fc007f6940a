// One writer per folder: a run holds its folders of logs and checkpoints, so that no second run
// writes into them, on this machine or another; and each folder has one owner, the job that was the
// last to write there, so that a later life of a job knows its own.
//
//   DDP_ASSIGN_OR_RETURN(WriterLock lock,
//                        WriterLock::Take("runs/a", {.job = "slurm-4711", .life = 1}));
//   if (OwnerOf("runs/a") != "slurm-4711") …  // what is there is another job's
//   DDP_RETURN_IF_ERROR(lock.Claim());
//   …  // write to runs/a
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"

namespace ddp {

struct WriterLockOptions {
  // Names the job among all jobs that may use the folder: Rank::job. A process with the job of the
  // holder is a later life of it, and waits for its end: a scheduler may begin a job again while a
  // process of the former life, on a node that it has lost, is still about to end.
  std::string job = "none";
  // Whether several runs may have one job at the same time, as in one allocation of SLURM: a
  // process with the job of the holder is a later life only if `life` is above 0 then.
  bool job_is_shared = false;
  // The job was begun again this often. Jobs whose name is "none" are one job if this is above 0.
  int life = 0;
  absl::Duration grace = absl::Minutes(1);     // how long a later life waits
  absl::Duration patience = absl::Seconds(1);  // how long another run waits: one may just be ending
  // Called once `patience` is over, if this life waits longer, with host, process id and job of the
  // holder. Null: not called.
  std::function<void(absl::string_view holder)> waits = nullptr;
};

// An advisory lock (flock) on FOLDER/.writer, which has host, process id and job of the holder. The
// kernel releases it when the process ends, in whatever way; the destructor removes the file, too.
// Movable; owns a descriptor, which programs that this process executes do not inherit. A process
// that takes a folder twice is refused like another.
class WriterLock {
 public:
  static constexpr char kFile[] = ".writer";

  // FailedPrecondition if another run holds `folder`; Aborted if a former life of this job, which
  // was begun again, holds it after `grace`, and may do so no longer when it is begun once more.
  // The message names both, as a problem of the folder: "is written by another run, …". On file
  // systems without locks nothing is held, and nobody refused. Errors of base/file.h: the folder
  // must exist.
  static absl::StatusOr<WriterLock> Take(const std::string& folder,
                                         const WriterLockOptions& options);
  WriterLock(WriterLock&&) = default;  // leaves the other without a file
  WriterLock& operator=(WriterLock&&) = delete;
  ~WriterLock();

  const std::string& folder() const { return folder_; }

  // Makes the job the folder's owner, durably and beyond this lock. A run that may go on with what
  // is there, or finds nothing, calls it before it writes. Errors of WriteFileAtomically.
  absl::Status Claim() const;

 private:
  WriterLock(std::string folder, std::string job, UniqueFd file)
      : folder_(std::move(folder)), job_(std::move(job)), file_(std::move(file)) {}

  std::string folder_;
  std::string job_;
  UniqueFd file_;
};

// The job that was the last to claim `folder`, from FOLDER/.job; empty if none was, as in a folder
// of an older version, or if that cannot be read. Thread-safe.
std::string OwnerOf(const std::string& folder);

}  // namespace ddp
