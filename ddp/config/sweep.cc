#include "ddp/config/sweep.h"

#include <poll.h>
#include <signal.h>
#include <stdlib.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "base/file.h"
#include "base/option_error.h"
#include "base/signal_pipe.h"
#include "base/status.h"
#include "ddp/config/effective.h"
#include "ddp/config/local_jobs.h"
#include "ddp/config/progress.h"
#include "launchers/queue.h"
#include "nlohmann/json.hpp"

namespace ddp::config {
namespace {

using launchers::BatchJob;

constexpr size_t kMostJobs = 100000;
// Most file systems allow names of 255 bytes.
constexpr size_t kMostFolderName = 120;
constexpr size_t kIdInFolderName = 8;
constexpr size_t kMostIdsShown = 5;  // in a message
// A network file system may show a file seconds after it was written on another machine.
constexpr absl::Duration kExitCodePatience = absl::Seconds(10);
// A report takes the lock for a moment, to see whether there is a sweep.
constexpr int kLockTries = 10;
constexpr absl::Duration kLockPause = absl::Milliseconds(50);
// What the sweep asks of a job. A run writes its own options into config.yaml, without those of its
// process, and with what it has chosen itself.
constexpr char kJobFile[] = "job.yaml";
constexpr char kConfigFile[] = "config.yaml";
constexpr char kSweepFile[] = "sweep.jsonl";
constexpr char kPrevious[] = "previous";

// The end of the digest: its first digits differ little where only the last options differ.
std::string ShortId(const Job& job) {
  return job.id.substr(job.id.size() - std::min(job.id.size(), kIdInFolderName));
}

// Name of the job's folder: "lr=0.1,model=cnn-1f3a9c2e".
std::string FolderName(const Job& job) {
  std::string name = absl::StrJoin(job.overrides, ",", absl::PairFormatter("="));
  for (char& c : name) {
    const bool safe = absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
                      std::string_view("._=,+-").find(c) != std::string_view::npos;
    if (!safe) c = '_';
  }
  if (name.size() > kMostFolderName) name.resize(kMostFolderName);
  return absl::StrCat(name, "-", ShortId(job));
}

// The options of a list in their state for one job, as far as they say what the job is.
class Identities {
 public:
  Identities(const OptionList& list, const SweepSpec& spec) : list_(list), spec_(spec) {
    for (const auto& [path, value] : spec.job_options) without_.insert(path);
    for (const Choices& choices : spec.choices) compared_.insert(choices.path);
    // How the ranks are started is incidental, but not how many there are, nor what the sweep
    // tries; the launcher itself is one for all jobs.
    constexpr absl::string_view kSize = "nproc_per_node";
    const absl::StatusOr<const OptionRef*> size = list.Find(kSize);
    if (!size.ok()) return;
    absl::string_view group = (*size)->path;
    if (!absl::ConsumeSuffix(&group, kSize) || group.empty()) return;
    for (const OptionRef& option : list.options()) {
      absl::string_view name = option.path;
      if (!absl::ConsumePrefix(&name, group) || name == kSize) continue;
      if (name == "nnodes") {
        nodes_ = &option;
        continue;
      }
      if (name == "name" || compared_.count(option.path) == 0) without_.insert(option.path);
    }
  }

  // Whether the run begins from a checkpoint that is not its own.
  absl::StatusOr<bool> BeginsElsewhere() const {
    if (spec_.resume.path.empty()) return false;
    DDP_ASSIGN_OR_RETURN(const OptionRef* const resume, list_.Find(spec_.resume.path));
    const std::string value = resume->get();
    return !value.empty() && value != spec_.resume.own;
  }

  // By the values that the list has.
  absl::StatusOr<std::string> Current() const {
    std::set<std::string> without = without_;
    DDP_ASSIGN_OR_RETURN(const bool elsewhere, BeginsElsewhere());
    if (!elsewhere) without.insert(spec_.resume.path);
    // As of a job that says nothing of nodes; once it was the default, and in each config.yaml.
    if (nodes_ != nullptr && nodes_->get() == "1") without.insert(nodes_->path);
    return Identity(list_, spec_.defaults, without, compared_);
  }

