// How many threads of this process can run at a time.
#pragma once

#include "absl/strings/string_view.h"

namespace ddp {

// Cores that the calling thread may run on, at least 1: what taskset, SLURM or a cpuset left of the
// machine, and no more than a quota of processor time (a container's "--cpus") pays for, rounded
// up. Ranks that are bound to a core each see 1. Thread-safe; reads a few files. `root` stands
// before their paths: for tests.
int AvailableCores(absl::string_view root = "");

// The same without regard to quotas: 1 says that the thread has been bound to a core.
int BoundCores();

}  // namespace ddp
