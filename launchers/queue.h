// Launchers that queue jobs, and the files from which later calls read a job's state.
//
//   if (const std::unique_ptr<Launcher> queue = FindQueue(options.name)) {
//     DDP_RETURN_IF_ERROR(queue->Submit({job}, /*at_once=*/0, /*unfinished=*/{}).status());
//   }
//   if (const std::optional<int> code = ReadExitCode(job.folder)) return *code;  // it has ended
//   LastErrorIn("[rank 1] error: --lr=-1 must be at least 0\n");  // "--lr=-1 must be at least 0"
//   EndReason(log, /*exit_code=*/137);                            // "killed by signal 9 (Killed)"
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "launchers/launcher.h"

namespace ddp::launchers {

// The launcher `name` if its jobs wait in a queue; null for others, "auto" and unknown names.
std::unique_ptr<Launcher> FindQueue(absl::string_view name);

// The linked launcher whose jobs wait in a queue, the first by name; null if there is none. Use it
// for ids of jobs, which do not say whose they are.
std::unique_ptr<Launcher> FindLinkedQueue();

// BatchJob::kExitCode in a job's folder; nullopt if it has not ended, or not yet written it.
// Thread-safe.
std::optional<int> ReadExitCode(const std::string& folder);
absl::Status WriteExitCode(const std::string& folder, int exit_code);

// The lines of BatchJob::kId: the ids of all submissions, the newest last; empty: never submitted.
// The newest may be a line that begins with kSubmitting, until AddJobId adds its id, or the job
// itself, when it begins. Another error than NotFound is one of the file.
absl::StatusOr<std::vector<std::string>> ReadJobIds(const std::string& folder);
absl::Status AddJobId(const std::string& folder, const std::string& id);
absl::Status RemoveJobId(const std::string& folder, const std::string& id);

// In the place of an id: a queue has been asked to take the job, and has not answered, or whoever
// asked has not lived to write the id. Launcher::Unfinished takes it.
inline constexpr char kSubmitting[] = "submitting ";
bool IsSubmitting(absl::string_view id);

// Returns how often the job has begun, in all submissions: lines of BatchJob::kAttempts.
// Thread-safe.
int CountAttempts(const std::string& folder);

// Adds a line, "2: WHAT, on HOST, TIME", to such a file; without effect if it cannot be written.
void NoteAttempt(const std::string& file, absl::string_view what);

// Names that file for a job's own process, where launcher local starts its ranks: restarts of these
// are attempts, too.
inline constexpr char kAttemptsVariable[] = "DDP_ATTEMPTS_FILE";

// Call it before a job is started or submitted again. Removes kExitCode, and renames the log to
// kPreviousLog, so that its errors are not attributed to the new attempt. Ids stay.
inline constexpr char kPreviousLog[] = "job.log.previous";
absl::Status ForgetJob(const std::string& folder);

// Asks a queue for its jobs, at most once per `interval`, whoever asks how often, and once it has
// answered passes over its failures: its controller may be restarting.
//
//   QueueWatch watch(queue);
//   while (true) {
//     DDP_ASSIGN_OR_RETURN(const QueueWatch::Answer* answer, watch.Query(ids));
//     if (answer != nullptr && answer->empty()) break;  // all have ended
//     …wait for a signal or a moment…
//   }
//
// Thread-compatible.
class QueueWatch {
 public:
  using Answer = std::map<std::string, std::string>;  // see Launcher::Unfinished

  // `queue` outlives it. A line on standard error says when the queue begins to fail.
  explicit QueueWatch(Launcher& queue, absl::Duration interval = absl::Seconds(5));

  // A new answer; null if it is not time to ask again, or if the queue has failed. The error if the
  // very first question fails: whoever waits for nothing yet need not begin to.
  absl::StatusOr<const Answer*> Query(const std::vector<std::string>& ids);

  // Returns when Query may be of use again.
  absl::Time next() const { return next_; }

 private:
  Launcher& queue_;
  const absl::Duration interval_;
  absl::Time next_ = absl::InfinitePast();
  bool fails_ = false;  // and that was said
  Answer answer_;
};

// The last line of a job's log that a program of this repository marks as an error ("error: …"),
// without that mark and without the prefix that launcher local or srun puts before lines of ranks;
// failing that, the last error of SLURM's own tools; failing that, empty. Thread-safe.
std::string LastErrorIn(absl::string_view log);

// Why a job with this log ended with an exit code other than 0: LastErrorIn(log), or for 128 + a
// signal the line that names this signal, or SLURM's, or else the signal: an error line in the log
// of a job that was killed is that of an earlier attempt. Empty if neither log nor code tell.
// Thread-safe.
std::string EndReason(absl::string_view log, int exit_code);

}  // namespace ddp::launchers
