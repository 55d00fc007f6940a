#include "launchers/local/supervisor.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ddp::launchers {
namespace {

// Back-pressure: with this much unread output we stop reading, and ranks block on their pipes.
constexpr size_t kMaxPending = 1 << 20;

}  // namespace

Supervisor::Supervisor(PosixProcessGroup group, SignalPipe signals, absl::Duration grace)
    : group_(std::move(group)),
      signals_(std::move(signals)),
      grace_(grace),
      stdout_(STDOUT_FILENO),
      stderr_(STDERR_FILENO) {}

Supervisor::~Supervisor() {
  SignalAll(SIGKILL);
  for (const Child& child : children_) {
    if (!child.running) continue;
    while (waitpid(child.pid, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
}

void Supervisor::Add(RankProcess process) {
  children_.push_back({.rank = process.rank, .pid = process.pid});
  if (process.stdout_pipe.ok()) AddStream(process.rank, std::move(process.stdout_pipe), &stdout_);
  if (process.stderr_pipe.ok()) AddStream(process.rank, std::move(process.stderr_pipe), &stderr_);
}

void Supervisor::AddStream(int rank, UniqueFd fd, LineSink* sink) {
  fcntl(fd.get(), F_SETFL, fcntl(fd.get(), F_GETFL) | O_NONBLOCK);
  streams_.push_back({std::move(fd), sink, LinePrefixer(absl::StrCat("[rank ", rank, "] "), sink)});
}

LaunchResult Supervisor::Run() {
  Reap();  // ranks that ended before the SIGCHLD handler was installed
  while (AnyRunning()) Wait();
  group_.Signal(SIGKILL);  // processes that ranks started and left behind
  Drain();
  while (!output_abandoned_ && !(stdout_.empty() && stderr_.empty())) Wait();
  return result_;
}

// Waits for one event and handles it.
void Supervisor::Wait() {
  std::vector<pollfd> fds = {{.fd = signals_.fd(), .events = POLLIN, .revents = 0}};
  for (LineSink* sink : {&stdout_, &stderr_}) {
    fds.push_back({.fd = sink->empty() ? -1 : sink->fd(), .events = POLLOUT, .revents = 0});
  }
  for (const Stream& stream : streams_) {
    const bool room = stream.sink->size() < kMaxPending;
    fds.push_back({.fd = room ? stream.fd.get() : -1, .events = POLLIN, .revents = 0});
  }
  if (poll(fds.data(), fds.size(), PollTimeout()) < 0) {
    for (pollfd& fd : fds) fd.revents = 0;  // EINTR: the next round sees the signal
  }
  if (fds[0].revents != 0) HandleSignals();
  KillIfOverdue();
  if (fds[1].revents != 0) stdout_.WriteSome();
  if (fds[2].revents != 0) stderr_.WriteSome();
  for (size_t i = 0; i < streams_.size(); ++i) {
    if (fds[3 + i].revents != 0 && !ReadSome(streams_[i])) streams_[i].fd.Close();
  }
  std::erase_if(streams_, [](const Stream& stream) { return !stream.fd.ok(); });
}

void Supervisor::HandleSignals() {
  for (int signal : signals_.Take()) {
    if (signal == SIGCHLD) continue;
    if (!AnyRunning()) output_abandoned_ = true;  // do not wait for the reader of our output
    // Ignore later signals: the ranks are ending already. Ctrl-C does not reach them directly,
    // since they are in their own process group.
    if (deadline_ || !AnyRunning()) continue;
    result_.exit_code = 128 + signal;
    result_.description = absl::StrCat("stopped by signal ", SignalName(signal));
    StartEnding();
  }
  Reap();
}

void Supervisor::Reap() {
  std::vector<std::pair<const Child*, int>> failures;
  for (Child& child : children_) {
    int status = 0;
    if (!child.running || waitpid(child.pid, &status, WNOHANG) != child.pid) continue;
    child.running = false;
    if (status != 0) failures.emplace_back(&child, status);
  }
  if (failures.empty() || deadline_) return;
  // Of several failures found at once, report one that was killed by a signal: the others may have
  // exited because they lost their connection to it.
  const auto first = std::find_if(failures.begin(), failures.end(),
                                  [](const auto& failure) { return WIFSIGNALED(failure.second); });
  const auto& [child, status] = first == failures.end() ? failures.front() : *first;
  NoteFailure(*child, status);
  StartEnding();
}

void Supervisor::NoteFailure(const Child& child, int status) {
  result_.exit_code = ExitCodeOf(status);
  result_.failed_rank = child.rank;
  result_.description = absl::StrCat("rank ", child.rank, " (pid ", child.pid, ") ");
  if (WIFSIGNALED(status)) {
    absl::StrAppend(&result_.description, "was killed by signal ", SignalName(WTERMSIG(status)));
  } else {
    absl::StrAppend(&result_.description, "exited with code ", WEXITSTATUS(status));
  }
}

void Supervisor::StartEnding() {
  deadline_ = Clock::now() + absl::ToChronoNanoseconds(grace_);
  SignalAll(SIGTERM);
}

void Supervisor::KillIfOverdue() {
  if (!deadline_ || killed_ || !AnyRunning() || Clock::now() < *deadline_) return;
  killed_ = true;
  std::vector<int> ranks;
  for (const Child& child : children_) {
    if (child.running) ranks.push_back(child.rank);
  }
  absl::StrAppend(&result_.description, "; ", ranks.size() == 1 ? "rank " : "ranks ",
                  absl::StrJoin(ranks, ", "), " did not end within ", absl::FormatDuration(grace_),
                  " of SIGTERM and got SIGKILL");
  SignalAll(SIGKILL);
}

void Supervisor::SignalAll(int signal) {
  group_.Signal(signal);
  for (const Child& child : children_) {
    // A rank that left the process group (setsid) is signalled by its pid.
    if (child.running && getpgid(child.pid) != group_.id()) kill(child.pid, signal);
  }
}

bool Supervisor::ReadSome(Stream& stream) {
  char buffer[65536];
  const ssize_t size = read(stream.fd.get(), buffer, sizeof(buffer));
  if (size > 0) {
    stream.lines.Add(absl::string_view(buffer, size));
    return true;
  }
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  stream.lines.Finish();
  return false;
}

void Supervisor::Drain() {
  for (Stream& stream : streams_) {
    char buffer[65536];
    for (ssize_t size; (size = read(stream.fd.get(), buffer, sizeof(buffer))) > 0;) {
      stream.lines.Add(absl::string_view(buffer, size));
    }
    stream.lines.Finish();
  }
  streams_.clear();
}

bool Supervisor::AnyRunning() const {
  return std::any_of(children_.begin(), children_.end(),
                     [](const Child& child) { return child.running; });
}

int Supervisor::PollTimeout() const {
  if (!deadline_ || killed_ || !AnyRunning()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(*deadline_ - Clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 1 << 30));
}

}  // namespace ddp::launchers
