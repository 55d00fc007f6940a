// Errors of a system that allows no further thread, process or open file, with the limits that
// apply.
//
//   if (fork() < 0 && errno == EAGAIN) return NoMoreThreads("a process");
#pragma once

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

// Lets this process open `more` files and sockets beside those that it has open: raises the soft
// limit (RLIMIT_NOFILE), often 1024, as far as that takes. ResourceExhausted, with the limit and
// what to do, if the hard limit is below it: then nothing is changed. `why` ends the first half of
// the message ("as rank 0 of 512"). It is for libraries that retry, or wait for a timeout, when
// they can open no socket (c10d's store). Not thread-safe with other changes of the limit.
absl::Status ReserveFiles(int more, absl::string_view why);

}  // namespace ddp
