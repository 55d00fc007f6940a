// One job of a sweep: its overrides, its folder and its result.
//
//   DDP_ASSIGN_OR_RETURN(JobResult result, ReadResult(job));
//   if (result.state == JobState::kFailed) puts(result.reason.c_str());
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ddp::config {

struct Job {
  std::string id;  // Identity of its configuration
  // Short name and value of each option that the sweep sets.
  std::vector<std::pair<std::string, std::string>> overrides;
  std::string folder;   // has the files of launchers::BatchJob, config.yaml and metrics.jsonl
  std::string options;  // its configuration, as YAML

  // The overrides as text: "lr=0.1 model=cnn".
  std::string Description() const;
};

enum class JobState { kMissing, kQueued, kRunning, kFinished, kFailed };
const char* StateName(JobState state);  // "finished"

struct JobResult {
  JobState state = JobState::kMissing;
  std::string reason;                     // why it failed; one line
  std::map<std::string, double> metrics;  // the last value of each number in metrics.jsonl
};

// Reads only files in the job's folder: kFinished or kFailed if it contains an exit code, otherwise
// kMissing, even if the job is running. Thread-safe.
JobResult ReadResult(const Job& job);

// The last error in the job's log: of one of our programs or, if there is none, of SLURM; empty if
// there is none.
std::string LastErrorOf(const std::string& folder);

}  // namespace ddp::config
