// How many threads of this process can run at a time.
#pragma once

namespace ddp {

// Cores that the calling thread may run on, at least 1: what taskset, SLURM or a cpuset left of the
// machine. Ranks that are bound to a core each see 1. Thread-safe.
int AvailableCores();

}  // namespace ddp
