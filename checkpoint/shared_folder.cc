#include "checkpoint/shared_folder.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/host_name.h"
#include "base/status.h"

namespace ddp::checkpoint {
namespace {

// Tries until `limit`; the last reason why the file is not there, or not the same.
absl::Status Find(const std::string& path, const std::string& expected, absl::Duration limit) {
  const absl::Time deadline = absl::Now() + limit;
  for (absl::Duration pause = absl::Milliseconds(2);;
       pause = std::min(pause * 2, absl::Seconds(1))) {
    // Listing makes an NFS client ask the server again.
    ListDirectory(DirectoryOf(path)).status().IgnoreError();
    const absl::StatusOr<std::string> found = ReadFile(path);
    if (found.ok() && *found == expected) return absl::OkStatus();
    if (absl::Now() >= deadline) {
      return found.ok() ? absl::DataLossError("it has other contents") : found.status();
    }
    absl::SleepFor(std::min(pause, deadline - absl::Now()));
  }
}

}  // namespace

absl::Status ProveShared(const std::string& directory, const Coordinator& ranks,
                         const SharedFolderOptions& options) {
  if (ranks.size() == 1) return absl::OkStatus();
  const bool is_main = ranks.rank() == 0;
  // If this process is killed, the file is one more temporary to remove at the next start. Another
  // job that starts now does not remove it under the lock; without locks (NFS) none are removed.
  std::optional<DirectoryLock> lock;
  const std::string path = TemporaryName(absl::StrCat(directory, "/shared"));
  absl::Cleanup remove = [&] {
    if (is_main) options.files->Unlink(path.c_str());
  };
  const auto make = [&]() -> absl::StatusOr<std::string> {
    if (!is_main) return "";
    absl::StatusOr<DirectoryLock> shared = DirectoryLock::Shared(directory);
    if (shared.ok()) lock.emplace(*std::move(shared));
    const std::string name = path.substr(path.rfind('/') + 1);
    DDP_ASSIGN_OR_RETURN(FileWriter writer, FileWriter::Create(path, options.files));
    DDP_RETURN_IF_ERROR(writer.Append(name));
    return absl::StrJoin({name, HostName(), directory}, "\n");
  };
  DDP_ASSIGN_OR_RETURN(const std::string made, ranks.Broadcast(make()));
  const std::vector<std::string> of_rank_0 = absl::StrSplit(made, absl::MaxSplits('\n', 2));
  absl::Status seen;
  if (!is_main) {
    seen = Find(absl::StrCat(directory, "/", of_rank_0[0]), of_rank_0[0], options.limit);
    if (!seen.ok()) {
      seen = absl::FailedPreconditionError(absl::StrCat(
          "the checkpoint folder ", directory, " on host ", HostName(), " is not rank 0's, ",
          of_rank_0[2], " on host ", of_rank_0[1], ": what rank 0 writes there is not seen here (",
          seen.message(), "); choose a folder that all ranks share"));
    }
  }
  return ranks.Agree(seen);
}

}  // namespace ddp::checkpoint