  // Of the job in a folder; nullopt if its file is none that this program can read. Earlier
  // versions wrote only config.yaml.
  std::optional<std::string> Of(const std::string& folder) const {
    std::string path = absl::StrCat(folder, "/", kJobFile);
    std::error_code error;
    if (!std::filesystem::exists(path, error)) path = absl::StrCat(folder, "/", kConfigFile);
    const auto file = ReadConfigFile(path, list_);
    if (!file.ok()) return std::nullopt;
    for (size_t i = 0; i < spec_.defaults.size(); ++i) {
      if (!list_.options()[i].set(spec_.defaults[i].second).ok()) return std::nullopt;
    }
    for (const FileAssignment& assignment : file->assignments) {
      if (!list_.Set(assignment.path, assignment.value).ok()) return std::nullopt;
    }
    const absl::StatusOr<std::string> id = Current();
    return id.ok() ? std::optional<std::string>(*id) : std::nullopt;
  }

 private:
  const OptionList& list_;
  const SweepSpec& spec_;
  const OptionRef* nodes_ = nullptr;  // the launcher's nnodes; null: there is none
  std::set<std::string> without_;
  std::set<std::string> compared_;  // what the sweep tries counts, though it may change no result
};

// The folders in that of a sweep: by identity, and the names that are taken by others.
struct ExistingFolders {
  std::map<std::string, std::string> by_id;
  std::set<std::string> taken;
};

ExistingFolders FindFolders(const Identities& identities, const std::string& sweep) {
  ExistingFolders existing;
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(sweep);
  if (!names.ok()) return existing;
  for (const std::string& name : *names) {
    const std::string folder = absl::StrCat(sweep, "/", name);
    std::error_code error;
    if (!std::filesystem::is_directory(folder, error)) continue;
    const std::optional<std::string> id = identities.Of(folder);
    if (!id) continue;
    existing.taken.insert(folder);
    const auto [first, is_new] = existing.by_id.emplace(*id, folder);
    // Of two, the one that has a result.
    const bool finished = launchers::ReadExitCode(folder) == 0;
    if (!is_new && finished && launchers::ReadExitCode(first->second) != 0) first->second = folder;
  }
  return existing;
}

// The folder of a job that has none yet.
std::string NewFolder(const Job& job, const std::string& sweep,
                      const std::set<std::string>& taken) {
  const std::string base = absl::StrCat(sweep, "/", FolderName(job));
  std::string folder = base;
  // It has the job's name but another configuration: that of a version with other defaults.
  for (int i = 2; taken.count(folder) > 0; ++i) folder = absl::StrCat(base, "-", i);
  return folder;
}

bool IsToRun(JobState state) {
  return state == JobState::kMissing || state == JobState::kFailed || state == JobState::kCancelled;
}

// What a sweep knows of its jobs, and what it prints.
class Sweep {
 public:
  // `tries_out`: the folders are temporary, so that what the user is to know is printed.
  Sweep(const std::vector<Job>& jobs, const RunSweepOptions& options, bool tries_out = false)
      : jobs_(jobs),
        options_(options),
        tries_out_(tries_out),
        starts_(jobs.size()),
        noted_(jobs.size()) {}

  absl::StatusOr<int> Run() {
    const std::unique_ptr<launchers::Launcher> queue = launchers::FindQueue(options_.launch.name);
    if (queue && queue->Mode(options_.launch).dry_run) {
      ReadResults();
      DDP_RETURN_IF_ERROR(SubmitJobs(*queue, ToRun()));
      return 0;
    }
    if (const absl::Status made = MakeDirectories(options_.folder); !made.ok()) {
      return OptionError(options_.folder_option, options_.folder,
                         absl::StrCat("cannot be written: ", made.message()));
    }
    const absl::StatusOr<DirectoryLock> lock = Lock();
    // Some file systems have no locks; then the user must know.
    if (absl::IsUnavailable(lock.status())) {
      return absl::FailedPreconditionError(
          absl::StrCat("another process runs a sweep in ", options_.folder));
    }
    // Another process may have written results until now.
    ReadResults();
    DDP_ASSIGN_OR_RETURN(const int signal, queue ? RunInQueue(*queue) : RunHere());
    DDP_RETURN_IF_ERROR(Write());
    PrintTable();
    if (signal != 0) return 128 + signal;
    return is_refused_ || Count(JobState::kFailed) + Count(JobState::kCancelled) > 0 ? 1 : 0;
  }

  absl::StatusOr<int> PrintReport() {
    ReadResults();
    const std::unique_ptr<launchers::Launcher> named = launchers::FindQueue(options_.launch.name);
    const std::unique_ptr<launchers::Launcher> linked = launchers::FindLinkedQueue();
    const absl::Status asked = AskOnce(named ? named.get() : linked.get(), /*quiet=*/true);
    if (!asked.ok()) DDP_RETURN_IF_ERROR(MarkUnknown(asked));
    if (!named && absl::IsUnavailable(Lock().status())) ReadStates();
    for (size_t i = 0; i < jobs_.size(); ++i) {
      if (results_[i].state == JobState::kRunning) {
        results_[i].progress = ReadProgress(jobs_[i].folder);
      }
    }
    PrintTable();
    return 0;
  }

