// Waits for the ranks that are to create a backend together.
//
//   DDP_RETURN_IF_ERROR(WaitForAllRanks(*store, rank, size, options.group.join_timeout));
//   // All ranks are about to connect: a timeout for one message is long enough now.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::backends {

// Collective over ranks 0 … size-1 of a group. Once per `store` (PrefixStore), counting
// GatherFromAllRanks; the keys joined/RANK are theirs. DeadlineExceeded names the ranks that have
// not called it within `timeout`; errors of the store. Thread-safe.
absl::Status WaitForAllRanks(c10d::Store& store, int rank, int size, absl::Duration timeout);

// WaitForAllRanks that returns `mine` of every rank, by rank.
absl::StatusOr<std::vector<std::string>> GatherFromAllRanks(c10d::Store& store, int rank, int size,
                                                            const std::string& mine,
                                                            absl::Duration timeout);

// Indices of the keys that are not set, ascending. Takes few requests if there are few of them.
// Throws what Store::check throws.
std::vector<int> MissingKeys(c10d::Store& store, const std::vector<std::string>& keys);

}  // namespace ddp::backends
