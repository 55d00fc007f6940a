// What a rank tells the others about itself, when they ask why a collective does not end.
//
//   store->set("at/3", Encode(report));                              // rank 3
//   DDP_ASSIGN_OR_RETURN(Report theirs, Decode(store->get("at/3")));
//
// One line of text per subject, so that a person can read the store. Calls that are alike are
// spelled out once, and signatures are computed anew: a thousand calls of a training loop take a
// few KB.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "backends/watch/recorder.h"

namespace ddp::backends::watch {

// In the place of a door's address: there is none.
inline constexpr char kNoDoor[] = "-";

struct Report {
  std::string host = {};     // HostId()
  std::string process = {};  // backends::ProcessIdentity
  std::string door = {};     // Door::address(), or kNoDoor; empty: not yet known, or not called for

  // The newest alarm that this answers (the ranks number them together); 0: none.
  int64_t alarm = 0;
  // Collectives called so far, and their rolling signature; the same at the last multiple of
  // Recorder::kMarkEvery.
  uint64_t count = 0;
  uint64_t signature = 0;
  uint64_t mark = 0;
  uint64_t mark_signature = 0;
  // Since the last call, or (as the watchdog has seen it) since the first of those under way.
  int64_t idle_ms = 0;
  bool left = false;         // the group, by destroying or shutting it down
  std::string failure = {};  // what its own first failed call said; empty: none has

  // The newest collectives, oldest first, without gaps: the last one, or in an answer to an alarm
  // all that are known.
  std::vector<Recorder::Entry> tail = {};
  // Messages sent to and received from each rank, where any were.
  std::map<int, uint64_t> sent = {};
  std::map<int, uint64_t> received = {};
};

std::string Encode(const Report& report);
// InvalidArgument if it is not what Encode writes.
absl::StatusOr<Report> Decode(absl::string_view text);

}  // namespace ddp::backends::watch