 private:
  absl::StatusOr<DirectoryLock> Lock() const {
    for (int i = 1;; ++i) {
      absl::StatusOr<DirectoryLock> lock = DirectoryLock::TryExclusive(options_.folder);
      if (i == kLockTries || !absl::IsUnavailable(lock.status())) return lock;
      absl::SleepFor(kLockPause);
    }
  }

  void ReadResults() {
    results_.clear();
    for (const Job& job : jobs_) results_.push_back(ReadResult(job));
  }

  // The states that a sweep in another process has written, of the jobs that have no end yet.
  void ReadStates() {
    const auto text = ReadFile(absl::StrCat(options_.folder, "/", kSweepFile));
    if (!text.ok()) return;
    for (absl::string_view line : absl::StrSplit(*text, '\n')) {
      const auto record = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
      if (!record.is_object() || record.value("status", "") != StateName(JobState::kRunning)) {
        continue;
      }
      for (size_t i = 0; i < jobs_.size(); ++i) {
        if (record.value("id", "") != jobs_[i].id || results_[i].state == JobState::kQueued ||
            launchers::ReadExitCode(jobs_[i].folder)) {
          continue;
        }
        results_[i].state = JobState::kRunning;
        results_[i].reason.clear();
      }
    }
  }

  void PrintTable() {
    for (size_t i = 0; i < jobs_.size(); ++i) {
      results_[i].attempts = launchers::CountAttempts(jobs_[i].folder);
    }
    WarnOfUnknownMetric();
    std::fflush(stderr);
    std::printf("%s", SweepTable(jobs_, results_, options_.metric).c_str());
    std::fflush(stdout);
  }

  // A wrong name would look like jobs without results.
  void WarnOfUnknownMetric() const {
    const std::string& metric = options_.metric.name;
    std::set<std::string> names;
    for (const JobResult& result : results_) {
      if (result.state != JobState::kFinished) continue;  // it may come yet
      for (const auto& [name, value] : result.metrics) names.insert(name);
    }
    if (metric.empty() || names.empty() || names.contains(metric)) return;
    std::fprintf(stderr, "warning: no job has the metric %s; there are: %s\n", metric.c_str(),
                 absl::StrJoin(names, ", ").c_str());
  }

  size_t Count(JobState state) const {
    return std::count_if(results_.begin(), results_.end(),
                         [&](const JobResult& result) { return result.state == state; });
  }

  bool IsChanged(size_t i) const {
    return options_.rerun_changed && results_[i].state == JobState::kFinished &&
           results_[i].build != options_.build;
  }

  std::vector<size_t> ToRun() const {
    std::vector<size_t> jobs;
    for (size_t i = 0; i < jobs_.size(); ++i) {
      if (IsToRun(results_[i].state) || IsChanged(i)) jobs.push_back(i);
    }
    return jobs;
  }

  absl::Status Write() const {
    return WriteSweepFile(absl::StrCat(options_.folder, "/", kSweepFile), jobs_, results_);
  }

  // How many jobs there are, and why those run that are to run.
  void PrintSummary(const std::vector<size_t>& to_run) const {
    std::map<std::string, size_t> reasons;
    for (const size_t i : to_run)
      ++reasons[IsChanged(i) ? "changed" : StateName(results_[i].state)];
    std::vector<std::string> counts;
    for (const char* const reason : {"missing", "failed", "cancelled", "changed"}) {
      if (reasons.count(reason) > 0) counts.push_back(absl::StrCat(reasons[reason], " ", reason));
    }
    const std::string why =
        counts.empty() ? "" : absl::StrCat(" (", absl::StrJoin(counts, ", "), ")");
    std::vector<std::string> others;
    for (const JobState state : {JobState::kQueued, JobState::kRunning, JobState::kUnknown}) {
      if (Count(state) > 0)
        others.push_back(absl::StrCat(", ", Count(state), " ", StateName(state)));
    }
    std::fprintf(stderr, "sweep: %zu jobs, %zu have finished%s, %zu to run%s, in %s\n",
                 jobs_.size(), Count(JobState::kFinished), absl::StrJoin(others, "").c_str(),
                 to_run.size(), why.c_str(), options_.folder.c_str());
  }

  // The jobs have ended while no call watched them.
  void PrintFailures(const std::vector<size_t>& jobs) {
    for (const size_t i : jobs) {
      if (results_[i].state != JobState::kMissing && !noted_[i]) Note(i, results_[i].state);
    }
  }

