// Runs of many cases or steps, for :rank; too long for a test.
//
//   int failures = RunCasesInThreads({.backend = "gloo", .full = true});
#pragma once

#include <cstdint>
#include <string>

#include "backends/conformance/groups.h"

namespace ddp::backends::conformance {

struct RunOptions {
  std::string backend;
  bool full = false;   // the full product; otherwise the cover of all pairs
  std::string filter;  // only cases whose names contain this
  int64_t shard = 0;   // every `shards`-th case, from this one on
  int64_t shards = 1;
  uint64_t seed = 1;      // of fuzz
  int64_t steps = 10000;  // of fuzz, in all world sizes together
};

// These print each failure, with its case or seed, and a line at the end; they return the number of
// failures.

// Ranks as threads, all world sizes. Goes on after a failure.
int RunCasesInThreads(const RunOptions& options);
int FuzzInThreads(const RunOptions& options);
// Messages of more than 2^31 bytes between two ranks; needs 17 GB of memory.
int RunHugeInThreads(const RunOptions& options);

// This process is one rank. Collective. Stops at the first failure, because ranks no longer agree
// on the next case. Skips the backend's known gaps (traits.h).
int RunCases(const RunOptions& options, Groups& groups);
int FuzzRank(const RunOptions& options, Groups& groups);

}  // namespace ddp::backends::conformance
