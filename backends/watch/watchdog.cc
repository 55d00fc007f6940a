#include "backends/watch/watchdog.h"

#include <unistd.h>

#include "absl/log/absl_log.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "backends/common/has_died.h"
#include "backends/watch/errors.h"
#include "backends/watch/timing.h"

namespace ddp::backends::watch {
namespace {

// Maximum wait for the thread to end: the store may hang.
constexpr absl::Duration kMaxStopTime = absl::Seconds(3);

// `abort`, with its errors logged instead of thrown.
std::function<void()> LogErrors(std::function<void()> abort, const std::string& name) {
  if (!abort) return nullptr;
  return [abort = std::move(abort), name] {
    try {
      abort();
    } catch (const std::exception& error) {
      ABSL_LOG(WARNING) << name << ": aborting after a failure: " << error.what();
    }
  };
}

}  // namespace

Watchdog::Watchdog(WatchdogOptions options)
    : options_(std::move(options)),
      owner_pid_(getpid()),
      history_(options_.size),
      state_([this] { history_.AbortMessages(); },
             LogErrors(std::exchange(options_.abort, nullptr), options_.name)),
      liveness_(options_),
      exchange_(options_, history_, state_, liveness_),
      investigator_(options_, state_, liveness_, exchange_),
      checks_(options_, history_, state_, liveness_, exchange_, investigator_) {}

Watchdog::~Watchdog() {
  // The thread holds a reference to this: it releases the last one, or has ended.
  if (thread_.joinable()) thread_.detach();
}

bool Watchdog::InForkedChild() const { return getpid() != owner_pid_; }

void Watchdog::Start() {
  // Published before another rank can depend on this one: if this process dies now, the others know
  // which process to look for and need not wait for an answer.
  exchange_.Publish(StatusExchange::Detail::kLastCall);
  auto self = c10::intrusive_ptr<Watchdog>::reclaim_copy(this);
  thread_ = std::thread([self] { self->Run(); });
}

void Watchdog::Stop() {
  // A forked child does not have the thread, and must not use the parent's connection.
  if (InForkedChild()) return;
  if (!state_.RequestStop()) return;
  const bool ended = state_.AwaitThreadEnd(kMaxStopTime);
  state_.ReleaseBackend();
  if (!ended) {
    thread_.detach();
    return;
  }
  thread_.join();
  history_.Clear();
}

void Watchdog::Abort() {
  if (InForkedChild()) return;
  state_.ReleaseBackend();
  state_.AbortGroup("this rank has aborted the group");
  Stop();
}

std::exception_ptr Watchdog::AbortError(const std::string& call) const {
  return MakeError(
      absl::StrCat("rank ", options_.rank, ": ", call, " failed: ", state_.abort_reason()));
}

std::set<int> Watchdog::DeadRanks() {
  return InForkedChild() ? std::set<int>() : state_.RequestDeadRanks();
}

std::exception_ptr Watchdog::Explain(const std::exception_ptr& error, const std::string& call,
                                     uint64_t number) {
  const std::string message = Message(error);
  // A backend that watches its peers' processes has named the dead rank already, on every rank.
  if (options_.names_dead && absl::StrContains(message, kHasDied)) {
    if (!options_.is_subgroup) return error;
    // The error has rank numbers of the group. The group's name says which ranks of the job it has.
    return MakeError(absl::StrCat(options_.name, ": ", message));
  }
  const std::string reason =
      InForkedChild() ? state_.abort_reason() : state_.Explain(call, message, number);
  const std::string cause = absl::StrCat(options_.name, ": ", message);
  const std::string failed = absl::StrCat("rank ", options_.rank, ": ", call, " failed: ");
  if (!reason.empty()) return MakeError(absl::StrCat(failed, reason, " (", cause, ")"));
  // Callers tell failures of the group from others by the type, and Gloo's have none of c10's.
  return IsC10Error(error) ? error : MakeError(absl::StrCat(failed, cause));
}

void Watchdog::Run() {
  while (!state_.stopping()) {
    if (!aborted() || state_.wants_dead_ranks()) liveness_.ProbeIfDue(checks_.IsWaitLong());
    exchange_.ObserveCalls();
    checks_.Observe();
    if (exchange_.HeartbeatDue()) {
      const bool advanced = exchange_.Heartbeat();
      if (!aborted()) checks_.CompareRanks(advanced);
    }
    liveness_.AcceptProbes();
    investigator_.ExplainFailedCalls();
    if (!aborted()) checks_.CheckPending();
    checks_.FindDeadRanks();
    const bool is_urgent = checks_.AwaitsDeadRank() || exchange_.IsDiscovering();
    state_.AwaitWork(is_urgent ? kShortTick : kTick);
  }
  exchange_.Leave();
  investigator_.ExplainFailedCalls();  // does not investigate, only ends their waits
  state_.SetThreadEnded();
}

}  // namespace ddp::backends::watch
