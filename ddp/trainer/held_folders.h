// The folders into which a run writes: no other run writes there meanwhile, and a later life of the
// job knows what is its own. Private to this folder.
//
//   HeldFolders folders(session);
//   DDP_RETURN_IF_ERROR(session.Agree(folders.Hold("log.dir", options.log.dir)));
//   if (!folders.IsOwn(options.log.dir)) …  // refuses what is there already
//   folders.Claim(*run_log);
#pragma once

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/option_error.h"
#include "base/writer_lock.h"
#include "ddp/session/session.h"
#include "ddp/trainer/run_log.h"

namespace ddp::trainer {

// Holds them until its end. Thread-compatible; not collective: the main rank reads and writes.
class HeldFolders {
 public:
  explicit HeldFolders(const session::Session& session) : session_(session) {}

  // Holds the folder on the main rank, which writes. OptionError for `option` if another run holds
  // the folder. A later life of the job waits for the end of the former, which may save yet, or
  // notice late that its node is lost; if that takes too long it ends as one that may be begun
  // again. What else is wrong with the folder is for those to report who use it.
  absl::Status Hold(absl::string_view option, const std::string& directory) {
    if (!session_.is_main() || directory.empty()) return absl::OkStatus();
    if (!MakeDirectories(directory).ok()) return absl::OkStatus();
    std::error_code ignored;
    // Logs and checkpoints may be in one folder.
    const bool is_held = std::any_of(locks_.begin(), locks_.end(), [&](const WriterLock& lock) {
      return std::filesystem::equivalent(lock.folder(), directory, ignored);
    });
    if (is_held) return absl::OkStatus();
    WriterLockOptions options = {.job = job(),
                                 .job_is_shared = session_.place().job_is_shared,
                                 .life = session_.place().restart_count};
    // The other ranks wait for this one as long as work_timeout.
    if (options.life > 0) options.grace = 0.9 * session_.work_timeout();
    options.waits = [&](absl::string_view holder) { Tell(directory, holder, options.grace); };
    absl::StatusOr<WriterLock> lock = WriterLock::Take(directory, options);
    if (lock.ok()) locks_.push_back(*std::move(lock));
    if (absl::IsAborted(lock.status())) {
      return WithExitCode(
          OptionError(option, directory, lock.status().message(), lock.status().code()), 1);
    }
    return absl::IsFailedPrecondition(lock.status())
               ? OptionError(option, directory, lock.status().message(), lock.status().code())
               : absl::OkStatus();
  }

  // Whether what is in `directory` is of an earlier life of this job, which goes on with it
  // whatever it began from. That this is a later life is not enough: the first may have ended
  // before it was refused there.
  bool IsOwn(const std::string& directory) const {
    return session_.place().restart_count > 0 && OwnerOf(directory) == job();
  }

  // Says, for the refusal of what is in `directory`, whose it is in a later life of a job, which
  // may have taken it for its own; else empty.
  std::string Whose(const std::string& directory) const {
    if (session_.place().restart_count == 0 || IsOwn(directory)) return "";
    const std::string owner = OwnerOf(directory);
    return absl::StrCat(", of ", owner.empty() ? "an unknown job" : absl::StrCat("job ", owner),
                        "; this is a later life of job ", job());
  }

  // That refusal, AlreadyExists, where it is checkpoints. `newest`: one of them, or why they cannot
  // be read; `to_go_on`: what the user can do besides choosing another folder, or empty.
  absl::Status HoldsCheckpoints(const std::string& directory, absl::string_view newest,
                                absl::string_view to_go_on) const {
    return OptionError(
        "checkpoint.dir", directory,
        absl::StrCat("holds a run's checkpoints (", newest, Whose(directory), "); ", to_go_on,
                     to_go_on.empty() ? "" : ", or ", "choose another folder"),
        absl::StatusCode::kAlreadyExists);
  }

  // Makes this job the owner of the folders that are held: once nothing refuses the run any more,
  // and before it records a step or saves. Where that fails the run goes on, with a warning: what
  // comes next into the folder fails likewise, or a later life is refused.
  void Claim(RunLog& log) {
    if (std::exchange(has_claimed_, true)) return;
    for (const WriterLock& lock : locks_) {
      const absl::Status claimed = lock.Claim();
      if (claimed.ok()) continue;
      log.Warn(absl::StrCat("cannot note whose ", lock.folder(),
                            " is, so that this job, begun again, ",
                            "needs resume=auto to go on from there: ", claimed.message()));
    }
  }

 private:
  static void Tell(const std::string& directory, absl::string_view holder, absl::Duration grace) {
    const absl::StatusOr<std::unique_ptr<RunLog>> log = RunLog::Create("", {}, /*progress=*/false);
    if (!log.ok()) return;
    (*log)->Warn(absl::StrCat("waits for the end of the former life of this job, ", holder,
                              ", which writes to ", directory, ", for at most ",
                              absl::FormatDuration(grace)));
  }

  const std::string& job() const {
    const launchers::Rank& place = session_.place();
    return place.job.empty() ? place.run_id : place.job;
  }

  const session::Session& session_;
  std::vector<WriterLock> locks_;
  bool has_claimed_ = false;
};

}  // namespace ddp::trainer
