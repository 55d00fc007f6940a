// The clock and the time intervals that several parts of a watchdog share.
#pragma once

#include <algorithm>
#include <chrono>

#include "absl/time/time.h"

namespace ddp::backends::watch {

using Clock = std::chrono::steady_clock;

inline absl::Duration Elapsed(Clock::time_point start) {
  return absl::FromChrono(Clock::now() - start);
}

// The time between two iterations of the watchdog's thread: usually, and while the ranks discover
// each other or a call may be waiting for a dead rank.
inline constexpr absl::Duration kTick = absl::Milliseconds(100);
inline constexpr absl::Duration kShortTick = absl::Milliseconds(20);

// Returns how often a rank looks for status requests: less often in large groups, to limit the load
// on the store.
inline absl::Duration HeartbeatInterval(int size) {
  return std::clamp(size * absl::Milliseconds(10), absl::Milliseconds(200), absl::Seconds(1));
}

// Maximum wait for the answers to a status request. ReplyTimeout is 0.45 s with up to 30 ranks and
// 1.5 s from 100 ranks on. RemoteReplyTimeout, at least 1.4 s, is for ranks on other hosts, where a
// missing answer is the only sign that a whole host is down.
inline absl::Duration ReplyTimeout(int size) {
  return std::max(absl::Milliseconds(450), 1.5 * HeartbeatInterval(size));
}
inline absl::Duration RemoteReplyTimeout(int size) {
  return std::max(absl::Milliseconds(1400), 1.5 * HeartbeatInterval(size));
}

}  // namespace ddp::backends::watch
