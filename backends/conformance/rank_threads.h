// For tests: ranks as threads of one process, over the real connections of a backend.
//
//   RunRankThreads(2, "gloo", [](const launchers::Rank& rank, const Group& group) {
//     group.process_group->allreduce(tensors)->wait();
//   });
#pragma once

#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "backends/backend.h"
#include "backends/process_group.h"
#include "launchers/rank.h"

namespace ddp::backends {

// Runs `body` as each of `world_size` ranks and waits for all of them. A rank whose group cannot be
// created, or whose body throws, fails the test, with its number. With one rank the members of
// `group` are null. `stall`: as GroupOptions::stall.
void RunRankThreads(
    int world_size, const std::string& backend,
    const std::function<void(const launchers::Rank& rank, const Group& group)>& body,
    absl::Duration timeout = absl::Seconds(60), absl::Duration stall = absl::Seconds(30));

// The same with a backend alone, without process group and watchdog. `create` makes it on each
// rank, from options with a common store. `body` may release it.
void RunBackendThreads(
    int world_size,
    const std::function<absl::StatusOr<c10::intrusive_ptr<c10d::Backend>>(BackendOptions options)>&
        create,
    const std::function<void(int rank, c10::intrusive_ptr<c10d::Backend>& backend)>& body,
    absl::Duration timeout = absl::Seconds(60));

}  // namespace ddp::backends
