#include "ddp/config/shares.h"

#include <algorithm>
#include <map>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/cpu_topology.h"
#include "base/file.h"
#include "launchers/threads.h"

namespace ddp::config {
namespace {

std::vector<std::string> Gpus(const Environment& env, absl::string_view root) {
  std::vector<std::string> gpus;
  const auto& variables = env.variables();
  const auto visible = variables.find("CUDA_VISIBLE_DEVICES");
  if (visible == variables.end()) {
    const auto found = ListDirectory(absl::StrCat(root, "/proc/driver/nvidia/gpus"));
    for (size_t i = 0; found.ok() && i < found->size(); ++i) gpus.push_back(absl::StrCat(i));
    return gpus;
  }
  for (absl::string_view name : absl::StrSplit(visible->second, ',')) {
    name = absl::StripAsciiWhitespace(name);
    if (name.empty() || name == "-1") break;  // CUDA ignores what follows
    gpus.emplace_back(name);
  }
  return gpus;
}

// Part `slot` of `slots` of about equal size; one element that others may have, too, if there are
// fewer elements than slots.
template <typename T>
std::vector<T> Part(const std::vector<T>& all, int slot, int slots) {
  const int n = static_cast<int>(all.size());
  if (n == 0) return {};
  if (slots >= n) return {all[slot % n]};
  return {all.begin() + slot * n / slots, all.begin() + (slot + 1) * n / slots};
}

// At most `count` threads, one of each core before a second of any.
std::vector<std::vector<int>> Limited(const std::vector<std::vector<int>>& cores, int count) {
  std::vector<std::vector<int>> limited(cores.size());
  for (size_t sibling = 0; count > 0; ++sibling) {
    bool any = false;
    for (size_t core = 0; core < cores.size() && count > 0; ++core) {
      if (sibling >= cores[core].size()) continue;
      limited[core].push_back(cores[core][sibling]);
      --count;
      any = true;
    }
    if (!any) break;
  }
  std::erase_if(limited, [](const std::vector<int>& core) { return core.empty(); });
  return limited;
}

std::vector<int> Flat(const std::vector<std::vector<int>>& cores) {
  std::vector<int> threads;
  for (const std::vector<int>& core : cores)
    threads.insert(threads.end(), core.begin(), core.end());
  return threads;
}

}  // namespace

Machine ThisMachine(const Environment& env, absl::string_view root) {
  Machine machine;
  std::map<int, std::vector<int>> cores;
  const std::string sysfs = absl::StrCat(root, "/sys");
  for (const int thread : AllowedCpus().value_or(std::vector<int>())) {
    cores[FirstSibling(thread, sysfs)].push_back(thread);
  }
  for (auto& [first, threads] : cores) machine.cores.push_back(std::move(threads));
  machine.available = launchers::CoresOfTask(env, root);
  machine.gpus = Gpus(env, root);
  return machine;
}

Share ShareOf(const Machine& machine, int slot, int slots) {
  const std::vector<std::vector<int>> cores = Limited(machine.cores, machine.available);
  Share share;
  // Whole cores, as long as there is one for each.
  share.cores = static_cast<int>(cores.size()) >= slots ? Flat(Part(cores, slot, slots))
                                                        : Part(Flat(cores), slot, slots);
  share.gpus = Part(machine.gpus, slot, slots);
  return share;
}

}  // namespace ddp::config
