// Propagates the failure of one rank to the ranks that wait for it in a collective.
//
//   absl::Status mine = CatchCollective("", [&] { return TrainEpochs(); });  // collective_status.h
//   if (!mine.ok()) return ShareFailure(session, mine);  // one message, the same on all ranks
//
// No communication without a failure. The failed rank sets a key in the store, aborts the process
// group and calls Session::Agree. The other ranks' collectives then fail; these ranks find the key
// and call Agree, too, unless they are in an Agree already.
#pragma once

#include "absl/status/status.h"
#include "ddp/session/session.h"

namespace ddp::trainer {

// Call it on a rank that has failed with `mine` outside of Agree. Returns, on every rank, the error
// of the lowest rank with a failure of its own; rank 0 has printed it. Returns within seconds after
// every rank has reached a collective or an Agree. The process group is unusable afterwards.
//
// If a collective failed (IsFromCollective) and no rank has set the key (a rank has died, the
// network is down), returns `mine` within seconds, without waiting for dead ranks. Returns `mine`
// with a world size of 1.
absl::Status ShareFailure(const session::Session& session, const absl::Status& mine);

}  // namespace ddp::trainer
