// SLURM's queue, through its commands: sbatch, squeue and scancel.
//
//   DDP_ASSIGN_OR_RETURN(std::string id, SubmitScript("/stage/jobs/a/job.sh"));
//   DDP_ASSIGN_OR_RETURN(auto states, States({id}));
//   if (!states.contains(id)) …  // it has ended
//
// Nothing here needs accounting. Functions are thread-safe. Errors: FailedPrecondition if a command
// is not installed; Unavailable, with SLURM's own words, if it fails; DeadlineExceeded if it hangs.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ddp::launchers::slurm {

// Submits a script; returns the id of its job or array. FailedPrecondition if SLURM refuses it.
absl::StatusOr<std::string> SubmitScript(const std::string& path);

// Returns "queued" or "running" for each of `ids` ("12", or "12_3" in an array) that has not ended.
absl::StatusOr<std::map<std::string, std::string>> States(const std::vector<std::string>& ids);

absl::Status Cancel(const std::string& id);

}  // namespace ddp::launchers::slurm
