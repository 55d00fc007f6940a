// For tests: ranks as threads of one process, over a backend's real connections.
//
//   RunRankThreads(2, "gloo", [](const launchers::Rank& rank, const Group& group) {
//     group.process_group->allreduce(tensors)->wait();
//   });
#pragma once

#include <functional>
#include <string>

#include "absl/time/time.h"
#include "backends/process_group.h"
#include "launchers/rank.h"

namespace ddp::backends {

// Runs `body` as each of `world_size` ranks and waits for all of them. What creates no group or
// throws fails the test, with its rank. In a world of one the group's members are null.
void RunRankThreads(
    int world_size, const std::string& backend,
    const std::function<void(const launchers::Rank& rank, const Group& group)>& body,
    absl::Duration timeout = absl::Seconds(60));

}  // namespace ddp::backends