  // Keeps the results of another build; returns where.
  absl::StatusOr<std::string> MoveAside(size_t i) const {
    const std::string& folder = jobs_[i].folder;
    const std::string aside = absl::StrCat(options_.folder, "/", kPrevious);
    DDP_RETURN_IF_ERROR(MakeDirectories(aside));
    const std::string base = absl::StrCat(aside, folder.substr(folder.rfind('/')));
    std::string to = base;
    std::error_code error;
    for (int n = 2; std::filesystem::exists(to, error); ++n) to = absl::StrCat(base, "-", n);
    std::filesystem::rename(folder, to, error);
    if (error) return FileError(error.value(), "moving", folder);
    return to;
  }

  // The former results of jobs that do not run after all are their results again.
  void PutBack() {
    if (aside_.empty()) return;
    for (const auto& [i, aside] : aside_) {
      const std::string& folder = jobs_[i].folder;
      std::error_code error;
      // It has what Prepare has written.
      const bool removed = RemoveTree(folder).ok();
      if (removed) std::filesystem::rename(aside, folder, error);
      if (!removed || error) {
        std::fprintf(stderr, "warning: former results of %s stay in %s\n", folder.c_str(),
                     aside.c_str());
      }
      results_[i] = ReadResult(jobs_[i]);
    }
    aside_.clear();
    // If it is empty.
    std::error_code error;
    std::filesystem::remove(absl::StrCat(options_.folder, "/", kPrevious), error);
  }

  // Makes the folder of a job that is about to run. See PutBack.
  absl::Status Prepare(size_t i) {
    const Job& job = jobs_[i];
    if (IsChanged(i)) {
      DDP_ASSIGN_OR_RETURN(std::string aside, MoveAside(i));
      aside_[i] = std::move(aside);
    }
    DDP_RETURN_IF_ERROR(MakeDirectories(job.folder));
    DDP_RETURN_IF_ERROR(WriteFileAtomically(absl::StrCat(job.folder, "/", kJobFile), job.options));
    // A run that goes on compares itself with what it has written there before.
    const std::string config = absl::StrCat(job.folder, "/", kConfigFile);
    std::error_code error;
    if (!std::filesystem::exists(config, error)) {
      DDP_RETURN_IF_ERROR(WriteFileAtomically(config, job.options));
    }
    return WriteFileAtomically(absl::StrCat(job.folder, "/", Job::kBuild),
                               absl::StrCat(options_.build, "\n"));
  }

  std::vector<std::string> Command(const Job& job, const std::string& folder) const {
    std::vector<std::string> command = {options_.program,
                                        absl::StrCat("--config=", folder, "/", kJobFile)};
    // What it has saved itself is further on than where it began.
    if (job.begins_elsewhere && options_.resume.has_own(job.folder)) {
      command.push_back(absl::StrCat(options_.resume.path, "=", options_.resume.own));
    }
    return command;
  }

  void Print(size_t i, absl::string_view what) const {
    std::fprintf(stderr, "[%zu/%zu] %s: %s\n", i + 1, jobs_.size(), jobs_[i].Description().c_str(),
                 std::string(what).c_str());
  }

  // Records and prints a change of the state of job `i`.
  void Note(size_t i, JobState state) {
    noted_[i] = true;
    std::string what = StateName(state);
    if (state == JobState::kQueued || state == JobState::kRunning) {
      results_[i].state = state;
      results_[i].reason.clear();
      if (state == JobState::kRunning) starts_[i] = absl::Now();
    } else {
      // One that has left a queue without an exit code says so only in what is known of it.
      const JobResult read = ReadResult(jobs_[i]);
      if (read.state != JobState::kMissing) results_[i] = read;
      if (tries_out_) {
        const std::string log = absl::StrCat(jobs_[i].folder, "/", BatchJob::kLog);
        absl::StrReplaceAll({{log, "its output"}}, &results_[i].reason);
      }
      if (starts_[i]) {
        absl::StrAppend(
            &what, " after ",
            absl::StrFormat("%.1f s", absl::ToDoubleSeconds(absl::Now() - *starts_[i])));
      }
      const auto metric = results_[i].metrics.find(options_.metric.name);
      if (state != JobState::kFinished) {
        absl::StrAppend(&what, ": ", results_[i].reason);
      } else if (metric != results_[i].metrics.end()) {
        absl::StrAppend(&what, ", ", metric->first, "=", absl::StrFormat("%.6g", metric->second));
      }
    }
    Print(i, what);
    if (const absl::Status written = Write(); !written.ok()) {
      std::fprintf(stderr, "warning: %s\n", std::string(written.message()).c_str());
    }
  }

