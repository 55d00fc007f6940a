// For tests: ranks as threads of one process, each with a Coordinator.
//
//   RunCoordinatedRanks(3, [](const Coordinator& ranks) {
//     const absl::Status mine = ranks.rank() == 1 ? absl::DataLossError("x") : absl::OkStatus();
//     EXPECT_FALSE(ranks.Agree(mine).ok());
//   });
#pragma once

#include <functional>

#include "base/coordinator.h"

namespace ddp {

// Runs `body` in `size` concurrent threads and joins them. Ranks that wait for a rank whose body
// has returned get DeadlineExceeded at once.
void RunCoordinatedRanks(int size, const std::function<void(const Coordinator& ranks)>& body);

}  // namespace ddp
