// The jobs of a sweep, and running them.
//
//   DDP_ASSIGN_OR_RETURN(std::vector<Job> jobs, MakeJobs(list, {.choices = choices, …}));
//   DDP_ASSIGN_OR_RETURN(int code, RunSweep(jobs, {.program = "/path/to/train", …}));
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
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
  ResumeOption resume;
  const launchers::LaunchOptions* launch = nullptr;           // among the options of the list
  std::vector<std::pair<std::string, std::string>> defaults;  // Table() of the list as it was made
  // Sets all options, from whatever values they have, for one combination of `choices`.
  std::function<absl::Status(const std::vector<OptionAssignment>& picked)> set;
  // Checks the options of one job, and sets those that depend on others and are not set.
  std::function<absl::Status()> validate;
};

// Fills in a pattern of ProgramSpec::job_options for a job in `folder`; `value` is the option's
// value so far. A pattern with {name} leaves an empty value empty: a file that was not asked for is
// not written.
std::string JobValue(absl::string_view pattern, const std::string& folder,
                     const std::string& value);

// Makes one job per combination of choices, and checks all before any is started. A job has the
// folder that has its configuration already, of an earlier call or an earlier version of the
// program: its job.yaml says so, or config.yaml where there is none, whatever its name is. Leaves
// `list` with the values of some job. Errors: those of the functions of `spec`; InvalidArgument for
// two jobs of one identity, and for more jobs than any queue takes.
absl::StatusOr<std::vector<Job>> MakeJobs(const OptionList& list, const SweepSpec& spec);

struct RunSweepOptions {
  std::string program;                        // path
  std::string build;                          // BuildOf(program)
  std::string folder;                         // of the sweep; created
  std::string folder_option;                  // the path of the option that it is the value of
  std::optional<int> at_once = std::nullopt;  // unset: one here, no limit in a queue
  bool rerun_changed = false;                 // also what another build has finished
  SweepMetric metric;
  launchers::LaunchOptions launch;
  ResumeOption resume;
};

// Runs those of the jobs that are missing, have failed or were cancelled: here, or in the queue of
// launch.name; says first how many of each there are. Jobs of an earlier call that are in a queue
// stay there, also if launch.name is none. With rerun_changed, also jobs that another build has
// finished: their folders move to FOLDER/previous, and back if they do not run after all. Keeps
// FOLDER/sweep.jsonl up to date, prints a line per event on standard error and at the end the table
// on standard output. Returns the exit code: 0 if all jobs have finished (or are queued), 1 if one
// has failed or was cancelled, 128 + signal. Errors: FailedPrecondition if another process runs a
// sweep in that folder, and if jobs may be in a queue that cannot be asked; files; those of the
// launcher.
absl::StatusOr<int> RunSweep(const std::vector<Job>& jobs, const RunSweepOptions& options);

// Tries out jobs that leave nothing on disk, as dry runs do: all of them, here, whatever has become
// of those in options.folder. What RunSweep would keep of them is in a temporary folder, which is
// removed at the end. Prints the output of each on standard output once it has ended, and then the
// table. Returns the exit code, as RunSweep. Errors: files.
absl::StatusOr<int> TrySweep(std::vector<Job> jobs, RunSweepOptions options);

// Prints the table of the jobs as they are, with the progress of those that run, and changes
// nothing: also while RunSweep runs in another process. Jobs that may be in a queue that cannot be
// asked are kUnknown. Returns the exit code, 0.
absl::StatusOr<int> ReportSweep(const std::vector<Job>& jobs, const RunSweepOptions& options);

}  // namespace ddp::config