  absl::StatusOr<int> RunHere() {
    DDP_RETURN_IF_ERROR(LeaveQueued());
    const std::vector<size_t> to_run = ToRun();
    if (!tries_out_) PrintSummary(to_run);
    if (to_run.empty()) return 0;
    const absl::StatusOr<int> signal = PrepareAndRun(to_run);
    PutBack();
    // What the signal has interrupted will run again.
    for (const size_t i : to_run) {
      if (results_[i].state == JobState::kRunning) results_[i].state = JobState::kMissing;
    }
    if (!signal.ok()) Write().IgnoreError();
    return signal;
  }

  absl::StatusOr<int> PrepareAndRun(const std::vector<size_t>& to_run) {
    std::vector<LocalJob> commands;
    for (const size_t i : to_run) {
      DDP_RETURN_IF_ERROR(Prepare(i));
      commands.push_back({jobs_[i].folder, Command(jobs_[i], jobs_[i].folder)});
      Forget(i, JobState::kMissing);
    }
    DDP_RETURN_IF_ERROR(Write());
    return RunLocally(commands,
                      {.at_once = options_.at_once.value_or(1), .grace = options_.launch.grace},
                      [&](size_t job, JobState state) { NoteHere(to_run[job], state); });
  }

  // A job that failed here may have been asked to stop.
  void NoteHere(size_t i, JobState state) {
    aside_.erase(i);  // it has begun
    Note(i, state == JobState::kFailed ? ReadResult(jobs_[i]).state : state);
    if (tries_out_ && state != JobState::kRunning) PrintOutput(i);
  }

  // Of a job that has ended.
  void PrintOutput(size_t i) const {
    const auto log = ReadFile(absl::StrCat(jobs_[i].folder, "/", BatchJob::kLog));
    if (!log.ok()) return;
    std::printf("# %s\n%s%s", jobs_[i].Description().c_str(), log->c_str(),
                log->empty() || log->back() == '\n' ? "" : "\n");
    std::fflush(stdout);
  }

  // What is known of the attempt before is not true of the next.
  void Forget(size_t i, JobState state) {
    results_[i] = JobResult();
    results_[i].state = state;
    results_[i].build = options_.build;
  }

  // The jobs that may be in a queue, by what their folders say, each with its last id there.
  absl::StatusOr<std::map<size_t, std::string>> PerhapsQueued() const {
    std::map<size_t, std::string> jobs;
    for (size_t i = 0; i < jobs_.size(); ++i) {
      const JobState state = results_[i].state;
      if (state == JobState::kFinished || state == JobState::kFailed) continue;
      DDP_ASSIGN_OR_RETURN(const std::vector<std::string> ids,
                           launchers::ReadJobIds(jobs_[i].folder));
      if (!ids.empty()) jobs[i] = ids.back();
    }
    return jobs;
  }

  // As AskQueue, once, whatever the queue; null: no launcher has one.
  absl::Status AskOnce(launchers::Launcher* queue, bool quiet) {
    if (queue == nullptr) {
      return absl::FailedPreconditionError("no launcher with a queue is linked into this program");
    }
    launchers::QueueWatch watch(*queue);
    return AskQueue(watch, quiet).status();
  }

  // Without the answer of a queue.
  absl::Status MarkUnknown(const absl::Status& why) {
    DDP_ASSIGN_OR_RETURN(const auto jobs, PerhapsQueued());
    if (jobs.empty()) return absl::OkStatus();
    std::fprintf(stderr, "warning: jobs may be in a queue, and that cannot be asked: %s\n",
                 std::string(why.message()).c_str());
    for (const auto& [i, id] : jobs) {
      results_[i].state = JobState::kUnknown;
      // A call that was killed during the submission leaves a line of several words, and no id.
      results_[i].reason = absl::StrContains(id, ' ')
                               ? "a job that was being submitted may be in the queue"
                               : absl::StrCat("job ", id, " may be in the queue");
    }
    return absl::OkStatus();
  }

