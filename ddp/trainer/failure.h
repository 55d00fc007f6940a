// A failure of one rank in the middle of its work, told to the ranks that wait for it.
//
//   absl::Status mine = CatchCollective("", [&] { return TrainEpochs(); });
//   if (!mine.ok()) return ShareFailure(session, mine);  // one message, the same on all ranks
//
// Nothing is sent while all is well. The rank that fails leaves a note in the store, aborts the
// process group and goes to Session::Agree. The others' collectives fail then: they find the note
// and go to Agree too, if they have not come to one before.
#pragma once

#include <functional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "ddp/session/session.h"

namespace ddp::trainer {

// CatchStatus for code that talks to other ranks: where c10d threw, the status remembers that it
// may be the echo of another rank's failure.
absl::Status CatchCollective(absl::string_view context, const std::function<absl::Status()>& f);

// For a rank whose part has failed with `mine` and that has not told the others: returns the error
// of the lowest rank that failed by itself, which rank 0 has printed, on every rank. Ends within
// seconds once each rank has come to a collective or to an Agree. The process group is of no use
// afterwards.
//
// Where a collective failed and no rank says why (one has died, the network is gone), returns
// `mine` at once: nobody waits for a rank that is dead. `mine` in a world of one.
absl::Status ShareFailure(const session::Session& session, const absl::Status& mine);

}  // namespace ddp::trainer
