// Propagates the failure of one rank to the ranks that wait for it in a collective. Private to
// session.h: see Session::ShareFailure.
//
// No communication without a failure. The failed rank sets a key in the store, aborts the process
// group and calls Agree. The other ranks' collectives then fail; these ranks find the key and call
// Agree, too, unless they are in a Coordinator call already.
#pragma once

#include "absl/status/status.h"
#include "ddp/session/store_coordinator.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::session {

// The arguments are the session's; `mine` is not OK. See Session::ShareFailure.
absl::Status ShareFailure(const StoreCoordinator& ranks,
                          const c10::intrusive_ptr<c10d::Store>& store,
                          c10d::ProcessGroup& process_group, const absl::Status& mine);

}  // namespace ddp::session