  // Jobs that an earlier call has queued stay there, though this one names no queue.
  absl::Status LeaveQueued() {
    const std::unique_ptr<launchers::Launcher> queue = launchers::FindLinkedQueue();
    const absl::Status asked = AskOnce(queue.get(), /*quiet=*/false);
    if (asked.ok()) return absl::OkStatus();
    DDP_ASSIGN_OR_RETURN(const auto jobs, PerhapsQueued());
    if (jobs.empty()) return absl::OkStatus();
    std::vector<std::string> ids;
    for (const auto& [i, id] : jobs) {
      if (ids.size() == kMostIdsShown) break;
      ids.push_back(id);
    }
    if (ids.size() < jobs.size()) ids.push_back("…");
    return absl::FailedPreconditionError(absl::StrCat(
        "jobs may be in a queue (", absl::StrJoin(ids, ", "), "), and that cannot be asked: ",
        asked.message(), "; the same command with launcher=", queue ? queue->name() : "QUEUE",
        " goes on with them where it can be; if they have ended, remove ", BatchJob::kId,
        " in their folders"));
  }

  // Asks the queue for all jobs that have ids, also those with an exit code: they may be queued
  // again. Returns the number of those that have not ended, or nullopt without an answer. `quiet`:
  // prints and writes nothing.
  absl::StatusOr<std::optional<size_t>> AskQueue(launchers::QueueWatch& watch, bool quiet = false) {
    std::map<size_t, std::vector<std::string>> ids;  // by job
    std::vector<std::string> all;
    for (size_t i = 0; i < jobs_.size(); ++i) {
      DDP_ASSIGN_OR_RETURN(ids[i], launchers::ReadJobIds(jobs_[i].folder));
      all.insert(all.end(), ids[i].begin(), ids[i].end());
    }
    unfinished_.clear();
    if (all.empty()) return std::optional<size_t>(0);
    DDP_ASSIGN_OR_RETURN(const launchers::QueueWatch::Answer* const answer, watch.Query(all));
    if (answer == nullptr) return std::optional<size_t>();
    size_t count = 0;
    // All jobs share one deadline: a hundred may have been cancelled at once.
    const absl::Time deadline = absl::Now() + (quiet ? absl::ZeroDuration() : kExitCodePatience);
    for (const auto& [i, own] : ids) {
      if (own.empty()) continue;
      const bool in_queue = std::any_of(
          own.begin(), own.end(), [&](const std::string& id) { return answer->contains(id); });
      while (!in_queue && !launchers::ReadExitCode(jobs_[i].folder) && absl::Now() < deadline) {
        absl::SleepFor(absl::Milliseconds(100));
      }
      if (Update(i, own, *answer, quiet)) ++count;
    }
    return std::optional<size_t>(count);
  }

  // Sets the state of a job by its ids in the queue; whether it has not ended.
  bool Update(size_t i, const std::vector<std::string>& ids,
              const launchers::QueueWatch::Answer& answer, bool quiet) {
    JobResult now = ReadResult(jobs_[i]);
    bool unfinished = false;
    for (const std::string& id : ids) {
      const auto state = answer.find(id);
      if (state == answer.end()) continue;
      const bool runs = state->second == StateName(JobState::kRunning);
      // One that has its exit code is about to leave.
      if (runs && now.state != JobState::kMissing) continue;
      unfinished = true;
      unfinished_.push_back(id);
      now.state = runs ? JobState::kRunning : JobState::kQueued;
      now.reason.clear();
      if (state->second != StateName(JobState::kUnknown)) continue;
      now.state = JobState::kUnknown;
      now.reason = absl::StrCat("it may come into the queue yet: ", id);
    }
    if (!unfinished && now.state == JobState::kMissing) {
      now.state = JobState::kCancelled;
      now.reason = LastErrorOf(jobs_[i].folder);
      if (now.reason.empty()) {
        now.reason = absl::StrCat("job ", ids.back(),
                                  " has left the queue without an exit code: it was cancelled, or "
                                  "its node has failed");
      }
    }
    const bool changed = now.state != results_[i].state;
    const JobState before = results_[i].state;
    results_[i] = now;
    // At its first look a call says what has ended badly when it runs that again: PrintFailures.
    if (!quiet && changed && (watched_ || unfinished || before != JobState::kMissing)) {
      Note(i, now.state);
    }
    return unfinished;
  }

