// SLURM's queue, through its commands: sbatch, squeue and scancel.
//
//   DDP_ASSIGN_OR_RETURN(std::string id, SubmitScript("/stage/jobs/a/job.sh"));
//   DDP_ASSIGN_OR_RETURN(auto states, States({id}));
//   if (!states.contains(id)) …  // it has ended
//
// An id is "12", "12_3" in an array, and with the name of a cluster "12;west" and "12_3;west"; or a
// line of Submitting.
//
// Nothing here needs accounting. Functions are thread-safe. Errors: FailedPrecondition if a command
// is not installed; Unavailable, with SLURM's own words, if it fails; DeadlineExceeded if it hangs.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace ddp::launchers::slurm {

// Submits a script; returns the id of its job or array. FailedPrecondition if SLURM refuses it.
// Without SLURM's answer (after `timeout`, a lost connection, or the end of sbatch by a signal)
// asks the queue whether it has the job nevertheless; if not, DeadlineExceeded: then the job may
// still come.
absl::StatusOr<std::string> SubmitScript(const std::string& path,
                                         absl::Duration timeout = absl::Minutes(10));

// The line of BatchJob::kId for a job, or for task `task` of an array, that is about to be
// submitted by `script`: who submits it, when, and how the queue has it.
std::string Submitting(const std::string& script, const std::string& cluster,
                       std::optional<size_t> task);

// The id of each of `ids` that is one, and of each submission without an answer that the queue has.
absl::StatusOr<std::map<std::string, std::string>> KnownIds(const std::vector<std::string>& ids);

// The id of task `index` of array `id`.
std::string TaskId(const std::string& id, size_t index);

// {"12_3", "west"} for "12_3;west"; the cluster is empty if there is none.
std::pair<std::string, std::string> SplitCluster(absl::string_view id);

// The most tasks that an array of this cluster can have (empty: of the local one); SLURM's default
// if it does not say.
int MaxArraySize(const std::string& cluster);

// Returns "queued" or "running" for each of `ids` that has not ended, and "unknown" for a
// submission of the last twenty minutes that the queue does not have: it may come yet.
absl::StatusOr<std::map<std::string, std::string>> States(const std::vector<std::string>& ids);

struct Cancellation {
  std::vector<std::string> cancelled;  // ids, also of submissions without an answer
  absl::Status status;                 // the first error of others
};

// Tries all of them, also after a failure. Unavailable for a submission that the queue does not
// have.
Cancellation Cancel(const std::vector<std::string>& ids);

}  // namespace ddp::launchers::slurm
