// The report that a rank publishes about itself, by which other ranks find out why a collective
// does not complete.
//
//   store->set("report/3", Encode(report));                          // rank 3
//   DDP_ASSIGN_OR_RETURN(RankReport theirs, Decode(store->get("report/3")));
//
// Encoded as text, one line per item, so that a person can read the store. Equal calls are encoded
// once and signatures are recomputed: 1,000 calls of a training loop take a few KB.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "backends/watch/recorder.h"

namespace ddp::backends::watch {

// Value of RankReport::probe_address: the process has no probe listener.
inline constexpr char kNoProbeAddress[] = "-";

struct RankReport {
  std::string host = {};     // HostId()
  std::string process = {};  // backends::ProcessIdentity
  // ProbeListener::address(), or kNoProbeAddress. Empty: not known yet, or no rank is remote.
  std::string probe_address = {};

  // Number of the newest status request that this report answers (ReportStore); 0: none.
  int64_t answered_request = 0;
  // Number of collectives called, and their rolling signature. The same at the last multiple of
  // Recorder::kMarkEvery.
  uint64_t count = 0;
  uint64_t signature = 0;
  uint64_t mark = 0;
  uint64_t mark_signature = 0;
  // Milliseconds since the watchdog last saw a new collective.
  int64_t idle_ms = 0;
  bool left = false;         // has destroyed, shut down or aborted its group
  bool aborted = false;      // its pending collectives were ended without completing
  std::string failure = {};  // error of its own first failed call; empty: none failed

  // These describe its training thread (TrainingThread, GroupState::awaited).
  int64_t waits_in_round = 0;
  int64_t rounds_begun = 0;
  bool has_ended = false;
  uint64_t awaited = 0;

  // The newest collectives, oldest first, without gaps: only the last one, or in the answer to a
  // status request all that the recorder holds.
  std::vector<Recorder::Entry> tail = {};
  // Messages sent to and received from each rank; ranks without any are left out.
  std::map<int, uint64_t> sent = {};
  std::map<int, uint64_t> received = {};
};

std::string Encode(const RankReport& report);
// InvalidArgument if `text` is not the output of Encode.
absl::StatusOr<RankReport> Decode(absl::string_view text);

}  // namespace ddp::backends::watch