  absl::StatusOr<int> RunInQueue(launchers::Launcher& queue) {
    launchers::QueueWatch watch(queue);
    const absl::StatusOr<std::optional<size_t>> answer = AskQueue(watch);
    if (absl::IsUnavailable(answer.status()) || absl::IsDeadlineExceeded(answer.status())) {
      return absl::UnavailableError(absl::StrCat(
          "the queue does not answer, and without it jobs could be submitted twice; try again: ",
          answer.status().message()));
    }
    if (!answer.ok()) return answer.status();
    size_t unfinished = answer->value_or(0);
    const std::vector<size_t> to_run = ToRun();
    PrintFailures(to_run);
    PrintSummary(to_run);
    // A signal takes effect once the ids of what has been submitted are known.
    DDP_ASSIGN_OR_RETURN(SignalPipe signals, SignalPipe::Install());
    const auto taken = [&] {
      std::vector<int> all = signals.Take();
      std::erase(all, SIGCHLD);
      return all.empty() ? 0 : all[0];
    };
    if (!to_run.empty()) {
      DDP_RETURN_IF_ERROR(SubmitJobs(queue, to_run));
      DDP_RETURN_IF_ERROR(Write());
      unfinished += Count(JobState::kQueued);
    }
    int signal = taken();
    watched_ = queue.Mode(options_.launch).wait;
    while (watched_ && signal == 0 && unfinished > 0) {
      const absl::Duration pause = watch.next() - absl::Now();
      pollfd ready = {signals.fd(), POLLIN, 0};
      poll(&ready, 1, static_cast<int>(std::max<int64_t>(1, absl::ToInt64Milliseconds(pause) + 1)));
      signal = taken();
      if (signal != 0) break;
      DDP_ASSIGN_OR_RETURN(const std::optional<size_t> count, AskQueue(watch));
      if (count) unfinished = *count;
    }
    if (signal == 0) return 0;
    const absl::Status interrupted = queue.Interrupt(options_.launch, UnfinishedIds());
    if (!interrupted.ok()) {
      std::fprintf(stderr, "error: %s\n", std::string(interrupted.message()).c_str());
    }
    return signal;
  }

  // As of the last answer, with those that were submitted since.
  std::vector<std::string> UnfinishedIds() const {
    std::set<std::string> ids(unfinished_.begin(), unfinished_.end());
    for (size_t i = 0; i < jobs_.size(); ++i) {
      if (results_[i].state != JobState::kQueued && results_[i].state != JobState::kRunning)
        continue;
      const auto own = launchers::ReadJobIds(jobs_[i].folder);
      if (own.ok() && !own->empty()) ids.insert(own->back());
    }
    return {ids.begin(), ids.end()};
  }

  absl::Status SubmitJobs(launchers::Launcher& queue, const std::vector<size_t>& to_run) {
    const absl::Status submitted = PrepareAndSubmit(queue, to_run);
    PutBack();
    return submitted;
  }

  absl::Status PrepareAndSubmit(launchers::Launcher& queue, const std::vector<size_t>& to_run) {
    const bool dry_run = queue.Mode(options_.launch).dry_run;
    std::vector<BatchJob> batch;
    for (const size_t i : to_run) {
      BatchJob job;
      job.name = absl::StrCat("sweep-", ShortId(jobs_[i]));
      job.folder = std::filesystem::absolute(jobs_[i].folder).lexically_normal();
      job.argv = Command(jobs_[i], job.folder);
      job.launch = jobs_[i].launch;
      if (!dry_run) DDP_RETURN_IF_ERROR(Prepare(i));
      batch.push_back(std::move(job));
    }
    DDP_ASSIGN_OR_RETURN(const std::vector<absl::Status> submitted,
                         queue.Submit(batch, options_.at_once.value_or(0), unfinished_));
    if (dry_run) return absl::OkStatus();
    absl::Status refused;
    bool any_is_queued = false;
    for (size_t n = 0; n < to_run.size(); ++n) {
      const absl::Status& status = submitted[n];
      if (status.ok()) Forget(to_run[n], JobState::kQueued);
      any_is_queued = any_is_queued || status.ok();
      // Those that may be queued nevertheless need their folders.
      if (status.ok() || absl::IsDeadlineExceeded(status) || absl::IsDataLoss(status)) {
        aside_.erase(to_run[n]);
      }
      refused.Update(status);
    }
    if (refused.ok() || !any_is_queued) return refused;
    // The others go their way, and the table shows all.
    is_refused_ = true;
    std::fprintf(stderr, "error: %s\n", std::string(refused.message()).c_str());
    return absl::OkStatus();
  }

