// Proves that a folder is one for all ranks: a file that rank 0 makes there is seen by the others.
//
//   DDP_RETURN_IF_ERROR(ProveShared("runs/a", ranks, {}));
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/coordinator.h"
#include "base/file.h"

namespace ddp::checkpoint {

struct SharedFolderOptions {
  // A rank looks this long for rank 0's file. NFS clients remember for some seconds that a name was
  // not there.
  absl::Duration limit = absl::Seconds(10);
  FileSystem* files = FileSystem::Default();  // not owned
};

// Collective; `directory` may be spelled differently on each rank. Rank 0 writes a random number to
// a hidden file, which the others must read there; afterwards rank 0 removes it.
// FailedPrecondition, the same on every rank: names the lowest rank that does not see it, its host,
// and rank 0's.
absl::Status ProveShared(const std::string& directory, const Coordinator& ranks,
                         const SharedFolderOptions& options);

}  // namespace ddp::checkpoint
