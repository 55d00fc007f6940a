// Writes a state in format `sharded`.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/coordinator.h"
#include "base/file.h"
#include "checkpoint/parts.h"
#include "checkpoint/state.h"

namespace ddp::checkpoint::sharded {

// Collective: Format::Write, of all ranks. Returns this rank's errors and those of all ranks but
// for those of the manifest, which is rank 0's.
absl::Status WriteSharded(const State& state, const std::string& folder, const Coordinator& ranks,
                          FileSystem* files);

// What this rank writes of the tensors that all ranks have.
struct SpreadPlan {
  // Of the state that it was made for: names, shapes and dtypes, and bytes of parts.
  std::string structure;
  std::map<std::string, std::vector<Box>> rows;  // by the names of the manifest
  bool is_whole = false;                         // a rank edits: each keeps its whole state
};

// Collective. `edits`: of Format::WhatThisRankWrites. Errors of WriteSharded, the same on all
// ranks.
absl::StatusOr<SpreadPlan> PlanSpread(const State& state, bool edits, const Coordinator& ranks);

// Format::WhatThisRankWrites by a plan of rank `rank`. Where all ranks have a tensor, `root` has in
// its place one on the device meta, and `sharded` the rows that this rank writes, in memory of
// their own extent. WriteSharded writes the same files of the result. Not collective.
std::optional<State> SpreadState(State state, bool edits, const SpreadPlan& plan, int rank);

}  // namespace ddp::checkpoint::sharded
