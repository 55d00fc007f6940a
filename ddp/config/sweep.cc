#include "ddp/config/sweep.h"

#include <poll.h>
#include <signal.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "base/file.h"
#include "base/signal_pipe.h"
#include "base/status.h"
#include "ddp/config/effective.h"
#include "ddp/config/local_jobs.h"
#include "launchers/queue.h"

namespace ddp::config {
namespace {

using launchers::BatchJob;

constexpr size_t kMostJobs = 100000;
// Most file systems allow names of 255 bytes.
constexpr size_t kMostFolderName = 120;
constexpr size_t kIdInFolderName = 8;
// squeue loads SLURM's controller.
constexpr int kAskQueueMs = 2000;
// A network file system may show a file seconds after it was written on another machine.
constexpr absl::Duration kExitCodePatience = absl::Seconds(10);
constexpr char kConfigFile[] = "config.yaml";

// Name of the job's folder: "lr=0.1,model=cnn-1f3a9c2e".
std::string FolderName(const Job& job) {
  std::string name = absl::StrJoin(job.overrides, ",", absl::PairFormatter("="));
  for (char& c : name) {
    const bool safe = absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
                      std::string_view("._=,+-").find(c) != std::string_view::npos;
    if (!safe) c = '_';
  }
  if (name.size() > kMostFolderName) name.resize(kMostFolderName);
  return absl::StrCat(name, "-", job.id.substr(0, kIdInFolderName));
}

// Fills in `pattern` for a job in `folder`; `value` is the option's value so far. A pattern with
// {name} leaves an empty value empty: a file that was not asked for is not written.
std::string JobValue(absl::string_view pattern, const std::string& folder,
                     const std::string& value) {
  const bool needs_name = absl::StrContains(pattern, "{name}");
  if (needs_name && value.empty()) return "";
  return absl::StrReplaceAll(
      pattern, {{"{folder}", folder}, {"{name}", value.substr(value.rfind('/') + 1)}});
}

// Records that job `id` has failed, so that later calls need not ask and wait again. SLURM's own
// words in the log, as for a time limit, are more specific.
absl::Status NoteVanished(const std::string& folder, const std::string& id) {
  if (LastErrorOf(folder).empty()) {
    std::ofstream(absl::StrCat(folder, "/", BatchJob::kLog), std::ios::app)
        << "error: job " << id
        << " has left the queue without an exit code: it was cancelled, or its "
        << "node has failed\n";
  }
  return launchers::WriteExitCode(folder, 1);
}

// What a sweep knows of its jobs, and what it prints.
class Sweep {
 public:
  Sweep(const std::vector<Job>& jobs, const RunSweepOptions& options)
      : jobs_(jobs), options_(options), starts_(jobs.size()), noted_(jobs.size()) {
    for (const Job& job : jobs) results_.push_back(ReadResult(job));
  }

  absl::StatusOr<int> Run() {
    const std::unique_ptr<launchers::Launcher> queue = launchers::FindQueue(options_.launch.name);
    if (queue && queue->Mode(options_.launch).dry_run) {
      DDP_RETURN_IF_ERROR(SubmitJobs(*queue, ToRun()));
      return 0;
    }
    DDP_RETURN_IF_ERROR(MakeDirectories(options_.folder));
    const absl::StatusOr<DirectoryLock> lock = DirectoryLock::TryExclusive(options_.folder);
    // Some file systems have no locks; then the user must know.
    if (absl::IsUnavailable(lock.status())) {
      return absl::FailedPreconditionError(
          absl::StrCat("another process runs a sweep in ", options_.folder));
    }
    DDP_ASSIGN_OR_RETURN(const int signal, queue ? RunInQueue(*queue) : RunHere());
    DDP_RETURN_IF_ERROR(Write());
    std::fflush(stderr);
    std::printf("%s", SweepTable(jobs_, results_, options_.metric).c_str());
    std::fflush(stdout);
    if (signal != 0) return 128 + signal;
    return Count(JobState::kFailed) > 0 ? 1 : 0;
  }

 private:
  size_t Count(JobState state) const {
    size_t count = 0;
    for (const JobResult& result : results_) count += result.state == state;
    return count;
  }

  std::vector<size_t> ToRun() const {
    std::vector<size_t> jobs;
    for (size_t i = 0; i < jobs_.size(); ++i) {
      if (results_[i].state == JobState::kMissing || results_[i].state == JobState::kFailed) {
        jobs.push_back(i);
      }
    }
    return jobs;
  }

  absl::Status Write() const {
    return WriteSweepFile(absl::StrCat(options_.folder, "/sweep.jsonl"), jobs_, results_);
  }

  void PrintSummary(const std::vector<size_t>& to_run) const {
    const size_t done = Count(JobState::kFinished);
    std::fprintf(stderr, "sweep: %zu jobs, %zu have finished, %zu to run, in %s\n", jobs_.size(),
                 done, to_run.size(), options_.folder.c_str());
  }

