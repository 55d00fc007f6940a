#include "launchers/local/supervisor.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/log/absl_log.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/stop_signals.h"

namespace ddp::launchers {
namespace {

// Back-pressure: with this much unread output we stop reading, and ranks block on their pipes.
constexpr size_t kMaxPending = 1 << 20;

// A signal that comes sooner after another is the same one, by another way (a terminal sends to all
// of its foreground, and whoever started us may pass on what it gets).
constexpr std::chrono::seconds kRelay(1);

// The signal at whose request a rank has ended in good order; 0: it has ended otherwise.
int StopOf(int status) {
  if (!WIFEXITED(status)) return 0;
  for (const int signal : {SIGTERM, SIGINT, SIGUSR1, SIGUSR2}) {
    if (WEXITSTATUS(status) == 128 + signal) return signal;
  }
  return 0;
}

std::string RankList(const std::vector<int>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

}  // namespace

Supervisor::Supervisor(PosixProcessGroup group, SignalPipe signals, Patience patience)
    : group_(std::move(group)),
      signals_(std::move(signals)),
      patience_(patience),
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
  AddStream(process.prefix, std::move(process.out), &stdout_);
  AddStream(process.prefix, std::move(process.err), &stderr_);
}

bool Supervisor::MayAdd() {
  HandleSignals();
  return phase_ == Phase::kRunning;
}

void Supervisor::AddStream(const std::string& prefix, RankOutput output, LineSink* sink) {
  if (!output.pipe.ok()) return;
  const int fd = output.pipe.get();
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  streams_.push_back(
      {std::move(output.pipe), std::move(output.file), sink, LinePrefixer(prefix, sink)});
}

// A file that cannot be written any more, on a full disk, is given up, and the terminal is not.
void Supervisor::Stream::Add(absl::string_view text) {
  lines.Add(text);
  while (file.ok() && !text.empty()) {
    const ssize_t written = write(file.get(), text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      ABSL_LOG(WARNING) << "the output of a rank is not written to its file any more: "
                        << strerror(errno);
      file.Close();
      return;
    }
    text.remove_prefix(static_cast<size_t>(written));
  }
}

LaunchResult Supervisor::Run() {
  Reap();  // ranks that ended before the SIGCHLD handler was installed
  while (AnyRunning()) Wait();
  group_.Signal(SIGKILL);  // processes that ranks started and left behind
  Drain();
  while (!output_abandoned_ && !(stdout_.empty() && stderr_.empty())) Wait();
  HandleSignals();  // what has come since the last one ended is no less a wish to end
  const auto all = [&](auto&& holds) {
    return std::all_of(children_.begin(), children_.end(),
                       [&](const Child& child) { return holds(child.status); });
  };
  if (phase_ == Phase::kStopping &&
      all([](int status) { return status == 0 || StopOf(status) != 0; })) {
    result_.description.clear();
    // They had come to their end already.
    if (all([](int status) { return status == 0; })) result_.exit_code = 0;
  }
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
    Stop(signal);
  }
  Reap();
}

// Ctrl-C does not reach the ranks directly, since they are in their own process group.
void Supervisor::Stop(int signal) {
  result_.failed_rank = -1;  // who was asked to stop is not started again
  if (!AnyRunning()) return;
  if (phase_ != Phase::kRunning && Clock::now() - stopped_at_ >= kRelay) {
    Kill(absl::StrCat(" got SIGKILL after a further signal ", SignalName(signal)));
  }
  if (phase_ != Phase::kRunning) return;
  NoteStop(signal, patience_.grace);
  sent_ = signal == SIGHUP || signals_.WasIgnored(signal) ? SIGTERM : signal;
  SignalAll(sent_);
}

void Supervisor::NoteStop(int signal, absl::Duration patience) {
  phase_ = Phase::kStopping;
  stopped_at_ = Clock::now();
  deadline_ = stopped_at_ + absl::ToChronoNanoseconds(patience);
  result_.exit_code = 128 + signal;
  result_.description = absl::StrCat("stopped by signal ", SignalName(signal));
}

