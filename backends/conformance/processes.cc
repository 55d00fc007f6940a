#include "backends/conformance/processes.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <fstream>

#include "absl/log/absl_check.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"

namespace ddp::backends::conformance {
namespace {

static_assert(sizeof(Event) <= 4096, "a write to a pipe is whole up to PIPE_BUF");

void CopyText(char* target, size_t size, const std::string& text) {
  const size_t length = std::min(text.size(), size - 1);
  std::memcpy(target, text.data(), length);
  target[length] = '\0';
}

std::set<std::string> Entries(const char* folder) {
  std::set<std::string> names;
  DIR* dir = opendir(folder);
  if (dir == nullptr) return names;
  while (const dirent* entry = readdir(dir)) {
    if (entry->d_name[0] != '.') names.insert(entry->d_name);
  }
  closedir(dir);
  return names;
}

bool IsMapped(const std::string& path) {
  for (const std::string& pid : Entries("/proc")) {
    std::ifstream maps(absl::StrCat("/proc/", pid, "/maps"));
    std::string line;
    while (std::getline(maps, line)) {
      if (absl::StrContains(line, path)) return true;
    }
  }
  return false;
}

}  // namespace

int64_t MonotonicNanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

void Child::Tell(const std::string& kind, const std::string& text) {
  Event event;
  event.at_ns = MonotonicNanoseconds();
  event.rank = rank_;
  CopyText(event.kind, sizeof(event.kind), kind);
  CopyText(event.text, sizeof(event.text), text);
  ABSL_CHECK_EQ(write(events_, &event, sizeof(event)), static_cast<ssize_t>(sizeof(event)));
}

int Child::Command() {
  int command = 0;
  ABSL_CHECK_EQ(read(commands_, &command, sizeof(command)), static_cast<ssize_t>(sizeof(command)));
  return command;
}

Processes::Processes(int count, const Body& body) {
  int events[2];
  ABSL_CHECK_EQ(pipe2(events, O_CLOEXEC), 0);
  events_ = events[0];
  const pid_t parent = getpid();
  for (int rank = 0; rank < count; ++rank) {
    int commands[2];
    ABSL_CHECK_EQ(pipe2(commands, O_CLOEXEC), 0);
    const pid_t pid = fork();
    ABSL_CHECK_GE(pid, 0) << "fork: " << std::strerror(errno);
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(1);
      close(events[0]);
      close(commands[1]);
      for (int other : commands_) close(other);
      Child child(rank, events[1], commands[0]);
      _exit(body(rank, child));
    }
    close(commands[0]);
    commands_.push_back(commands[1]);
    pids_.push_back(pid);
  }
  exit_status_.resize(count);
  close(events[1]);
}

Processes::~Processes() {
  for (size_t rank = 0; rank < pids_.size(); ++rank) Kill(rank);
  for (int fd : commands_) close(fd);
  close(events_);
}

std::optional<Event> Processes::Next(int64_t deadline_ns) {
  pollfd readable = {events_, POLLIN, 0};
  const int64_t left = std::max<int64_t>(0, deadline_ns - MonotonicNanoseconds());
  if (poll(&readable, 1, static_cast<int>(left / 1'000'000) + 1) <= 0) return std::nullopt;
  Event event;
  if (read(events_, &event, sizeof(event)) != sizeof(event)) return std::nullopt;
  return event;
}

void Processes::Command(int rank, int command) {
  // A rank that has died meanwhile has closed its end: an error here, and no signal.
  struct sigaction ignore = {}, before;
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &ignore, &before);
  if (write(commands_[rank], &command, sizeof(command)) < 0) ABSL_CHECK_EQ(errno, EPIPE);
  sigaction(SIGPIPE, &before, nullptr);
}

void Processes::Kill(int rank) {
  if (pids_[rank] < 0) return;
  kill(pids_[rank], SIGKILL);
  waitpid(pids_[rank], nullptr, 0);
  pids_[rank] = -1;
}

bool Processes::Reaped(int rank) {
  if (pids_[rank] < 0) return true;
  if (waitpid(pids_[rank], &exit_status_[rank], WNOHANG) != pids_[rank]) return false;
  pids_[rank] = -1;
  return true;
}

std::string Processes::HowItEnded(int rank) {
  if (!Reaped(rank) || exit_status_[rank] == 0) return "";
  const int status = exit_status_[rank];
  return WIFSIGNALED(status) ? absl::StrCat("signal ", WTERMSIG(status))
                             : absl::StrCat("exit status ", WEXITSTATUS(status));
}

absl::Status Processes::Wait(int64_t deadline_ns) {
  std::vector<std::string> running;
  do {
    running.clear();
    for (size_t rank = 0; rank < pids_.size(); ++rank) {
      if (!Reaped(rank)) running.push_back(absl::StrCat(rank, " (pid ", pids_[rank], ")"));
    }
    if (!running.empty()) absl::SleepFor(absl::Milliseconds(1));
  } while (!running.empty() && MonotonicNanoseconds() < deadline_ns);
  if (!running.empty()) {
    return absl::DeadlineExceededError(
        absl::StrCat("still running: rank ", absl::StrJoin(running, ", ")));
  }
  for (size_t rank = 0; rank < exit_status_.size(); ++rank) {
    if (const std::string end = HowItEnded(rank); !end.empty()) {
      return absl::InternalError(absl::StrCat("rank ", rank, " ended with ", end));
    }
  }
  return absl::OkStatus();
}

std::set<std::string> SharedMemoryNames() { return Entries("/dev/shm"); }

std::vector<std::string> LeftBehind(const std::set<std::string>& before) {
  std::vector<std::string> left;
  for (const std::string& name : SharedMemoryNames()) {
    const std::string path = absl::StrCat("/dev/shm/", name);
    // The file must still exist: it may have gone with its process during the search.
    if (before.count(name) == 0 && !IsMapped(path) && access(path.c_str(), F_OK) == 0) {
      left.push_back(path);
    }
  }
  return left;
}

void AdoptOrphans() { prctl(PR_SET_CHILD_SUBREAPER, 1); }

bool HasChildren() { return waitpid(-1, nullptr, WNOHANG) >= 0 || errno != ECHILD; }

std::multiset<std::string> Descriptors() {
  std::multiset<std::string> descriptors;
  for (const std::string& fd : Entries("/proc/self/fd")) {
    char target[256];
    const ssize_t length =
        readlink(absl::StrCat("/proc/self/fd/", fd).c_str(), target, sizeof(target));
    // The descriptor of the listing itself is gone by now.
    if (length > 0) descriptors.emplace(target, length);
  }
  return descriptors;
}

}  // namespace ddp::backends::conformance
