#include "launchers/local/core_binding.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/cpu_topology.h"
#include "base/file.h"

namespace ddp::launchers {
namespace {

constexpr int kMostCpus = CPU_SETSIZE;

std::string Text(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadFile(path);
  return text.ok() ? std::string(absl::StripAsciiWhitespace(*text)) : "";
}

// "0-3,8" as the kernel writes it; nullopt for anything else.
std::optional<std::set<int>> ParseCpuList(absl::string_view text) {
  std::set<int> cpus;
  for (absl::string_view part : absl::StrSplit(text, ',', absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> range =
        absl::StrSplit(part, absl::MaxSplits('-', 1));
    int first = 0, last = 0;
    if (!absl::SimpleAtoi(range.first, &first)) return std::nullopt;
    if (range.second.empty()) {
      last = first;
    } else if (!absl::SimpleAtoi(range.second, &last)) {
      return std::nullopt;
    }
    for (int cpu = std::max(first, 0); cpu <= std::min(last, kMostCpus - 1); ++cpu) {
      cpus.insert(cpu);
    }
  }
  return cpus;
}

int Number(const std::string& path, int otherwise) {
  int number = 0;
  return absl::SimpleAtoi(Text(path), &number) ? number : otherwise;
}

std::map<int, int> NodesOfCpus(const std::string& sysfs) {
  std::map<int, int> nodes;
  const auto online = ParseCpuList(Text(sysfs + "/devices/system/node/online"));
  if (!online) return nodes;
  for (const int node : *online) {
    const auto cpus =
        ParseCpuList(Text(absl::StrCat(sysfs, "/devices/system/node/node", node, "/cpulist")));
    if (!cpus) continue;
    for (const int cpu : *cpus) nodes[cpu] = node;
  }
  return nodes;
}

// The hardware threads of each physical core, neighbours beside each other.
std::vector<std::vector<int>> Cores(const std::set<int>& cpus, const std::string& sysfs) {
  const std::map<int, int> nodes = NodesOfCpus(sysfs);
  std::map<std::tuple<int, int, int>, std::vector<int>> cores;  // node, package, first sibling
  for (const int cpu : cpus) {
    const std::string topology = absl::StrCat(sysfs, "/devices/system/cpu/cpu", cpu, "/topology/");
    const auto node = nodes.find(cpu);
    cores[{node == nodes.end() ? 0 : node->second, Number(topology + "physical_package_id", 0),
           FirstSibling(cpu, sysfs)}]
        .push_back(cpu);
  }
  std::vector<std::vector<int>> found;
  for (auto& [place, threads] : cores) found.push_back(std::move(threads));
  return found;
}

}  // namespace

std::vector<CoreShare> ShareCores(int ranks, const std::optional<std::vector<int>>& allowed,
                                  const std::string& sysfs, const std::string& cgroup,
                                  std::optional<double> quota) {
  std::optional<std::set<int>> cpus = ParseCpuList(Text(sysfs + "/devices/system/cpu/online"));
  if (!cpus || cpus->empty() || ranks < 1) return {};
  const auto keep = [&](const std::set<int>& others) {
    std::erase_if(*cpus, [&](int cpu) { return others.count(cpu) == 0; });
  };
  if (allowed) keep({allowed->begin(), allowed->end()});
  const std::string cpuset = Text(cgroup + "/cpuset.cpus.effective");
  if (const auto own = ParseCpuList(cpuset); !cgroup.empty() && own && !own->empty()) keep(*own);
  const std::vector<std::vector<int>> cores = Cores(*cpus, sysfs);
  if (cores.empty()) return {};

  const auto n = static_cast<int>(cores.size());
  const bool is_limited = quota && *quota < static_cast<double>(cpus->size());
  std::vector<CoreShare> shares(static_cast<size_t>(ranks));
  if (is_limited || ranks > n) {
    const double available = is_limited ? std::min<double>(*quota, n) : n;
    for (CoreShare& share : shares) {
      share.threads = std::max(1, static_cast<int>(std::ceil(available) / ranks));
    }
    return shares;
  }
  for (int rank = 0; rank < ranks; ++rank) {
    CoreShare& share = shares[static_cast<size_t>(rank)];
    const int begin = rank * n / ranks, end = (rank + 1) * n / ranks;
    share.threads = end - begin;
    for (int core = begin; core < end; ++core) {
      const std::vector<int>& threads = cores[static_cast<size_t>(core)];
      share.cpus.insert(share.cpus.end(), threads.begin(), threads.end());
    }
    std::sort(share.cpus.begin(), share.cpus.end());
  }
  return shares;
}

void BindTo(const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof(set), &set);
}

}  // namespace ddp::launchers
