#include "base/cores.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/cgroup.h"
#include "base/file.h"

namespace ddp {
namespace {

// The numbers in a file; empty if it contains anything else, such as "max".
std::vector<double> Numbers(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadFile(path);
  if (!text.ok()) return {};
  std::vector<double> numbers;
  for (absl::string_view word : absl::StrSplit(*text, absl::ByAnyChar(" \n"), absl::SkipEmpty())) {
    if (!absl::SimpleAtod(word, &numbers.emplace_back())) return {};
  }
  return numbers;
}

// CPU quota and period in microseconds; nullopt without a limit.
std::optional<std::pair<double, double>> Quota(int version, const std::string& folder) {
  std::vector<double> quota;
  if (version == 2) {
    quota = Numbers(absl::StrCat(folder, "/cpu.max"));
  } else {
    quota = Numbers(absl::StrCat(folder, "/cpu.cfs_quota_us"));
    const std::vector<double> period = Numbers(absl::StrCat(folder, "/cpu.cfs_period_us"));
    quota.insert(quota.end(), period.begin(), period.end());
  }
  // Version 1 writes "no limit" as -1.
  if (quota.size() != 2 || quota[0] <= 0 || quota[1] <= 0) return std::nullopt;
  return std::pair(quota[0], quota[1]);
}

}  // namespace

int BoundCores() {
  cpu_set_t cores;
  if (::sched_getaffinity(0, sizeof(cores), &cores) == 0) return std::max(1, CPU_COUNT(&cores));
  // The call fails if the machine has more cores than cpu_set_t can hold.
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

std::optional<double> CpuQuota(absl::string_view root) {
  std::optional<double> least;
  for (const Cgroup& cgroup : FindCgroups("cpu", root)) {
    for (const std::string& folder : cgroup.folders) {
      if (const auto quota = Quota(cgroup.version, absl::StrCat(root, folder))) {
        const double cores = quota->first / quota->second;
        least = std::min(least.value_or(cores), cores);
      }
    }
  }
  return least;
}

int AvailableCores(absl::string_view root) {
  const int cores = BoundCores();
  const std::optional<double> quota = CpuQuota(root);
  return quota && *quota < cores ? std::max(1, static_cast<int>(std::ceil(*quota))) : cores;
}

}  // namespace ddp
