// The folders into which a run writes: no other run writes there meanwhile. Private to this folder.
//
//   HeldFolders folders(session);
//   DDP_RETURN_IF_ERROR(session.Agree(folders.Hold("log.dir", options.log.dir)));
#pragma once

#include <algorithm>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/file.h"
#include "base/option_error.h"
#include "base/writer_lock.h"
#include "ddp/session/session.h"

namespace ddp::trainer {

// Holds them until its end. Thread-compatible; not collective.
class HeldFolders {
 public:
  explicit HeldFolders(const session::Session& session) : session_(session) {}

  // On the main rank, which writes. OptionError for `option` if another run holds the folder. What
  // else is wrong with it is for those to report who use it.
  absl::Status Hold(absl::string_view option, const std::string& directory) {
    if (!session_.is_main() || directory.empty()) return absl::OkStatus();
    if (!MakeDirectories(directory).ok()) return absl::OkStatus();
    std::error_code ignored;
    // Logs and checkpoints may be in one folder.
    const bool is_held = std::any_of(locks_.begin(), locks_.end(), [&](const WriterLock& lock) {
      return std::filesystem::equivalent(lock.folder(), directory, ignored);
    });
    if (is_held) return absl::OkStatus();
    const launchers::Rank& place = session_.place();
    absl::StatusOr<WriterLock> lock =
        WriterLock::Take(directory, {.job = place.run_id, .life = place.restart_count});
    if (lock.ok()) locks_.push_back(*std::move(lock));
    return absl::IsFailedPrecondition(lock.status())
               ? OptionError(option, directory, lock.status().message(), lock.status().code())
               : absl::OkStatus();
  }

 private:
  const session::Session& session_;
  std::vector<WriterLock> locks_;
};

}  // namespace ddp::trainer
