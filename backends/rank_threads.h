// For tests: ranks as threads of one process, over the real connections of a backend.
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

// Runs `body` as each of `world_size` ranks and waits for all of them. A rank whose group cannot be
// created, or whose body throws, fails the test, with its number. With one rank the members of
// `group` are null.
void RunRankThreads(
    int world_size, const std::string& backend,
    const std::function<void(const launchers::Rank& rank, const Group& group)>& body,
    absl::Duration timeout = absl::Seconds(60));

}  // namespace ddp::backends
