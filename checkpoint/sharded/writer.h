// Writes a state in format `sharded`.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/coordinator.h"
#include "base/file.h"
#include "checkpoint/state.h"

namespace ddp::checkpoint::sharded {

// Collective: Format::Write, of all ranks. Returns this rank's errors and those of all ranks but
// for those of the manifest, which is rank 0's.
absl::Status WriteSharded(const State& state, const std::string& folder, const Coordinator& ranks,
                          FileSystem* files);

// Collective: Format::WhatThisRankWrites. Where all ranks have a tensor, `root` has in its place
// one on the device meta, and `sharded` the rows that this rank writes, in memory of their own
// extent. WriteSharded writes the same files of the result. Its errors.
absl::StatusOr<State> SpreadState(State state, const Coordinator& ranks);

}  // namespace ddp::checkpoint::sharded
