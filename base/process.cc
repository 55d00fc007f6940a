#include "base/process.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/process_limits.h"
#include "base/status.h"

namespace ddp {
namespace {

constexpr char kOwnProgram[] = "/proc/self/exe";

struct Pipe {
  UniqueFd reader;
  UniqueFd writer;
};

absl::StatusOr<Pipe> MakePipe() {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) return absl::ErrnoToStatus(errno, "cannot create a pipe");
  return Pipe{UniqueFd(fds[0]), UniqueFd(fds[1])};
}

// Forks with all signals blocked, so that no handler of ours runs in the child. The child starts
// with signals blocked; `mask` gets the previous mask.
pid_t ForkWithSignalsBlocked(sigset_t& mask) {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &mask);
  const pid_t pid = fork();
  if (pid != 0) {
    const int error = errno;
    pthread_sigmask(SIG_SETMASK, &mask, nullptr);
    errno = error;
  }
  return pid;
}

void Reap(pid_t pid) {
  while (waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
  }
}

// After fork has failed.
absl::Status CannotFork(int error, absl::string_view what) {
  if (error == EAGAIN) return Annotate(NoMoreThreads("processes"), what);
  return absl::ErrnoToStatus(error, what);
}

[[noreturn]] void WatchdogMain(int lifeline) {
  setpgid(0, 0);
  prctl(PR_SET_NAME, "ddp-watchdog");
  char byte;
  while (read(lifeline, &byte, 1) < 0 && errno == EINTR) {
  }
  kill(0, SIGKILL);  // the group, and with it this process
  _exit(0);
}

// What the child needs, prepared before the fork: between fork and exec only async-signal-safe
// calls are allowed, and memory allocation is not.
struct ChildPlan {
  const char* path;
  char** argv;
  char** environment;
  const ProcessOptions* options;
  pid_t parent;
  sigset_t mask;
  int report;  // gets errno if exec fails; closed by exec
};

[[noreturn]] void FailChild(const ChildPlan& plan) {
  const int error = errno;
  [[maybe_unused]] ssize_t written = write(plan.report, &error, sizeof(error));
  _exit(127);
}

void MoveFd(const ChildPlan& plan, int from, int to) {
  if (from == to) {
    fcntl(to, F_SETFD, 0);
  } else if (dup2(from, to) < 0) {
    FailChild(plan);
  }
}

[[noreturn]] void ChildMain(const ChildPlan& plan) {
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) FailChild(plan);
  // The parent may have died before prctl, in which case no signal comes.
  if (getppid() != plan.parent) _exit(127);
  if (setpgid(0, plan.options->group) != 0) FailChild(plan);
  MoveFd(plan, plan.options->stdin_fd, STDIN_FILENO);
  MoveFd(plan, plan.options->stdout_fd, STDOUT_FILENO);
  MoveFd(plan, plan.options->stderr_fd, STDERR_FILENO);
  for (const int fd : plan.options->inherited_fds) fcntl(fd, F_SETFD, 0);
  // Reset handlers: exec would remove them, but they could run before. Ignored signals stay ignored
  // (nohup).
  for (int signal = 1; signal < NSIG; ++signal) {
    struct sigaction action;
    if (sigaction(signal, nullptr, &action) != 0 || action.sa_handler == SIG_IGN) continue;
    action = {};
    action.sa_handler = SIG_DFL;
    sigaction(signal, &action, nullptr);
  }
  // The new process group is in the background of a terminal, which stops those that write to it if
  // it is set so (`stty tostop`); nobody would let the process go on.
  signal(SIGTTOU, SIG_IGN);
  sigprocmask(SIG_SETMASK, &plan.mask, nullptr);
  execve(plan.path, plan.argv, plan.environment);
  FailChild(plan);
}

