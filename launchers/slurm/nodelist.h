// Expands SLURM's compressed node lists and task counts. Thread-safe.
//
//   ExpandNodeList("gpu[01-03,7],login1");  // gpu01 gpu02 gpu03 gpu7 login1
//   ExpandTasksPerNode("2(x3),1");          // 2 2 2 1
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ddp::launchers {

// Longer lists are refused, as they are probably typing errors.
inline constexpr int kMaxNodes = 1 << 16;

// Node names in SLURM's order: of several brackets the last varies fastest. Numbers in a range are
// zero-padded to the width of its first number. Blanks around names and ranges are skipped.
// InvalidArgument, with list and reason, if the list is malformed or has more than kMaxNodes names.
absl::StatusOr<std::vector<std::string>> ExpandNodeList(absl::string_view list);

// The number of tasks on each node. InvalidArgument if malformed or longer than kMaxNodes.
absl::StatusOr<std::vector<int>> ExpandTasksPerNode(absl::string_view list);

}  // namespace ddp::launchers