  // The jobs have ended while no call watched them.
  void PrintFailures(const std::vector<size_t>& jobs) {
    for (const size_t i : jobs) {
      if (results_[i].state == JobState::kFailed && !noted_[i]) Note(i, JobState::kFailed);
    }
  }

  absl::Status WriteConfiguration(size_t i) const {
    DDP_RETURN_IF_ERROR(MakeDirectories(jobs_[i].folder));
    return WriteFileAtomically(absl::StrCat(jobs_[i].folder, "/", kConfigFile), jobs_[i].options);
  }

  std::vector<std::string> Command(const std::string& folder) const {
    return {options_.program, absl::StrCat("--config=", folder, "/", kConfigFile)};
  }

  // Records and prints a change of the state of job `i`.
  void Note(size_t i, JobState state) {
    noted_[i] = true;
    std::string what = StateName(state);
    if (state == JobState::kFinished || state == JobState::kFailed) {
      results_[i] = ReadResult(jobs_[i]);
      if (starts_[i]) {
        absl::StrAppend(
            &what, " after ",
            absl::StrFormat("%.1f s", absl::ToDoubleSeconds(absl::Now() - *starts_[i])));
      }
      const auto metric = results_[i].metrics.find(options_.metric.name);
      if (state == JobState::kFailed) {
        absl::StrAppend(&what, ": ", results_[i].reason);
      } else if (metric != results_[i].metrics.end()) {
        absl::StrAppend(&what, ", ", metric->first, "=", absl::StrFormat("%.6g", metric->second));
      }
    } else {
      results_[i].state = state;
      results_[i].reason.clear();
      if (state == JobState::kRunning) starts_[i] = absl::Now();
    }
    std::fprintf(stderr, "[%zu/%zu] %s: %s\n", i + 1, jobs_.size(), jobs_[i].Description().c_str(),
                 what.c_str());
    if (const absl::Status written = Write(); !written.ok()) {
      std::fprintf(stderr, "warning: %s\n", std::string(written.message()).c_str());
    }
  }

  absl::StatusOr<int> RunHere() {
    const std::vector<size_t> to_run = ToRun();
    PrintSummary(to_run);
    if (to_run.empty()) return 0;
    std::vector<LocalJob> commands;
    for (const size_t i : to_run) {
      DDP_RETURN_IF_ERROR(WriteConfiguration(i));
      commands.push_back({jobs_[i].folder, Command(jobs_[i].folder)});
      results_[i].state = JobState::kMissing;
      results_[i].reason.clear();
    }
    DDP_RETURN_IF_ERROR(Write());
    DDP_ASSIGN_OR_RETURN(
        const int signal,
        RunLocally(commands, {.at_once = options_.at_once, .grace = options_.launch.grace},
                   [&](size_t job, JobState state) { Note(to_run[job], state); }));
    // What the signal has interrupted will run again.
    for (JobResult& result : results_) {
      if (result.state == JobState::kRunning) result.state = JobState::kMissing;
    }
    return signal;
  }

  // The jobs that have been queued and have not ended, by the queue's name of each.
  absl::StatusOr<std::map<std::string, size_t>> Queued() const {
    std::map<std::string, size_t> queued;
    for (size_t i = 0; i < jobs_.size(); ++i) {
      if (results_[i].state == JobState::kFinished || results_[i].state == JobState::kFailed) {
        continue;
      }
      const absl::StatusOr<std::string> id =
          ReadFile(absl::StrCat(jobs_[i].folder, "/", BatchJob::kId));
      if (absl::IsNotFound(id.status())) continue;
      if (!id.ok()) return id.status();
      queued.emplace(absl::StripAsciiWhitespace(*id), i);
    }
    return queued;
  }

  // Updates the states of queued jobs; returns the number of those that have not ended.
  absl::StatusOr<size_t> AskQueue(launchers::Launcher& queue) {
    DDP_ASSIGN_OR_RETURN(const auto queued, Queued());
    if (queued.empty()) return 0;
    std::vector<std::string> ids;
    for (const auto& [id, job] : queued) ids.push_back(id);
    DDP_ASSIGN_OR_RETURN(const auto unfinished, queue.Unfinished(ids));
    for (const auto& [id, i] : queued) {
      const auto state = unfinished.find(id);
      if (state == unfinished.end()) continue;
      const JobState now = state->second == "running" ? JobState::kRunning : JobState::kQueued;
      if (now != results_[i].state) Note(i, now);
    }
    // A job that has left the queue has written its exit code, unless its node has failed or it was
    // cancelled. All of them share one deadline: a hundred may have been cancelled at once.
    const absl::Time deadline = absl::Now() + kExitCodePatience;
    for (const auto& [id, i] : queued) {
      if (unfinished.contains(id)) continue;
      const std::string& folder = jobs_[i].folder;
      while (!launchers::ReadExitCode(folder) && absl::Now() < deadline) {
        absl::SleepFor(absl::Milliseconds(100));
      }
      if (!launchers::ReadExitCode(folder)) DDP_RETURN_IF_ERROR(NoteVanished(folder, id));
      Note(i, ReadResult(jobs_[i]).state);
    }
    return unfinished.size();
  }

