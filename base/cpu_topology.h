// The hardware threads (CPUs) of this machine: which a thread may run on, and which share a core.
//
//   for (const int cpu : AllowedCpus().value_or(std::vector<int>())) {
//     cores[FirstSibling(cpu)].push_back(cpu);
//   }
#pragma once

#include <optional>
#include <vector>

#include "absl/strings/string_view.h"

namespace ddp {

// Returns the CPUs of the calling thread's affinity, by the system's numbers, ascending; of the
// first 1,024. nullopt if that is not known. Thread-safe.
std::optional<std::vector<int>> AllowedCpus();

// The lowest of those that share a physical core with `cpu` (SMT), by SYSFS/devices/system/cpu;
// `cpu` itself if that is not known. Thread-safe.
int FirstSibling(int cpu, absl::string_view sysfs = "/sys");

}  // namespace ddp
