#include "ddp/config/shares.h"

#include <sched.h>

#include <algorithm>
#include <map>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/cores.h"
#include "base/file.h"

namespace ddp::config {
namespace {

// The threads that the calling one may run on, at most 1,024.
std::vector<int> AllowedThreads() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> threads;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return threads;
  for (int thread = 0; thread < CPU_SETSIZE; ++thread) {
    if (CPU_ISSET(thread, &set)) threads.push_back(thread);
  }
  return threads;
}

// The first of the siblings of a thread ("0,4" or "0-1" in /sys); itself if that is not known.
int FirstSibling(int thread, absl::string_view root) {
  const absl::StatusOr<std::string> text = ReadFile(
      absl::StrCat(root, "/sys/devices/system/cpu/cpu", thread, "/topology/thread_siblings_list"));
  int first = 0;
  if (!text.ok()) return thread;
  const std::vector<absl::string_view> parts = absl::StrSplit(*text, absl::ByAnyChar(",-\n"));
  return absl::SimpleAtoi(parts[0], &first) ? first : thread;
}

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
  for (const int thread : AllowedThreads()) cores[FirstSibling(thread, root)].push_back(thread);
  for (auto& [first, threads] : cores) machine.cores.push_back(std::move(threads));
  machine.available = AvailableCores(root);
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