  const std::vector<Job>& jobs_;
  const RunSweepOptions& options_;
  const bool tries_out_;
  std::vector<JobResult> results_;
  std::vector<std::optional<absl::Time>> starts_;
  std::vector<bool> noted_;  // whether this call has said how a job does
  bool watched_ = false;     // whether this call waits for the jobs
  bool is_refused_ = false;  // whether the queue has taken some of the jobs only
  std::vector<std::string> unfinished_;
  std::map<size_t, std::string> aside_;  // where results of jobs are that have not begun yet
};

}  // namespace

std::string JobValue(absl::string_view pattern, const std::string& folder,
                     const std::string& value) {
  const bool needs_name = absl::StrContains(pattern, "{name}");
  if (needs_name && value.empty()) return "";
  return absl::StrReplaceAll(
      pattern, {{"{folder}", folder}, {"{name}", value.substr(value.rfind('/') + 1)}});
}

absl::StatusOr<std::vector<Job>> MakeJobs(const OptionList& list, const SweepSpec& spec) {
  size_t count = 1;
  for (const Choices& choices : spec.choices) {
    count *= choices.values.size();
    if (count > kMostJobs) {
      return absl::InvalidArgumentError(
          absl::StrCat("the sweep has more than ", kMostJobs, " jobs"));
    }
  }
  const Identities identities(list, spec);
  ExistingFolders existing = FindFolders(identities, spec.folder);
  const std::map<std::string, std::string> short_names = list.ShortNames();
  const auto short_name = [&](const std::string& path) {
    const auto name = short_names.find(path);
    return name == short_names.end() ? std::string(absl::StripSuffix(path, "@")) : name->second;
  };
  std::map<std::string, std::string> descriptions;  // by identity
  std::vector<Job> jobs;
  for (size_t number = 0; number < count; ++number) {
    Job job;
    std::vector<OptionAssignment> picked;
    size_t left = number;
    for (auto choices = spec.choices.rbegin(); choices != spec.choices.rend(); ++choices) {
      const std::string& value = choices->values[left % choices->values.size()];
      left /= choices->values.size();
      picked.insert(picked.begin(), {choices->path, value, choices->written});
      job.overrides.insert(job.overrides.begin(), {short_name(choices->path), value});
    }
    DDP_RETURN_IF_ERROR(spec.set(picked));
    const auto use_folder = [&](const std::string& folder) -> absl::Status {
      for (const auto& [path, value] : spec.job_options) {
        DDP_ASSIGN_OR_RETURN(const OptionRef* const option, list.Find(path));
        DDP_RETURN_IF_ERROR(option->set(JobValue(value, folder, option->get())));
      }
      return absl::OkStatus();
    };
    // Options that need one of these folders are valid in a job, whose own is known below.
    DDP_RETURN_IF_ERROR(use_folder(spec.folder));
    DDP_RETURN_IF_ERROR(spec.validate());
    DDP_ASSIGN_OR_RETURN(job.id, identities.Current());
    DDP_ASSIGN_OR_RETURN(job.begins_elsewhere, identities.BeginsElsewhere());
    const auto [same, is_new] = descriptions.emplace(job.id, job.Description());
    if (!is_new) {
      return absl::InvalidArgumentError(absl::StrCat(
          "two jobs of the sweep are the same: ", same->second, " and ", job.Description()));
    }
    const auto folder = existing.by_id.find(job.id);
    job.folder = folder != existing.by_id.end() ? folder->second
                                                : NewFolder(job, spec.folder, existing.taken);
    existing.taken.insert(job.folder);
    DDP_RETURN_IF_ERROR(use_folder(job.folder));
    if (!spec.resume.path.empty() && !job.begins_elsewhere) {
      DDP_RETURN_IF_ERROR(list.Set(spec.resume.path, spec.resume.own));
    }
    job.options = ToYaml(list);
    job.launch = *spec.launch;
    jobs.push_back(std::move(job));
  }
  return jobs;
}

absl::StatusOr<int> RunSweep(const std::vector<Job>& jobs, const RunSweepOptions& options) {
  return Sweep(jobs, options).Run();
}

absl::StatusOr<int> TrySweep(std::vector<Job> jobs, RunSweepOptions options) {
  std::error_code error;
  const std::filesystem::path parent = std::filesystem::temp_directory_path(error);
  if (error) return FileError(error.value(), "finding the folder of temporary files", "TMPDIR");
  std::string folder = absl::StrCat(std::filesystem::absolute(parent).string(), "/sweep.XXXXXX");
  if (mkdtemp(folder.data()) == nullptr) return FileError(errno, "making folder", folder);
  std::fprintf(stderr, "sweep: dry run of %zu jobs, of which nothing stays in %s\n", jobs.size(),
               options.folder.c_str());
  for (size_t i = 0; i < jobs.size(); ++i) jobs[i].folder = absl::StrCat(folder, "/", i + 1);
  options.folder = folder;
  const absl::StatusOr<int> code = Sweep(jobs, options, /*tries_out=*/true).Run();
  const absl::Status removed = RemoveTree(folder);
  if (code.ok() && !removed.ok()) return removed;
  return code;
}

absl::StatusOr<int> ReportSweep(const std::vector<Job>& jobs, const RunSweepOptions& options) {
  return Sweep(jobs, options).PrintReport();
}

}  // namespace ddp::config
