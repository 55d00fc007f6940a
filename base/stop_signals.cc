#include "base/stop_signals.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ddp {
namespace {

constexpr std::array<std::pair<absl::string_view, int>, 4> kSignals = {
    {{"TERM", SIGTERM}, {"INT", SIGINT}, {"USR1", SIGUSR1}, {"USR2", SIGUSR2}}};

constexpr int64_t kSecond = 1'000'000'000;  // in ns
constexpr int64_t kRelay = kSecond;
constexpr int64_t kWhileEnding = 2 * kSecond;

// What EndAtOnce gives along with its signal.
constexpr int kAtOnce = 0x646470;

// The handler's. 0: none has come.
std::atomic<int64_t> ends_from = 0;  // the time from which a further signal ends the process
std::atomic<int> first = 0;
static_assert(std::atomic<int64_t>::is_always_lock_free && std::atomic<int>::is_always_lock_free);

std::mutex mutex;
// Guarded by mutex.
int objects = 0;
std::vector<std::pair<int, struct sigaction>> previous;

int64_t Now() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * kSecond + now.tv_nsec;
}

void EndBy(int signal) {
  // The kernel does not apply default actions to process 1 of a container.
  if (getpid() == 1) _exit(128 + signal);
  struct sigaction action = {};
  action.sa_handler = SIG_DFL;
  sigaction(signal, &action, nullptr);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, signal);
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  raise(signal);
}

void Handle(int signal, siginfo_t* info, void*) {
  const int error = errno;
  if (info->si_code == SI_QUEUE && info->si_value.sival_int == kAtOnce) EndBy(signal);
  const int64_t now = Now();
  int64_t none = 0;
  if (ends_from.compare_exchange_strong(none, now + kRelay)) {
    first = signal == SIGHUP ? SIGTERM : signal;
  } else if (now >= none) {
    EndBy(signal);
  }
  errno = error;
}

// Under the mutex. The last first: of a signal that was given twice, the second is the handler.
void Restore() {
  for (; !previous.empty(); previous.pop_back()) {
    sigaction(previous.back().first, &previous.back().second, nullptr);
  }
}

// A handler, and not SIG_IGN, which processes that this one starts would inherit.
void Ignore(int) {}

}  // namespace

StopSignals::StopSignals(const std::vector<int>& signals) {
  const std::lock_guard lock(mutex);
  if (objects++ > 0) return;
  first = 0;
  ends_from = 0;
  Restore();
  const auto install = [](int signal, struct sigaction action) {
    struct sigaction before;
    if (sigaction(signal, nullptr, &before) != 0 || before.sa_handler == SIG_IGN) return;
    if (signal == SIGPIPE && before.sa_handler != SIG_DFL) return;
    sigemptyset(&action.sa_mask);
    sigaction(signal, &action, nullptr);
    previous.emplace_back(signal, before);
  };
  struct sigaction handle = {}, ignore = {};
  handle.sa_sigaction = Handle;
  handle.sa_flags = SA_RESTART | SA_SIGINFO;
  ignore.sa_handler = Ignore;
  ignore.sa_flags = SA_RESTART;
  for (const int signal : signals) install(signal, handle);
  if (std::find(signals.begin(), signals.end(), SIGTERM) != signals.end()) install(SIGHUP, handle);
  if (!signals.empty()) install(SIGPIPE, ignore);
}

StopSignals::~StopSignals() {
  const std::lock_guard lock(mutex);
  if (--objects > 0) return;
  if (first != 0) {
    ends_from = Now() + kWhileEnding;
    return;
  }
  Restore();
}

int StopSignals::received() const { return first; }

void IgnoreBrokenPipes() {
  struct sigaction action;
  if (sigaction(SIGPIPE, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) return;
  action = {};
  action.sa_handler = Ignore;
  action.sa_flags = SA_RESTART;
  sigaction(SIGPIPE, &action, nullptr);
}

std::optional<int> StopSignalOf(absl::string_view name) {
  for (const auto& [known, signal] : kSignals) {
    if (known == name) return signal;
  }
  return std::nullopt;
}

std::string StopSignalName(int signal) {
  for (const auto& [name, known] : kSignals) {
    if (known == signal) return std::string(name);
  }
  return absl::StrCat(signal);
}

void EndAtOnce(int pid) { sigqueue(pid, SIGTERM, {.sival_int = kAtOnce}); }

}  // namespace ddp
