// Finds the error in the log of a job that a launcher has started.
//
//   LastErrorIn("[rank 1] error: --lr=-1 must be at least 0\n");   // "--lr=-1 must be at least 0"
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace ddp::launchers {

// The last line that a program of this repository marks as an error ("error: …"), without that mark
// and without the prefix that launcher local puts before lines of ranks; failing that, the last
// error of SLURM's own tools; failing that, empty. Thread-safe.
std::string LastErrorIn(absl::string_view log);

}  // namespace ddp::launchers
