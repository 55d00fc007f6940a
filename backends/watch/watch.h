// Watches any c10d backend: what ranks call differently, what some never call, and who died.
//
//   backend = Watch(backend, store, {.stall = absl::Seconds(30)});
//   backend->allreduce(tensors)->wait();
//   // DistBackendError: rank 0: #17 allreduce(sum) float32 [1000] failed: the ranks do not
//   // make the same call: ranks 0, 2: #17 allreduce(sum) float32 [1000]; rank 1: #17
//   // broadcast(root 0) …
//
// Every call is numbered and noted down (about 0.1 µs with its Work, see watch_benchmark); a thread
// per group does the rest, and only where something does not end, has failed, or differs:
//   - calls that differ between ranks (operation, reduce op, root, dtype, number of elements, their
//     order) give the group up: what is pending and whatever is called later throws an error with
//     both sides. Found within a second or two if the ranks hang, and else when signatures are
//     compared.
//   - a rank that dies is named, on this host or on another: within half a second. Of a host that
//     is gone as a whole the ranks are named that do not answer, after a second and a half.
//   - a collective that goes on for longer than `stall` is reported on stderr, once, with the ranks
//     that have not called it and what they did last. It goes on until its own timeout.
// After the group is given up, destroy it and make a new one.
#pragma once

#include <string>

#include "absl/time/time.h"
#include "base/backend_capabilities.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::backends::watch {

struct WatchOptions {
  absl::Duration stall = absl::Seconds(30);  // zero: stalls are not reported
  // In front of messages; empty: the backend's name.
  std::string name = "";
  // Whether `store` ends with the process of rank 0. That rank then waits, for 1.4 s at most,
  // until the others have left the group too; and these do not ask the store once it has died.
  bool rank_0_serves_store = false;
  // What this process's host is called; ranks of equal texts watch each other's processes. Empty:
  // HostId() of backends/common/host.h.
  std::string host = "";
  // The backend's, from its registry entry.
  BackendCapabilities capabilities = {};
};

// Collective, but waits for nobody. `store`: of this group alone (prefix it); it is cloned. The
// result is a backend like the inner one, name included, and has its threading rules; sub-groups
// made by it (split, merge, shrink) are watched, too. Throws what Store::clone throws.
c10::intrusive_ptr<c10d::Backend> Watch(c10::intrusive_ptr<c10d::Backend> inner,
                                        const c10::intrusive_ptr<c10d::Store>& store,
                                        const WatchOptions& options);

// The backend below, for code that wants a ProcessGroupNCCL and nothing else (symmetric memory,
// ncclComm_t); `backend` itself if it is not watched.
c10::intrusive_ptr<c10d::Backend> Unwatched(const c10::intrusive_ptr<c10d::Backend>& backend);

}  // namespace ddp::backends::watch
