#include "launchers/slurm/submit.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/option_error.h"
#include "base/options.h"
#include "base/signal_pipe.h"
#include "base/status.h"
#include "launchers/queue.h"
#include "launchers/slurm/follow.h"
#include "launchers/slurm/options.h"
#include "launchers/slurm/queue.h"
#include "launchers/slurm/script.h"
#include "launchers/slurm/stage.h"

namespace ddp::launchers::slurm {
namespace {

namespace fs = std::filesystem;

constexpr char kScript[] = "job.sh";
// SLURM has 16 bits for it.
constexpr int kMostSignalSeconds = 65535;
// It may send the signal so much earlier than it was asked to.
constexpr int kSignalEarlySeconds = 60;
constexpr int64_t kMostTime = 1000000000;

bool HasControlCharacter(absl::string_view text) {
  return std::any_of(text.begin(), text.end(),
                     [](unsigned char c) { return absl::ascii_iscntrl(c); });
}

// sbatch's variables name the cluster where no option does. The job and later calls must know it,
// too: an id without a cluster is one of the local cluster.
LaunchOptions WithCluster(LaunchOptions options) {
  SlurmOptions slurm = SlurmOptionsOf(options);
  for (const char* name : {"SLURM_CLUSTERS", "SBATCH_CLUSTERS"}) {  // as sbatch prefers them
    const char* const value = getenv(name);
    if (slurm.clusters.empty() && value != nullptr) slurm.clusters = value;
  }
  options.implementations.Mutable<SlurmOptions>("slurm") = std::move(slurm);
  return options;
}

std::vector<BatchJob> WithClusters(std::vector<BatchJob> jobs) {
  for (BatchJob& job : jobs) job.launch = WithCluster(std::move(job.launch));
  return jobs;
}

// A line of a script must not become two.
absl::Status CheckLines(const SlurmOptions& slurm) {
  const std::pair<absl::string_view, const std::string&> lines[] = {
      {"partition", slurm.partition},
      {"mem", slurm.mem},
      {"time", slurm.time},
      {"account", slurm.account},
      {"qos", slurm.qos},
      {"constraint", slurm.constraint},
      {"dependency", slurm.dependency},
      {"clusters", slurm.clusters},
      {"job_name", slurm.job_name},
      {"stage_dir", slurm.stage_dir}};
  for (const auto& [name, value] : lines) {
    if (!HasControlCharacter(value)) continue;
    return OptionError(absl::StrCat("slurm.", name), value, "must not have control characters");
  }
  for (const std::string& extra : JoinedElements(slurm.extra)) {
    if (!absl::StartsWith(extra, "-") || HasControlCharacter(extra)) {
      return OptionError("slurm.extra", extra,
                         "must be options of sbatch, each a line like --comment=x");
    }
    if (absl::StartsWith(absl::StripPrefix(extra, "--"), "clusters") ||
        absl::StartsWith(extra, "-M")) {
      return OptionError("slurm.extra", extra, "must not name the cluster: slurm.clusters does");
    }
  }
  for (const std::string& word : JoinedElements(slurm.srun_args)) {
    if (absl::StartsWith(word, "-")) continue;
    return OptionError("slurm.srun_args", word,
                       "must be options of srun, each a word like --cpu-bind=cores");
  }
  const RequeueSignal signal = SignalOf(slurm.signal);
  if ((signal.name != "USR1" && signal.name != "USR2") || signal.seconds < 1 ||
      signal.seconds > kMostSignalSeconds) {
    return OptionError("slurm.signal", slurm.signal,
                       absl::StrCat("must be USR1@SECONDS or USR2@SECONDS, with 1 to ",
                                    kMostSignalSeconds, " seconds before the time limit"));
  }
  // The list of several clusters is for sbatch to choose from; then nobody knows where to ask.
  if (absl::StrContains(slurm.clusters, ",")) {
    return OptionError("slurm.clusters", slurm.clusters,
                       "must be the name of one cluster, also where it comes from "
                       "SBATCH_CLUSTERS or SLURM_CLUSTERS");
  }
  // sbatch replaces nothing in a pattern with a backslash.
  if (slurm.stage_dir.empty() || absl::StrContains(slurm.stage_dir, "\\")) {
    return OptionError("slurm.stage_dir", slurm.stage_dir,
                       "must be a folder's name without backslashes");
  }
  return absl::OkStatus();
}

// A time limit as sbatch has it, in seconds: "30" or "30:00", minutes; "1:30:00"; "1-12",
// "1-12:30", "1-12:30:00". nullopt if there is no limit, and of what is none.
std::optional<int64_t> SecondsOf(absl::string_view time) {
  int64_t days = 0;
  const size_t dash = time.find('-');
  const bool has_days = dash != absl::string_view::npos;
  if (has_days) {
    if (!absl::SimpleAtoi(time.substr(0, dash), &days) || days < 0 || days > kMostTime) {
      return std::nullopt;
    }
    time.remove_prefix(dash + 1);
  }
  const std::vector<absl::string_view> parts = absl::StrSplit(time, ':');
  if (parts.size() > 3) return std::nullopt;
  int64_t seconds = days * 24 * 3600;
  int64_t unit = has_days || parts.size() == 3 ? 3600 : 60;
  for (const absl::string_view part : parts) {
    int64_t number = 0;
    if (!absl::SimpleAtoi(part, &number) || number < 0 || number > kMostTime) return std::nullopt;
    seconds += number * unit;
    unit /= 60;
  }
  return seconds > 0 ? std::optional<int64_t>(seconds) : std::nullopt;
}

// A run that is asked to stop as soon as it begins would be queued again for nothing.
absl::Status CheckTimeToRun(const SlurmOptions& slurm) {
  if (!slurm.requeue) return absl::OkStatus();
  const int before = SignalOf(slurm.signal).seconds + kSignalEarlySeconds;
  const std::optional<int64_t> limit = SecondsOf(slurm.time);
  if (!limit || *limit > before) return absl::OkStatus();
  return OptionError("slurm.signal", slurm.signal,
                     absl::StrCat("leaves no time to run: it comes up to ", before,
                                  " seconds before the time limit, slurm.time=", slurm.time));
}

absl::Status Check(const LaunchOptions& options) {
  DDP_RETURN_IF_ERROR(ValidateOptions(options));
  DDP_RETURN_IF_ERROR(CheckLines(SlurmOptionsOf(options)));
  DDP_RETURN_IF_ERROR(CheckTimeToRun(SlurmOptionsOf(options)));
  if (options.max_restarts == 0) return absl::OkStatus();
  return OptionError("max_restarts", absl::StrCat(options.max_restarts),
                     "is not for launcher 'slurm': let SLURM begin the job again, with "
                     "slurm.requeue=true");
}

absl::Status Check(const std::vector<BatchJob>& jobs, int at_once) {
  if (jobs.empty()) return absl::InvalidArgumentError("no job to submit");
  for (const BatchJob& job : jobs) {
    DDP_RETURN_IF_ERROR(Check(job.launch));
    const SlurmOptions slurm = SlurmOptionsOf(job.launch);
    if (slurm.stage_dir != SlurmOptionsOf(jobs[0].launch).stage_dir) {
      return OptionError("slurm.stage_dir", slurm.stage_dir, "must be the same for all jobs");
    }
    // Arrays that wait for each other have "," in their dependencies: all must be fulfilled.
    if (at_once > 0 && absl::StrContains(slurm.dependency, "?")) {
      return OptionError("slurm.dependency", slurm.dependency,
                         "must not have '?' where the number of jobs at a time is limited");
    }
    if (job.argv.empty()) return absl::InvalidArgumentError("no program to submit");
    if (job.argv[0] != jobs[0].argv[0]) {
      return absl::InvalidArgumentError(absl::StrCat("jobs of one array run one program, not ",
                                                     jobs[0].argv[0], " and ", job.argv[0]));
    }
    if (HasControlCharacter(job.folder) || HasControlCharacter(job.name)) {
      return absl::InvalidArgumentError(
          absl::StrCat("a job's name and folder must not have control characters: ", job.folder));
    }
  }
  return absl::OkStatus();
}

std::string ProgramName(const std::string& program) {
  return fs::path(program).filename().string();
}

std::string StageFolder(const SlurmOptions& slurm) {
  std::string folder = fs::absolute(slurm.stage_dir).lexically_normal().string();
  while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
  return folder;
}

absl::Status StageDirError(const SlurmOptions& slurm, const absl::Status& status) {
  return OptionError("slurm.stage_dir", slurm.stage_dir,
                     absl::StrCat("cannot be written: ", status.message()), status.code());
}

// The name of a folder for a job of `program`, not made yet.
std::string JobFolder(const std::string& stage, const std::string& program) {
  const std::string time = absl::FormatTime("%Y%m%d-%H%M%S", absl::Now(), absl::UTCTimeZone());
  return absl::StrCat(stage, "/jobs/", time, "-", ProgramName(program), "-", getpid());
}

// A new folder, by this name or with a number appended.
absl::StatusOr<std::string> MakeJobFolder(const std::string& name) {
  DDP_RETURN_IF_ERROR(MakeDirectories(DirectoryOf(name)));
  for (int i = 1;; ++i) {
    std::string folder = i == 1 ? name : absl::StrCat(name, "-", i);
    if (FileSystem::Default()->Mkdir(folder.c_str(), 0777) == 0) return folder;
    if (errno != EEXIST) return FileError(errno, "making folder", folder);
  }
}

// Jobs that are submitted together: one, or an array.
using Batch = std::vector<BatchJob>;

absl::StatusOr<std::string> Script(const Batch& jobs, int at_once, const std::string& after,
                                   const StagedProgram& program, const std::string& folder) {
  std::error_code error;
  const fs::path here = fs::current_path(error);
  if (error) return FileError(error.value(), "finding", "the working folder");
  const bool same_name = std::all_of(jobs.begin(), jobs.end(),
                                     [&](const BatchJob& job) { return job.name == jobs[0].name; });
  return BatchScript({.launch = jobs[0].launch,
                      .name = same_name ? jobs[0].name : ProgramName(jobs[0].argv[0]),
                      .program = program.path,
                      .chdir = here.string(),
                      .folder = folder,
                      .jobs = jobs,
                      .at_once = at_once,
                      .after = after});
}

// All that a job's script has besides the job itself.
std::string Request(const LaunchOptions& launch) {
  ScriptOptions options;
  options.launch = launch;
  options.jobs.resize(1);
  return BatchScript(options);
}

// The indices of jobs that can be one array: each has what its first job asks for. In the order of
// their first jobs.
std::vector<std::vector<size_t>> SplitIntoBatches(const std::vector<BatchJob>& jobs, size_t most) {
  std::vector<std::vector<size_t>> batches;
  std::map<std::string, size_t> last;  // batch, by request
  for (size_t i = 0; i < jobs.size(); ++i) {
    const auto [found, is_new] = last.emplace(Request(jobs[i].launch), 0);
    if (is_new || batches[found->second].size() == most) {
      found->second = batches.size();
      batches.emplace_back();
    }
    batches[found->second].push_back(i);
  }
  return batches;
}

// Links named 0, 1, … to the jobs' folders.
absl::Status LinkFolders(const std::vector<BatchJob>& jobs, const std::string& folder) {
  for (size_t i = 0; i < jobs.size(); ++i) {
    const std::string link = absl::StrCat(folder, "/", i);
    std::error_code error;
    fs::create_symlink(jobs[i].folder, link, error);
    if (error) return FileError(error.value(), "making link", link);
  }
  return absl::OkStatus();
}

// What an earlier submission of a job has left. The script removes the exit code, too, but only
// when it runs; and that submission's errors are not this one's.
class Earlier {
 public:
  // Takes it away, and adds the line `submitting` to the job's ids: if this process dies before it
  // has written the id, the job may be in the queue.
  static absl::StatusOr<Earlier> Of(const std::string& folder, const std::string& submitting) {
    Earlier earlier;
    earlier.folder_ = folder;
    earlier.submitting_ = submitting;
    earlier.exit_code_ = ReadExitCode(folder);
    struct stat info;
    earlier.has_log_ = stat(absl::StrCat(folder, "/", BatchJob::kLog).c_str(), &info) == 0;
    DDP_RETURN_IF_ERROR(ForgetJob(folder));
    if (const absl::Status added = AddJobId(folder, submitting); !added.ok()) {
      earlier.Restore();
      return added;
    }
    return earlier;
  }