// Looks the program up in PATH, as a shell does.
std::string FindInPath(const std::string& program, const std::map<std::string, std::string>& env) {
  const auto path = env.find("PATH");
  if (program.find('/') != std::string::npos || path == env.end()) return program;
  for (absl::string_view folder : absl::StrSplit(path->second, ':')) {
    std::string candidate = absl::StrCat(folder.empty() ? "." : folder, "/", program);
    if (access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return program;
}

std::vector<char*> Pointers(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& text : strings) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace

PosixProcessGroup::PosixProcessGroup(pid_t watchdog, UniqueFd lifeline)
    : watchdog_(watchdog), lifeline_(std::move(lifeline)) {}

PosixProcessGroup::PosixProcessGroup(PosixProcessGroup&& other) noexcept
    : watchdog_(std::exchange(other.watchdog_, 0)), lifeline_(std::move(other.lifeline_)) {}

absl::StatusOr<PosixProcessGroup> PosixProcessGroup::Create() {
  DDP_ASSIGN_OR_RETURN(Pipe pipe, MakePipe());
  sigset_t mask;
  const pid_t pid = ForkWithSignalsBlocked(mask);
  if (pid < 0) return CannotFork(errno, "cannot start a process to watch over the ranks");
  if (pid == 0) {
    close(pipe.writer.get());
    WatchdogMain(pipe.reader.get());
  }
  // Both sides do it: whichever comes first, the group exists from here on.
  setpgid(pid, pid);
  return PosixProcessGroup(pid, std::move(pipe.writer));
}

PosixProcessGroup::~PosixProcessGroup() {
  if (watchdog_ == 0) return;
  Signal(SIGKILL);
  Reap(watchdog_);
}

void PosixProcessGroup::Signal(int signal) const { kill(-watchdog_, signal); }

absl::StatusOr<pid_t> StartProcess(const ProcessOptions& options) {
  if (options.argv.empty()) return absl::InvalidArgumentError("no program to start");
  const std::string path = FindInPath(options.argv[0], options.environment);
  std::vector<std::string> argv = options.argv;
  std::vector<std::string> environment;
  for (const auto& [name, value] : options.environment) {
    environment.push_back(absl::StrCat(name, "=", value));
  }
  std::vector<char*> argv_pointers = Pointers(argv);
  std::vector<char*> environment_pointers = Pointers(environment);
  DDP_ASSIGN_OR_RETURN(Pipe report, MakePipe());
  ChildPlan plan = {.path = path.c_str(),
                    .argv = argv_pointers.data(),
                    .environment = environment_pointers.data(),
                    .options = &options,
                    .parent = getpid(),
                    .mask = {},
                    .report = report.writer.get()};
  const pid_t pid = ForkWithSignalsBlocked(plan.mask);
  if (pid < 0) return CannotFork(errno, "cannot start a process");
  if (pid == 0) ChildMain(plan);
  report.writer.Close();
  int error = 0;
  ssize_t size;
  while ((size = read(report.reader.get(), &error, sizeof(error))) < 0 && errno == EINTR) {
  }
  if (size == static_cast<ssize_t>(sizeof(error))) {
    Reap(pid);
    return absl::ErrnoToStatus(error, absl::StrCat("cannot execute '", options.argv[0], "'"));
  }
  return pid;
}

bool HandlesSignal(pid_t pid, int signal) {
  std::ifstream status(absl::StrCat("/proc/", pid, "/status"));
  for (std::string line; std::getline(status, line);) {
    absl::string_view mask = line;
    if (!absl::ConsumePrefix(&mask, "SigCgt:")) continue;
    uint64_t handled = 0;
    return absl::SimpleHexAtoi(absl::StripAsciiWhitespace(mask), &handled) &&
           (handled >> (signal - 1) & 1) != 0;
  }
  return false;
}

int ExitCodeOf(int status) {
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

std::string SignalName(int signal) { return absl::StrCat(signal, " (", strsignal(signal), ")"); }

std::string ExecutablePath(absl::string_view fallback) {
  std::error_code error;
  const std::filesystem::path path = std::filesystem::read_symlink(kOwnProgram, error);
  if (error) return std::string(fallback);
  return path.string() == ExecutableOrigin() ? path.string() : kOwnProgram;
}

std::string ExecutableOrigin() {
  std::error_code error;
  const std::string path = std::filesystem::read_symlink(kOwnProgram, error).string();
  absl::string_view origin = path;
  // The kernel marks a file that is gone, unless that is its name.
  if (!std::filesystem::exists(path, error)) absl::ConsumeSuffix(&origin, " (deleted)");
  return std::string(origin);
}

}  // namespace ddp
