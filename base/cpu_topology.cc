#include "base/cpu_topology.h"

#include <sched.h>

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"

namespace ddp {

std::optional<std::vector<int>> AllowedCpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) return std::nullopt;
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

int FirstSibling(int cpu, absl::string_view sysfs) {
  const absl::StatusOr<std::string> text = ReadFile(
      absl::StrCat(sysfs, "/devices/system/cpu/cpu", cpu, "/topology/thread_siblings_list"));
  if (!text.ok()) return cpu;
  // As "0,4" or "0-1", ascending.
  const std::vector<absl::string_view> parts = absl::StrSplit(*text, absl::ByAnyChar(",-\n"));
  int first = 0;
  return absl::SimpleAtoi(parts[0], &first) ? first : cpu;
}

}  // namespace ddp