void Supervisor::Reap() {
  std::vector<const Child*> failures;
  for (Child& child : children_) {
    if (!child.running || waitpid(child.pid, &child.status, WNOHANG) != child.pid) continue;
    child.running = false;
    const int signal = StopOf(child.status);
    if (signal == 0 && child.status != 0) failures.push_back(&child);
    // A signal that only ranks got. All of them stop.
    if (signal != 0 && phase_ == Phase::kRunning) {
      NoteStop(signal, std::max(patience_.grace, patience_.stop_timeout));
    }
  }
  if (failures.empty() || phase_ == Phase::kEnding) return;
  // Of several failures found at once, report one that was killed by a signal: the others may have
  // exited because they lost their connection to it.
  const auto killed = std::find_if(failures.begin(), failures.end(),
                                   [](const Child* child) { return WIFSIGNALED(child->status); });
  const Child& first = killed == failures.end() ? *failures.front() : **killed;
  // A rank that does not handle the signal is killed by it, and that is no failure.
  const bool by_us = WIFSIGNALED(first.status) && (killed_ || WTERMSIG(first.status) == sent_);
  if (phase_ != Phase::kStopping || !by_us) NoteFailure(first);
  EndRanks();
}

void Supervisor::NoteFailure(const Child& child) {
  const int status = child.status;
  result_.exit_code = ExitCodeOf(status);
  result_.failed_rank = sent_ == 0 ? child.rank : -1;
  result_.description = absl::StrCat("rank ", child.rank, " (pid ", child.pid, ") ");
  if (WIFSIGNALED(status)) {
    absl::StrAppend(&result_.description, "was killed by signal ", SignalName(WTERMSIG(status)));
  } else {
    absl::StrAppend(&result_.description, "exited with code ", WEXITSTATUS(status));
  }
}

void Supervisor::EndRanks() {
  if (phase_ == Phase::kRunning) stopped_at_ = Clock::now();
  phase_ = Phase::kEnding;
  deadline_ = Clock::now() + absl::ToChronoNanoseconds(patience_.grace);
  for (const Child& child : children_) {
    if (child.running) EndAtOnce(child.pid);
  }
  SignalAll(SIGTERM);
}

void Supervisor::KillIfOverdue() {
  if (phase_ == Phase::kRunning || killed_ || !AnyRunning() || Clock::now() < deadline_) return;
  absl::Duration patience = patience_.grace;
  if (phase_ == Phase::kStopping && patience_.stop_timeout > patience_.grace) {
    patience = patience_.stop_timeout;
    if (sent_ != 0 && !std::exchange(is_patient_, true)) {
      const bool may_save = std::all_of(
          children_.begin(), children_.end(),
          [&](const Child& child) { return !child.running || HandlesSignal(child.pid, sent_); });
      if (may_save) {
        deadline_ = stopped_at_ + absl::ToChronoNanoseconds(patience);
        ABSL_LOG(WARNING) << "waiting for " << RankList(Running()) << " to end, for "
                          << absl::FormatDuration(patience)
                          << " at most; a further signal kills them";
        return;
      }
      patience = patience_.grace;
    }
  }
  Kill(absl::StrCat(" did not end within ", absl::FormatDuration(patience), " of ",
                    phase_ == Phase::kStopping ? "the signal" : "SIGTERM", " and got SIGKILL"));
}

void Supervisor::Kill(const std::string& why) {
  if (std::exchange(killed_, true)) return;
  absl::StrAppend(&result_.description, "; ", RankList(Running()), why);
  SignalAll(SIGKILL);
}

std::vector<int> Supervisor::Running() const {
  std::vector<int> ranks;
  for (const Child& child : children_) {
    if (child.running) ranks.push_back(child.rank);
  }
  return ranks;
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
    stream.Add(absl::string_view(buffer, size));
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
      stream.Add(absl::string_view(buffer, size));
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
  if (phase_ == Phase::kRunning || killed_ || !AnyRunning()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - Clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 1 << 30));
}

}  // namespace ddp::launchers
