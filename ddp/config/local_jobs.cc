#include "ddp/config/local_jobs.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/environment.h"
#include "base/file.h"
#include "base/pinned_program.h"
#include "base/process.h"
#include "base/signal_pipe.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "ddp/config/shares.h"
#include "launchers/launcher.h"
#include "launchers/queue.h"

namespace ddp::config {
namespace {

using launchers::BatchJob;

// The exit code of a job that could not be started, as that of a shell.
constexpr int kNotStarted = 126;

// Binds the calling thread, and so the processes that it starts. An error leaves it as it is: a
// share of the cores is not worth a failed sweep.
void BindTo(const std::vector<int>& cores) {
  if (cores.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) CPU_SET(core, &set);
  sched_setaffinity(0, sizeof(set), &set);
}

class Runner {
 public:
  Runner(const std::vector<LocalJob>& jobs, const LocalJobsOptions& options,
         const std::function<void(size_t, JobState)>& changed, PinnedProgram program,
         SignalPipe signals, PosixProcessGroup group)
      : jobs_(jobs),
        options_(options),
        changed_(changed),
        program_(std::move(program)),
        signals_(std::move(signals)),
        group_(std::move(group)),
        slots_(std::min<size_t>(options.at_once, jobs.size())),
        machine_(ThisMachine(Environment::FromProcess())) {}

  absl::StatusOr<int> Run() {
    while (true) {
      if (signal_ == 0) StartJobs();
      if (AllFree()) return signal_;
      Wait();
    }
  }

 private:
  struct Slot {
    pid_t pid = 0;  // 0: free
    size_t job = 0;
  };

  bool AllFree() const {
    return std::all_of(slots_.begin(), slots_.end(), [](const Slot& s) { return s.pid == 0; });
  }

  void StartJobs() {
    for (size_t slot = 0; slot < slots_.size(); ++slot) {
      while (slots_[slot].pid == 0 && next_ < jobs_.size()) {
        const size_t job = next_++;
        if (const absl::Status started = Start(slot, job); !started.ok()) NotStarted(job, started);
      }
    }
  }

  // The others run all the same.
  void NotStarted(size_t job, const absl::Status& why) {
    const std::string& folder = jobs_[job].folder;
    std::ofstream(absl::StrCat(folder, "/", BatchJob::kLog), std::ios::app)
        << "error: the job cannot be started: " << why.message() << "\n";
    launchers::WriteExitCode(folder, kNotStarted).IgnoreError();
    changed_(job, JobState::kFailed);
  }

