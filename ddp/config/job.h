// One job of a sweep: its overrides, its folder and its result.
//
//   DDP_ASSIGN_OR_RETURN(JobResult result, ReadResult(job));
//   if (result.state == JobState::kFailed) puts(result.reason.c_str());
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ddp/config/progress.h"
#include "launchers/launcher.h"

namespace ddp::config {

// The option with the checkpoint that a run begins from.
struct ResumeOption {
  std::string path = "";     // "checkpoint.resume"; empty: there is none
  std::string own = "auto";  // its value for: the newest of one's own, if any
  // Whether the job in `folder` has a checkpoint of its own.
  std::function<bool(const std::string& folder)> has_own = [](const std::string&) { return false; };
  // The option with the folder of one's own checkpoints, and whether the run, as the options are,
  // needs one there, as an evaluation does. It has none in the new folder of run_dir=auto.
  std::string folder = "";
  std::function<bool()> needs_own = [] { return false; };
};

struct Job {
  std::string id;  // Identity of its configuration
  // Short name and value of each option that the sweep sets.
  std::vector<std::pair<std::string, std::string>> overrides;
  // Has the files of launchers::BatchJob, job.yaml, config.yaml and metrics.jsonl.
  std::string folder;
  std::string options;  // its configuration, as YAML
  // Whether it begins from a checkpoint that is not its own.
  bool begins_elsewhere = false;
  launchers::LaunchOptions launch;  // what it asks its launcher for

  // The file in its folder with BuildOf the program that runs or ran it.
  static constexpr char kBuild[] = "build";

  // The overrides as text: "lr=0.1 model=cnn".
  std::string Description() const;
};

// kCancelled: asked to stop before its end. It goes on when it runs again, like kFailed. kUnknown:
// it may be in a queue that does not answer, or come into it yet.
enum class JobState { kMissing, kQueued, kRunning, kFinished, kFailed, kCancelled, kUnknown };
const char* StateName(JobState state);  // "finished"

struct JobResult {
  JobState state = JobState::kMissing;
  std::string reason;                     // why it failed; one line
  std::string build;                      // Job::kBuild; empty: not known
  JobProgress progress;                   // of a running job, for a report
  std::map<std::string, double> metrics;  // the last value of each number in metrics.jsonl
  int attempts = 0;                       // how often it has begun, for a table
};

// Reads only files in the job's folder: kFinished, kFailed or kCancelled if it contains an exit
// code, otherwise kMissing, even if the job is running. Thread-safe.
JobResult ReadResult(const Job& job);

// The last error in the job's log: of one of our programs or, if there is none, of SLURM; empty if
// there is none.
std::string LastErrorOf(const std::string& folder);

}  // namespace ddp::config
