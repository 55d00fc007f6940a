// The jobs of a sweep, and running them.
//
//   DDP_ASSIGN_OR_RETURN(std::vector<Job> jobs, MakeJobs(list, {.choices = choices, …}));
//   DDP_ASSIGN_OR_RETURN(int code, RunSweep(jobs, {.program = "/path/to/train", …}));
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/option_list.h"
#include "ddp/config/job.h"
#include "ddp/config/report.h"
#include "ddp/config/yaml_file.h"
#include "launchers/launcher.h"

namespace ddp::config {

struct SweepSpec {
  std::vector<Choices> choices;  // not empty; the last varies fastest
  std::string folder;            // of the sweep; each job's is in it
  // See ProgramSpec::job_options.
  std::vector<std::pair<std::string, std::string>> job_options;
  // Sets all options but those of `choices`, from whatever values they have.
  std::function<absl::Status()> set_base;
  // Sets one option of `choices`.
  std::function<absl::Status(const OptionAssignment&)> set;
  // Checks the options of one job.
  std::function<absl::Status()> validate;
};

// Makes one job per combination of choices, and checks all before any is started. Leaves `list`
// with the values of the last one. Errors: those of the functions of `spec`; InvalidArgument for
// two jobs of one identity.
absl::StatusOr<std::vector<Job>> MakeJobs(const OptionList& list, const SweepSpec& spec);

struct RunSweepOptions {
  std::string program;  // path
  std::string folder;   // of the sweep; created
  int at_once = 1;
  SweepMetric metric;
  launchers::LaunchOptions launch;
};

// Runs those of the jobs that have not finished: here, or in the queue of launch.name. Keeps
// FOLDER/sweep.jsonl up to date, prints a line per event on standard error and at the end the table
// on standard output. While jobs of an earlier call are in a queue, only reports. Returns the exit
// code: 0 if all jobs have finished (or are queued), 1 if one has failed, 128 + signal. Errors:
// FailedPrecondition if another process runs a sweep in that folder; files; those of the launcher.
absl::StatusOr<int> RunSweep(const std::vector<Job>& jobs, const RunSweepOptions& options);

}  // namespace ddp::config
