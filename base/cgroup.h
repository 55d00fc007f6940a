// The control groups that limit this process: a container's, a SLURM step's.
//
//   for (const Cgroup& cgroup : FindCgroups("memory")) {
//     for (const std::string& folder : cgroup.folders) {
//       ReadFile(folder + (cgroup.version == 2 ? "/memory.max" : "/memory.limit_in_bytes"));
//     }
//   }
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace ddp {

struct Cgroup {
  int version;  // 1 or 2
  // Of this process's own group, and of those above it as far as they can be seen: each limits all
  // that is below it.
  std::vector<std::string> folders;
};

// Those in which `controller` ("cpu", "memory") may be limited: of version 1, of version 2, of
// both, or none. Thread-safe. `root` stands before every path that is read, and not in those that
// are returned: for tests.
std::vector<Cgroup> FindCgroups(absl::string_view controller, absl::string_view root = "");

}  // namespace ddp