  // Puts it back, since nothing has been submitted.
  void Restore() const {
    RemoveJobId(folder_, submitting_).IgnoreError();
    if (exit_code_) WriteExitCode(folder_, *exit_code_).IgnoreError();
    if (!has_log_) return;
    std::rename(absl::StrCat(folder_, "/", kPreviousLog).c_str(),
                absl::StrCat(folder_, "/", BatchJob::kLog).c_str());
  }

 private:
  std::string folder_;
  std::string submitting_;
  std::optional<int> exit_code_;
  bool has_log_ = false;
};

absl::Status WriteIds(const Batch& jobs, const std::string& id) {
  for (size_t i = 0; i < jobs.size(); ++i) {
    const std::string own = jobs.size() == 1 ? id : TaskId(id, i);
    const absl::Status written = AddJobId(jobs[i].folder, own);
    if (!written.ok()) {
      return absl::DataLossError(absl::StrCat("job ", own, " is queued, but ", written.message()));
    }
  }
  return absl::OkStatus();
}

void PrintJob(const Batch& jobs, const std::string& id, const std::string& folder,
              std::FILE* notes) {
  const bool array = jobs.size() > 1;
  std::fprintf(notes, "job %s: submitted%s\n  script: %s/%s\n  log:    %s/%s\n", id.c_str(),
               array ? absl::StrCat(", an array of ", jobs.size(), " jobs").c_str() : "",
               folder.c_str(), kScript,
               array ? absl::StrCat(folder, "/INDEX").c_str() : folder.c_str(), BatchJob::kLog);
  std::fflush(notes);
}

struct Submission {
  std::string stage;  // folder
  StagedProgram program = {};
  int at_once = 0;
  std::FILE* notes = stdout;
  std::string after = {};  // ScriptOptions::after
};

// As ScriptOptions::after has them: the jobs of KnownIds in `cluster`, whole arrays.
std::string AfterAll(const std::map<std::string, std::string>& known, const std::string& cluster) {
  std::set<std::string> jobs;
  for (const auto& [line, id] : known) {
    const auto [job, where] = SplitCluster(id);
    if (where == cluster) jobs.insert(job.substr(0, job.find('_')));
  }
  return absl::StrJoin(jobs, ":");
}

// Returns the id. Nothing is left of jobs that could not be submitted, unless they may come yet.
absl::StatusOr<std::string> SubmitBatch(const Submission& submission, const Batch& jobs) {
  const bool array = jobs.size() > 1;
  std::string folder = jobs[0].folder;
  if (array) {
    DDP_ASSIGN_OR_RETURN(folder, MakeJobFolder(JobFolder(submission.stage, jobs[0].argv[0])));
  }
  const std::string script_path = absl::StrCat(folder, "/", kScript);
  std::vector<Earlier> earlier;
  absl::Cleanup undo = [&] {
    RemoveTree(array ? folder : script_path).IgnoreError();
    for (const Earlier& before : earlier) before.Restore();
  };
  if (array) {
    DDP_RETURN_IF_ERROR(LinkFolders(jobs, folder));
  }
  DDP_ASSIGN_OR_RETURN(const std::string script, Script(jobs, submission.at_once, submission.after,
                                                        submission.program, folder));
  DDP_RETURN_IF_ERROR(WriteFileAtomically(script_path, script));
  const std::string cluster = SlurmOptionsOf(jobs[0].launch).clusters;
  for (size_t i = 0; i < jobs.size(); ++i) {
    const std::optional<size_t> task = array ? std::optional<size_t>(i) : std::nullopt;
    DDP_ASSIGN_OR_RETURN(Earlier before,
                         Earlier::Of(jobs[i].folder, Submitting(script_path, cluster, task)));
    earlier.push_back(std::move(before));
  }
  absl::StatusOr<std::string> id = SubmitScript(script_path);
  if (id.ok() || absl::IsDeadlineExceeded(id.status())) std::move(undo).Cancel();
  if (!id.ok()) return id;
  PrintJob(jobs, *id, folder, submission.notes);
  DDP_RETURN_IF_ERROR(WriteIds(jobs, *id));
  return id;
}

absl::Status PrintScripts(const std::vector<BatchJob>& jobs,
                          const std::vector<std::vector<size_t>>& batches, Submission submission) {
  const std::string& program = jobs[0].argv[0];
  for (const std::vector<size_t>& indices : batches) {
    Batch batch;
    for (const size_t i : indices) batch.push_back(jobs[i]);
    const std::string folder =
        batch.size() > 1 ? JobFolder(submission.stage, program) : batch[0].folder;
    DDP_ASSIGN_OR_RETURN(
        const std::string script,
        Script(batch, submission.at_once, submission.after, submission.program, folder));
    std::fputs(script.c_str(), stdout);
    if (submission.at_once > 0) submission.after = "ID_OF_THE_ARRAY_ABOVE";
  }
  std::fflush(stdout);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<absl::Status>> Submit(const std::vector<BatchJob>& requested,
                                                 int at_once,
                                                 const std::vector<std::string>& unfinished,
                                                 std::FILE* notes) {
  const std::vector<BatchJob> jobs = WithClusters(requested);
  DDP_RETURN_IF_ERROR(Check(jobs, at_once));
  const SlurmOptions slurm = SlurmOptionsOf(jobs[0].launch);
  Submission submission = {.stage = StageFolder(slurm), .at_once = at_once, .notes = notes};
  if (at_once > 0) {
    DDP_ASSIGN_OR_RETURN(const auto known, KnownIds(unfinished));
    submission.after = AfterAll(known, slurm.clusters);
  }
  const std::string builds = absl::StrCat(submission.stage, "/builds");
  const std::string& program = jobs[0].argv[0];
  const std::vector<std::vector<size_t>> batches =
      SplitIntoBatches(jobs, jobs.size() > 1 ? MaxArraySize(slurm.clusters) : 1);
  if (slurm.dry_run) {
    DDP_ASSIGN_OR_RETURN(submission.program, FindStaged(program, builds));
    DDP_RETURN_IF_ERROR(PrintScripts(jobs, batches, submission));
    return std::vector<absl::Status>(jobs.size());
  }

  absl::Status writable = MakeDirectories(builds);
  if (writable.ok()) writable = ProveWritable(builds);
  if (!writable.ok()) return StageDirError(slurm, writable);
  DDP_ASSIGN_OR_RETURN(submission.program, StageProgram(program, builds));
  std::vector<absl::Status> statuses(jobs.size());
  for (const std::vector<size_t>& indices : batches) {
    Batch batch;
    for (const size_t i : indices) batch.push_back(jobs[i]);
    const absl::StatusOr<std::string> id = SubmitBatch(submission, batch);
    for (const size_t i : indices) statuses[i] = id.status();
    if (id.ok() && at_once > 0) submission.after = SplitCluster(*id).first;
  }
  return statuses;
}

absl::StatusOr<LaunchResult> Launch(const LaunchOptions& options) {
  if (options.argv.empty()) return absl::InvalidArgumentError("no program to submit");
  DDP_RETURN_IF_ERROR(Check(WithCluster(options)));
  const SlurmOptions slurm = SlurmOptionsOf(options);
  BatchJob job = {.name = ProgramName(options.argv[0]),
                  .folder = JobFolder(StageFolder(slurm), options.argv[0]),
                  .argv = options.argv,
                  .launch = options};
  if (slurm.dry_run) {
    DDP_RETURN_IF_ERROR(Submit({job}, 0, {}, stdout).status());
    return LaunchResult();
  }
  // A signal takes effect once the id is known: sbatch may have sent its request.
  DDP_ASSIGN_OR_RETURN(SignalPipe signals, SignalPipe::Install());
  absl::StatusOr<std::string> folder = MakeJobFolder(job.folder);
  if (!folder.ok()) return StageDirError(slurm, folder.status());
  job.folder = *std::move(folder);
  const absl::StatusOr<std::vector<absl::Status>> submitted = Submit({job}, 0, {}, stdout);
  const absl::Status status = submitted.ok() ? submitted->front() : submitted.status();
  if (!status.ok()) {
    rmdir(job.folder.c_str());  // not empty if the job was submitted nevertheless
    return status;
  }
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> ids, ReadJobIds(job.folder));
  const FollowOptions follow = {.id = ids.back(),
                                .folder = job.folder,
                                .cancel_on_interrupt = slurm.on_interrupt == "cancel"};
  if (slurm.wait) return Follow(follow, signals);
  for (const int signal : signals.Take()) {
    if (signal != SIGCHLD) return Interrupted(follow, signal);  // sbatch is a child
  }
  return LaunchResult();
}

}  // namespace ddp::launchers::slurm
