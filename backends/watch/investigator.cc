#include "backends/watch/investigator.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace ddp::backends::watch {
namespace {

constexpr absl::Duration kPollInterval = absl::Milliseconds(5);

}  // namespace

Investigator::Investigator(const WatchdogOptions& options, GroupState& state,
                           LivenessMonitor& liveness, StatusExchange& exchange)
    : options_(options), state_(state), liveness_(liveness), exchange_(exchange) {}

Diagnosis Investigator::Investigate(uint64_t number, Symptom symptom, absl::Duration timeout) {
  exchange_.AnswerRequests();
  if (state_.aborted()) return {};
  // Ranks that wait for the same collective share one request. A new one is needed after a failure,
  // as a rank may have died since it answered, and after a refused probe, as only an answer newer
  // than the probe is a sign of life.
  exchange_.RequestStatus(
      /*reuse_recent=*/symptom != Symptom::kFailed && liveness_.peers().refused().empty());
  if (state_.aborted()) return {};
  const GroupStatus status = CollectStatus(symptom, timeout);
  if (state_.aborted()) return {};
  Diagnosis diagnosis = Diagnose(status, number, symptom);
  if (diagnosis.fatal()) state_.AbortGroup(exchange_.store().SetAbortReason(diagnosis.text));
  return diagnosis;
}

std::optional<std::set<int>> Investigator::FindDeadRanks(absl::Duration timeout) {
  Peers& peers = liveness_.peers();
  if (peers.refused().empty()) return peers.Dead();
  // A firewall may have refused the probe. Only an answer that is newer is a sign of life.
  exchange_.RequestStatus(/*reuse_recent=*/false);
  const Clock::time_point start = Clock::now();
  const int64_t request = exchange_.answered_request();
  ReportStore& store = exchange_.store();
  while (Elapsed(start) < timeout && !store.unreachable()) {
    for (int rank : std::set<int>(peers.refused())) {
      const std::optional<RankReport>& report = store.Read(rank);
      if (report && report->answered_request >= request) peers.MarkAlive(rank);
    }
    if (peers.refused().empty()) break;
    if (state_.stopping() || state_.has_failed_calls()) return std::nullopt;
    exchange_.AnswerRequests();
    // All ranks may do this at once: they must not overload the store.
    state_.AwaitStop(HeartbeatInterval(options_.size) / 4);
  }
  return peers.Dead();
}

GroupStatus Investigator::CollectStatus(Symptom symptom, absl::Duration timeout) {
  const Clock::time_point start = Clock::now();
  const int64_t request = exchange_.answered_request();
  ReportStore& store = exchange_.store();
  GroupStatus status;
  status.rank = options_.rank;
  while (true) {
    status.reports = store.ReadAll();
    status.reports[options_.rank] = exchange_.LocalReport(StatusExchange::Detail::kAllCalls);
    liveness_.Learn(store.last_read());
    liveness_.peers().Probe(status.unresponsive);
    FindUnresponsive(symptom, request, status);
    if (status.unresponsive.empty() || Elapsed(start) >= timeout || state_.aborted() ||
        state_.stopping()) {
      break;
    }
    // A dead rank explains a failure, and the caller waits for the explanation.
    const bool urgent = symptom == Symptom::kFailed || store.unreachable();
    if (urgent && !status.dead.empty()) break;
    exchange_.AnswerRequests();
    state_.AwaitStop(kPollInterval);
    if (symptom != Symptom::kFailed && state_.has_failed_calls()) break;
  }
  return status;
}

void Investigator::FindUnresponsive(Symptom symptom, int64_t request, GroupStatus& status) {
  Peers& peers = liveness_.peers();
  status.dead = peers.Dead();
  status.unresponsive.clear();
  for (int rank = 0; rank < options_.size; ++rank) {
    const std::optional<RankReport>& report = status.reports[rank];
    if (rank == options_.rank) continue;
    // Without the store no rank can answer, and its report is old.
    const bool answered =
        report &&
        (report->left || (report->answered_request >= request && !exchange_.store().unreachable()));
    if (peers.refused().count(rank) != 0) {
      // If no call has failed, a firewall may have refused the probe: wait for a sign of life.
      if (answered) {
        peers.MarkAlive(rank);
        status.dead.erase(rank);
      } else if (symptom != Symptom::kFailed) {
        status.unresponsive.insert(rank);
      }
    } else if (!answered && status.dead.count(rank) == 0) {
      status.unresponsive.insert(rank);
    }
  }
}

void Investigator::ExplainFailedCalls() {
  const std::vector<std::shared_ptr<GroupState::FailedCall>> calls = state_.TakeFailedCalls();
  if (calls.empty()) return;
  uint64_t number = 0;
  for (const auto& call : calls) number = std::max(number, call->number);
  Diagnosis diagnosis;
  if (!state_.aborted() && !state_.stopping()) {
    bool has_remote = false;
    for (const std::optional<RankReport>& report : exchange_.store().last_read()) {
      has_remote |= report && report->host != liveness_.peers().host();
    }
    diagnosis =
        Investigate(number, Symptom::kFailed,
                    has_remote ? RemoteReplyTimeout(options_.size) : ReplyTimeout(options_.size));
  }
  // That all ranks have made the call explains nothing.
  const bool explains = diagnosis.kind != Diagnosis::Kind::kNothing;
  state_.SetExplanation(calls, explains ? diagnosis.text : "");
}

}  // namespace ddp::backends::watch
