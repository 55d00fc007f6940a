// The control groups (cgroups) that limit this process, such as a container's or a SLURM step's.
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
  // Folder of this process's own group, then of each visible ancestor. A limit in any of them
  // applies to this process.
  std::vector<std::string> folders;
};

// The hierarchies (version 1, version 2, both or none) that may limit `controller` ("cpu",
// "memory"). Empty if /proc cannot be read. Thread-safe. `root`, for tests, is prepended to every
// path that is read, but not to the returned paths.
std::vector<Cgroup> FindCgroups(absl::string_view controller, absl::string_view root = "");

}  // namespace ddp
