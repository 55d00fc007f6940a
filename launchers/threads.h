// How many cores and threads the ranks of this process have. Cores are those that it may run on; a
// job of SLURM that was asked for cores per task has no more, since not all clusters bind tasks to
// their cores.
//
//   at::set_num_threads(ThreadsOfRank(rank, Environment::FromProcess()));
#pragma once

#include "absl/strings/string_view.h"
#include "base/environment.h"
#include "launchers/rank.h"

namespace ddp::launchers {

// The cores of all ranks that this process is or starts, at least 1. `root`, for tests, is that of
// AvailableCores. Thread-safe.
int CoresOfTask(const Environment& env, absl::string_view root = "");

// The threads of a rank, at least 1: the cores that its launcher has bound it to or, if it is not
// bound, its share of all. Thread-safe.
int ThreadsOfRank(const Rank& rank, const Environment& env);

}  // namespace ddp::launchers
