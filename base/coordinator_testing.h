// Ranks as threads of a test, with a coordinator each.
//
//   RunCoordinatedRanks(3, [](const Coordinator& ranks) {
//     EXPECT_FALSE(ranks.Agree(ranks.rank() == 1 ? absl::DataLossError("x") :
//     absl::OkStatus()).ok());
//   });
#pragma once

#include <functional>

#include "base/coordinator.h"

namespace ddp {

// Calls `body` in `size` threads at a time and waits for all of them. A rank whose body has
// returned takes part in nothing more: ranks that still wait for it get DeadlineExceeded, as ranks
// of a real job would, but at once.
void RunCoordinatedRanks(int size, const std::function<void(const Coordinator& ranks)>& body);

}  // namespace ddp
