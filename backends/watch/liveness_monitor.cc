#include "backends/watch/liveness_monitor.h"

namespace ddp::backends::watch {

LivenessMonitor::LivenessMonitor(const WatchdogOptions& options)
    : options_(options), peers_(options.host, options.rank) {}

void LivenessMonitor::Learn(const std::vector<std::optional<RankReport>>& reports) {
  for (int rank = 0; rank < options_.size; ++rank) {
    if (reports[rank]) peers_.Learn(rank, *reports[rank]);
  }
  if (peers_.remote().empty() || !probe_address_.empty()) return;
  // Does not wait long for a name server: the store's connections have resolved the same name.
  if (!options_.store_host.empty()) {
    listener_ = ProbeListener::OfThisProcess(options_.store_host);
  }
  probe_address_ = listener_ == nullptr ? kNoProbeAddress : listener_->address();
}

void LivenessMonitor::ProbeIfDue(bool is_wait_long) {
  if (Clock::now() < next_probe_) return;
  // In small groups this is in each iteration of the thread.
  next_probe_ =
      Clock::now() + absl::ToChronoNanoseconds(HeartbeatInterval(options_.size) / 2 - kShortTick);
  peers_.Probe(is_wait_long ? peers_.remote() : peers_.Unverified());
}

void LivenessMonitor::AcceptProbes() {
  if (listener_ != nullptr) listener_->AcceptPending();
}

}  // namespace ddp::backends::watch
