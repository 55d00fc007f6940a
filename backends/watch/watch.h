// Watches any c10d backend: detects calls that differ between ranks, calls that some ranks do not
// make, and ranks that have died.
//
//   backend = Watch(backend, store, {.stall = absl::Seconds(30)});
//   backend->allreduce(tensors)->wait();
//   // DistBackendError: rank 0: #17 allreduce(sum) float32 [1000] failed: the ranks do not
//   // make the same call: ranks 0, 2: #17 allreduce(sum) float32 [1000]; rank 1: #17
//   // broadcast(root 0) …
//
// Every call is numbered and recorded (about 0.1 µs with its Work, see watch_benchmark). One thread
// per group does the rest, and only if a call does not complete, fails, or differs:
//   - If calls differ between ranks (operation, reduce op, root, dtype, number of elements, order),
//     the group is aborted: pending and later calls throw an error that names both calls. Detected
//     within one or two seconds if the ranks hang, otherwise when signatures are compared.
//   - If a rank dies, on this host or on another, the error names it within 0.5 s (1.5 s from 100
//     ranks on). If a whole host is down, the error names the ranks that do not answer, after 1.4 s
//     (1.5 s from 94 ranks on).
//   - If a rank's training thread waits in a collective for a rank that waits in a Coordinator call
//     for it, or whose work has ended (training_thread.h), the group is aborted within one or two
//     seconds, with an error that says so.
//   - If a collective takes longer than `stall`, it is reported on stderr, once, with the ranks
//     that have not called it and their last calls. It continues until its own timeout.
// After the group is aborted, destroy it and make a new one.
#pragma once

#include <memory>
#include <set>
#include <string>

#include "absl/time/time.h"
#include "backends/watch/training_thread.h"
#include "base/backend_capabilities.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::backends::watch {

struct WatchOptions {
  absl::Duration stall = absl::Seconds(30);  // zero: stalls are not reported
  // Prefix of messages; empty: the backend's name.
  std::string name = "";
  // Whether `store` ends with the process of rank 0. Rank 0 then waits, for 1.4 s at most, until
  // the other ranks have left the group, and these do not use the store after rank 0 has died.
  bool rank_0_serves_store = false;
  // Identity of this process's host: ranks with the same one watch each other's processes. Empty:
  // HostId() of backends/common/host.h.
  std::string host = "";
  // The backend's capabilities, from its registry entry. They are not used for a backend that
  // declares its own (CapabilityProvider).
  BackendCapabilities capabilities = {};
  // It is this rank's, and is told what the rank does outside of the group's calls. Null: unknown.
  std::shared_ptr<const TrainingThread> training_thread = nullptr;
};

// Must be called on all ranks; it does not wait for the others. `store` must be used by this group
// only (prefix it); it is cloned. The result behaves like the inner backend: same name, same thread
// safety. Sub-groups that it makes (split, merge, shrink) are watched, too. Throws what
// Store::clone throws.
c10::intrusive_ptr<c10d::Backend> Watch(c10::intrusive_ptr<c10d::Backend> inner,
                                        const c10::intrusive_ptr<c10d::Store>& store,
                                        const WatchOptions& options);

// Returns the ranks of the group whose processes have ended, for a caller that waits for other
// ranks outside of the group's calls, such as for a key in a store. The caller calls this
// repeatedly during the wait: each call has the watchdog look for them for 10 s, and returns what
// it has found so far; a rank of another host is found within two seconds in small groups. Ranks
// whose whole host is down are not found. The result is always empty if `backend` is not watched,
// and has nothing new once this rank has aborted the group. Thread-safe; does not block.
std::set<int> DeadRanks(const c10::intrusive_ptr<c10d::Backend>& backend);

}  // namespace ddp::backends::watch