  absl::Status Start(size_t slot, size_t job) {
    const std::string& folder = jobs_[job].folder;
    DDP_RETURN_IF_ERROR(launchers::ForgetJob(folder));
    const std::string path = absl::StrCat(folder, "/", BatchJob::kLog);
    const UniqueFd log(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    if (!log.ok()) return FileError(errno, "cannot open", path);
    const UniqueFd null(open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (!null.ok()) return FileError(errno, "cannot open", "/dev/null");
    std::map<std::string, std::string> environment = Environment::FromProcess().variables();
    const int slots = static_cast<int>(slots_.size());
    const Share share = ShareOf(machine_, static_cast<int>(slot), slots);
    if (slots > 1 && !share.gpus.empty()) {
      environment["CUDA_VISIBLE_DEVICES"] = absl::StrJoin(share.gpus, ",");
    }
    const std::string attempts = absl::StrCat(folder, "/", BatchJob::kAttempts);
    environment[launchers::kAttemptsVariable] = std::filesystem::absolute(attempts);
    std::vector<std::string> argv = jobs_[job].argv;
    argv[0] = program_.Path();
    const Machine whole = {.cores = machine_.cores, .available = INT_MAX, .gpus = {}};
    const std::vector<int> all = ShareOf(whole, 0, 1).cores;
    if (slots > 1) BindTo(share.cores);
    const absl::StatusOr<pid_t> pid = StartProcess({.argv = argv,
                                                    .environment = std::move(environment),
                                                    .group = group_.id(),
                                                    .stdin_fd = null.get(),
                                                    .stdout_fd = log.get(),
                                                    .stderr_fd = log.get(),
                                                    .inherited_fds = {}});
    if (slots > 1) BindTo(all);
    if (!pid.ok()) return pid.status();
    launchers::NoteAttempt(attempts, absl::StrCat("pid ", *pid));
    slots_[slot] = {*pid, job};
    changed_(job, JobState::kRunning);
    return absl::OkStatus();
  }

  void Wait() {
    int timeout = -1;
    if (deadline_) {
      const absl::Duration left = *deadline_ - absl::Now();
      timeout = static_cast<int>(std::max<int64_t>(0, absl::ToInt64Milliseconds(left) + 1));
    }
    pollfd ready = {signals_.fd(), POLLIN, 0};
    poll(&ready, 1, timeout);
    for (const int signal : signals_.Take()) {
      if (signal != SIGCHLD) End(signal);
    }
    Reap();
    if (deadline_ && absl::Now() >= *deadline_) {
      deadline_.reset();
      // Others save, or have launchers that know how long their ranks may.
      SignalAll(SIGKILL, [](pid_t job) { return !HandlesSignal(job, SIGTERM); });
    }
  }

  void End(int signal) {
    const absl::Time now = absl::Now();
    if (signal_ != 0) {
      // Sooner it may be the same signal, by another way.
      if (now - ended_ >= absl::Seconds(1)) SignalAll(SIGKILL);
      return;
    }
    signal_ = signal;
    ended_ = now;
    SignalAll(SIGTERM);
    deadline_ = now + options_.grace;
  }

  void SignalAll(
      int signal, const std::function<bool(pid_t job)>& whom = [](pid_t) { return true; }) {
    for (const Slot& slot : slots_) {
      if (slot.pid != 0 && whom(slot.pid)) kill(slot.pid, signal);
    }
  }

  void Reap() {
    for (Slot& slot : slots_) {
      int status = 0;
      if (slot.pid == 0 || waitpid(slot.pid, &status, WNOHANG) != slot.pid) continue;
      slot.pid = 0;
      // The signal has ended the job, or may have. It gets no exit code, so that the sweep counts
      // it as missing.
      if (signal_ != 0) continue;
      const int code = ExitCodeOf(status);
      // If the disk is full the job counts as missing.
      launchers::WriteExitCode(jobs_[slot.job].folder, code).IgnoreError();
      changed_(slot.job, code == 0 ? JobState::kFinished : JobState::kFailed);
    }
  }

  const std::vector<LocalJob>& jobs_;
  const LocalJobsOptions options_;
  const std::function<void(size_t, JobState)>& changed_;
  const PinnedProgram program_;
  SignalPipe signals_;
  PosixProcessGroup group_;  // ends what is left when Run returns early
  std::vector<Slot> slots_;
  const Machine machine_;
  size_t next_ = 0;
  int signal_ = 0;                      // that has ended the sweep
  absl::Time ended_;                    // when it came
  std::optional<absl::Time> deadline_;  // for SIGKILL
};

}  // namespace

absl::StatusOr<int> RunLocally(const std::vector<LocalJob>& jobs, const LocalJobsOptions& options,
                               const std::function<void(size_t job, JobState state)>& changed) {
  if (jobs.empty()) return 0;
  DDP_ASSIGN_OR_RETURN(PinnedProgram program, PinnedProgram::Open(jobs[0].argv[0]));
  DDP_ASSIGN_OR_RETURN(SignalPipe signals, SignalPipe::Install({SIGUSR1, SIGUSR2}));
  DDP_ASSIGN_OR_RETURN(PosixProcessGroup group, PosixProcessGroup::Create());
  return Runner(jobs, options, changed, std::move(program), std::move(signals), std::move(group))
      .Run();
}

}  // namespace ddp::config
