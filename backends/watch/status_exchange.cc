#include "backends/watch/status_exchange.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace ddp::backends::watch {
namespace {

constexpr absl::Duration kMaxDiscovery = absl::Seconds(10);

}  // namespace

StatusExchange::StatusExchange(const WatchdogOptions& options, const CallHistory& history,
                               GroupState& state, LivenessMonitor& liveness)
    : options_(options),
      history_(history),
      state_(state),
      liveness_(liveness),
      store_(options.store, options.size),
      started_(Clock::now()),
      answered_at_(started_),
      observed_at_(started_),
      next_heartbeat_(started_) {}

RankReport StatusExchange::LocalReport(Detail detail) const {
  const bool all_calls = detail == Detail::kAllCalls;
  RankReport report;
  // The order matters to Diagnose: a rank that waits in a round has made all the calls that are
  // counted below, and one that waits for a collective had not begun more rounds before.
  const TrainingThread* thread = options_.training_thread.get();
  if (thread != nullptr) {
    report.waits_in_round = thread->waits_in_round();
    report.has_ended = thread->has_ended();
  }
  report.awaited = state_.awaited();
  report.host = liveness_.peers().host();
  report.process = liveness_.peers().process();
  report.probe_address = liveness_.probe_address();
  report.answered_request = answered_request_;
  report.left = state_.stopping();
  report.aborted = state_.aborted();
  report.idle_ms = absl::ToInt64Milliseconds(Elapsed(observed_at_));
  // The report always has the last call: if this process dies, the others can name it.
  report.tail = history_.collectives().Tail(all_calls ? Recorder::kSlots : 1);
  if (!report.tail.empty()) {
    report.count = report.tail.back().number;
    report.signature = report.tail.back().signature;
  }
  report.mark = report.count / Recorder::kMarkEvery * Recorder::kMarkEvery;
  report.mark_signature = history_.collectives().SignatureAt(report.mark).value_or(0);
  if (all_calls) {
    for (int rank = 0; rank < options_.size; ++rank) {
      if (const uint64_t sent = history_.sent(rank); sent != 0) report.sent[rank] = sent;
      if (const uint64_t got = history_.received(rank); got != 0) report.received[rank] = got;
    }
  }
  report.failure = state_.first_failure();
  if (thread != nullptr) report.rounds_begun = thread->rounds_begun();
  return report;
}

void StatusExchange::Publish(Detail detail) {
  RankReport report = LocalReport(detail);
  store_.Publish(options_.rank, report);
  report.tail.clear();
  published_ = std::move(report);
}

void StatusExchange::ObserveCalls() {
  const Clock::time_point now = Clock::now();
  const uint64_t count = history_.collectives().count();
  if (count == observed_count_) return;
  observed_count_ = count;
  observed_at_ = now;
}

bool StatusExchange::Heartbeat() {
  AnswerRequests();
  if (IsDiscovering() || !store_.all_published()) {
    store_.ReadAll();
    liveness_.Learn(store_.last_read());
  }
  const absl::Duration interval = HeartbeatInterval(options_.size);
  next_heartbeat_ =
      Clock::now() + absl::ToChronoNanoseconds(IsDiscovering() ? interval / 4 : interval);
  const bool advanced = observed_count_ != published_.count ||
                        history_.collectives().SignatureAt(observed_count_) != published_.signature;
  // The answer to a status request must not be replaced before the rank that asked has read it.
  const bool is_answer =
      answered_request_ != 0 && Elapsed(answered_at_) < 2 * RemoteReplyTimeout(options_.size);
  if (advanced || liveness_.probe_address() != published_.probe_address) {
    Publish(is_answer ? Detail::kAllCalls : Detail::kLastCall);
  }
  return advanced;
}

void StatusExchange::AnswerRequests() {
  const Peers& peers = liveness_.peers();
  // The store's client would log the lost connection at length, although its cause is known.
  if (options_.rank_0_serves_store && peers.Dead().count(0) != 0 && peers.refused().count(0) == 0) {
    store_.MarkUnreachable();
  }
  const int64_t request = store_.LatestRequest();
  if (request != answered_request_) Answer(request);
}

void StatusExchange::RequestStatus(bool reuse_recent) {
  if (reuse_recent && answered_request_ != 0 &&
      Elapsed(answered_at_) <= HeartbeatInterval(options_.size) / 2) {
    return;
  }
  Answer(store_.RequestStatus());
}

void StatusExchange::Answer(int64_t request) {
  answered_request_ = request;
  answered_at_ = Clock::now();
  // Read the reason before the answer is published: rank 0, and the store with it, may end then.
  std::optional<std::string> reason;
  if (!state_.aborted()) reason = store_.AbortReason();
  Publish(Detail::kAllCalls);
  if (reason) state_.AbortGroup(*std::move(reason));
}

bool StatusExchange::IsDiscovering() const {
  const bool complete = store_.all_published() && liveness_.peers().know_all_probe_addresses();
  return !complete && !store_.unreachable() && Elapsed(started_) < kMaxDiscovery;
}

void StatusExchange::Leave() {
  Publish(Detail::kAllCalls);
  if (options_.rank != 0 || !options_.rank_0_serves_store) return;
  // All ranks must have read the reason for the abort. Otherwise each would find one of its own,
  // such as the end of rank 0.
  const bool has_reason = state_.aborted() && store_.AbortReason().has_value();
  if (state_.aborted() && !has_reason) return;
  const int64_t request = store_.LatestRequest();
  const Clock::time_point start = Clock::now();
  // Longer than the interval at which the others look for status requests.
  const absl::Duration timeout =
      std::max(absl::Seconds(1), HeartbeatInterval(options_.size) + absl::Milliseconds(400));
  std::set<int> missing;
  while (!store_.unreachable() && Elapsed(start) < timeout) {
    const std::vector<std::optional<RankReport>>& reports = store_.ReadAll();
    liveness_.peers().Probe(missing);
    const std::set<int> dead = liveness_.peers().Dead();
    missing.clear();
    for (int rank = 0; rank < options_.size; ++rank) {
      const std::optional<RankReport>& report = reports[rank];
      const bool done = report && (report->left || (has_reason ? report->answered_request >= request
                                                               : !report->failure.empty()));
      if (rank != options_.rank && !done && dead.count(rank) == 0) missing.insert(rank);
    }
    if (missing.empty()) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace ddp::backends::watch
