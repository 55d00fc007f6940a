// Writes a state in format `sharded`.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "base/coordinator.h"
#include "base/file.h"
#include "checkpoint/state.h"

namespace ddp::checkpoint::sharded {

// Collective: Format::Write, of all ranks. Returns this rank's errors and those of all ranks but
// for those of the manifest, which is rank 0's.
absl::Status WriteSharded(const State& state, const std::string& folder, const Coordinator& ranks,
                          FileSystem* files);

}  // namespace ddp::checkpoint::sharded
