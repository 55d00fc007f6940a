// SLURM's two compressed notations, spelled out.
//
//   ExpandNodeList("gpu[01-03,7],login1");  // gpu01 gpu02 gpu03 gpu7 login1
//   ExpandTasksPerNode("2(x3),1");          // 2 2 2 1
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ddp::launchers {

// More nodes than this in one list are refused: a typing error, not a cluster.
inline constexpr int kMaxNodes = 1 << 16;

// Names in SLURM's order: of several brackets the last varies fastest; a range's numbers keep the
// width of its first. Blanks around names and ranges are skipped. InvalidArgument, quoting list and
// reason, if malformed or larger than kMaxNodes.
absl::StatusOr<std::vector<std::string>> ExpandNodeList(absl::string_view list);

// The number of tasks on each node. InvalidArgument if malformed or larger than kMaxNodes.
absl::StatusOr<std::vector<int>> ExpandTasksPerNode(absl::string_view list);

}  // namespace ddp::launchers
