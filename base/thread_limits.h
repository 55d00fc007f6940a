// Errors of a system that allows no further thread or process, with the limits that apply.
//
//   if (fork() < 0 && errno == EAGAIN) return NoMoreThreads("a process");
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace ddp {

// ResourceExhausted: `what` ("a thread") cannot be started; names the limits on this process's
// threads (RLIMIT_NPROC, pids.max of its control groups, address space) and what to do.
// Thread-safe. `root`, for tests: see FindCgroups.
absl::Status NoMoreThreads(absl::string_view what, absl::string_view root = "");

// `status` with the limits added, if it says that a thread could not be started (std::thread's
// exception after CatchStatus: "Resource temporarily unavailable"). Thread-safe.
absl::Status ExplainThreadLimits(const absl::Status& status);

// Starts `count` threads that run at the same time, and ends them: NoMoreThreads if that fails. It
// is for libraries that end the process (libgomp), or corrupt their state, when they cannot start
// theirs. Takes about 20 us per thread. Thread-safe.
absl::Status TryThreads(int count);

}  // namespace ddp
