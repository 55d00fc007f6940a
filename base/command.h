// Runs a program to its end and returns what it printed.
//
//   DDP_ASSIGN_OR_RETURN(CommandResult result, RunCommand({"squeue", "--noheader"}));
//   if (result.exit_code != 0) return absl::UnavailableError(result.err);
//   Use(result.out);
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace ddp {

struct CommandResult {
  int exit_code = 0;  // 128 + signal if a signal ended it
  std::string out;    // its standard output
  std::string err;    // its standard error
};

// The program is looked up in PATH if it has no slash. Its standard input is empty, and it is not
// in this process's group: a terminal's Ctrl-C does not reach it. NotFound, PermissionDenied and so
// on, naming the program, if it cannot be executed; DeadlineExceeded if it has not closed its
// output after `timeout` (it is killed). Thread-safe.
absl::StatusOr<CommandResult> RunCommand(const std::vector<std::string>& argv,
                                         const std::map<std::string, std::string>& environment,
                                         absl::Duration timeout = absl::Minutes(2));

// The same, with this process's environment.
absl::StatusOr<CommandResult> RunCommand(const std::vector<std::string>& argv,
                                         absl::Duration timeout = absl::Minutes(2));

}  // namespace ddp