  absl::StatusOr<int> RunInQueue(launchers::Launcher& queue) {
    DDP_ASSIGN_OR_RETURN(size_t unfinished, AskQueue(queue));
    const std::vector<size_t> to_run = ToRun();
    if (unfinished == 0 && !to_run.empty()) {
      PrintFailures(to_run);
      DDP_RETURN_IF_ERROR(SubmitJobs(queue, to_run));
      PrintSummary(to_run);
      DDP_RETURN_IF_ERROR(Write());
      unfinished = to_run.size();
    }
    if (!queue.Mode(options_.launch).wait) return 0;
    DDP_ASSIGN_OR_RETURN(SignalPipe signals, SignalPipe::Install());
    while (unfinished > 0) {
      pollfd ready = {signals.fd(), POLLIN, 0};
      poll(&ready, 1, kAskQueueMs);
      for (const int signal : signals.Take()) {
        if (signal == SIGCHLD) continue;
        DDP_ASSIGN_OR_RETURN(const auto queued, Queued());
        std::vector<std::string> ids;
        for (const auto& [id, job] : queued) ids.push_back(id);
        DDP_RETURN_IF_ERROR(queue.Interrupt(options_.launch, ids));
        return signal;
      }
      DDP_ASSIGN_OR_RETURN(unfinished, AskQueue(queue));
    }
    return 0;
  }

  absl::Status SubmitJobs(launchers::Launcher& queue, const std::vector<size_t>& to_run) {
    const bool dry_run = queue.Mode(options_.launch).dry_run;
    std::vector<BatchJob> batch;
    for (const size_t i : to_run) {
      BatchJob job;
      job.name = absl::StrCat("sweep-", jobs_[i].id.substr(0, kIdInFolderName));
      job.folder = std::filesystem::absolute(jobs_[i].folder).lexically_normal();
      job.argv = Command(job.folder);
      if (!dry_run) {
        DDP_RETURN_IF_ERROR(WriteConfiguration(i));
      }
      batch.push_back(std::move(job));
    }
    launchers::LaunchOptions launch = options_.launch;
    launch.argv = {options_.program};
    DDP_RETURN_IF_ERROR(queue.Submit(launch, batch, options_.at_once > 1 ? options_.at_once : 0));
    if (dry_run) return absl::OkStatus();
    for (const size_t i : to_run) results_[i].state = JobState::kQueued;
    return absl::OkStatus();
  }

  const std::vector<Job>& jobs_;
  const RunSweepOptions& options_;
  std::vector<JobResult> results_;
  std::vector<std::optional<absl::Time>> starts_;
  std::vector<bool> noted_;  // whether this call has said how a job does
};

}  // namespace

absl::StatusOr<std::vector<Job>> MakeJobs(const OptionList& list, const SweepSpec& spec) {
  size_t count = 1;
  for (const Choices& choices : spec.choices) {
    count *= choices.values.size();
    if (count > kMostJobs) {
      return absl::InvalidArgumentError(
          absl::StrCat("the sweep has more than ", kMostJobs, " jobs"));
    }
  }
  std::set<std::string> without;
  for (const auto& [path, value] : spec.job_options) without.insert(path);
  const std::map<std::string, std::string> short_names = list.ShortNames();
  std::map<std::string, std::string> descriptions;  // by identity
  std::vector<Job> jobs;
  for (size_t number = 0; number < count; ++number) {
    DDP_RETURN_IF_ERROR(spec.set_base());
    Job job;
    size_t left = number;
    for (auto choices = spec.choices.rbegin(); choices != spec.choices.rend(); ++choices) {
      const std::string& value = choices->values[left % choices->values.size()];
      left /= choices->values.size();
      DDP_RETURN_IF_ERROR(spec.set({choices->path, value, choices->written}));
      job.overrides.insert(job.overrides.begin(), {short_names.at(choices->path), value});
    }
    DDP_RETURN_IF_ERROR(spec.validate());
    job.id = Identity(list, without);
    const auto [same, is_new] = descriptions.emplace(job.id, job.Description());
    if (!is_new) {
      return absl::InvalidArgumentError(absl::StrCat(
          "two jobs of the sweep are the same: ", same->second, " and ", job.Description()));
    }
    job.folder = absl::StrCat(spec.folder, "/", FolderName(job));
    for (const auto& [path, value] : spec.job_options) {
      DDP_ASSIGN_OR_RETURN(const OptionRef* const option, list.Find(path));
      DDP_RETURN_IF_ERROR(option->set(JobValue(value, job.folder, option->get())));
    }
    job.options = ToYaml(list);
    jobs.push_back(std::move(job));
  }
  return jobs;
}

absl::StatusOr<int> RunSweep(const std::vector<Job>& jobs, const RunSweepOptions& options) {
  return Sweep(jobs, options).Run();
}

}  // namespace ddp::config
