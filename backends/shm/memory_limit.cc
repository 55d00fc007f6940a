#include "backends/shm/memory_limit.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/file.h"

namespace ddp::backends::shm {
namespace {

// Version 1 writes "no limit" as the largest page-aligned int64.
constexpr uint64_t kUnlimited = uint64_t{1} << 60;

// Names of the files that one version of cgroups has.
struct CgroupVersion {
  const char* limit;
  const char* usage;
  const char*
      cache_keys[2];  // in memory.stat: page cache, which is dropped before anybody is killed
};
constexpr CgroupVersion kV2 = {"memory.max", "memory.current", {"inactive_file", "active_file"}};
constexpr CgroupVersion kV1 = {
    "memory.limit_in_bytes", "memory.usage_in_bytes", {"total_inactive_file", "total_active_file"}};

std::vector<std::string> Lines(const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile(path);
  if (!text.ok()) return {};
  return absl::StrSplit(*text, '\n', absl::SkipEmpty());
}

std::optional<uint64_t> Number(const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile(path);
  uint64_t value = 0;
  if (!text.ok() || !absl::SimpleAtoi(absl::StripAsciiWhitespace(*text), &value)) {
    return std::nullopt;  // "max", too
  }
  return value;
}

// Where the hierarchy that limits our memory is mounted, and our group in it.
struct Cgroup {
  const CgroupVersion* version;
  std::string mount;  // "/sys/fs/cgroup"
  std::string group;  // "/a/b", below the mount
};

// A line of mountinfo: id parent device ROOT MOUNT options… - TYPE source SUPEROPTIONS
std::optional<Cgroup> FindMount(absl::string_view root, const CgroupVersion& version,
                                absl::string_view group) {
  for (const std::string& line : Lines(absl::StrCat(root, "/proc/self/mountinfo"))) {
    const std::vector<std::string> halves = absl::StrSplit(line, absl::MaxSplits(" - ", 1));
    if (halves.size() != 2) continue;
    const std::vector<std::string> mount = absl::StrSplit(halves[0], ' ');
    const std::vector<std::string> system = absl::StrSplit(halves[1], ' ');
    if (mount.size() < 5 || system.size() < 3) continue;
    const bool matches =
        &version == &kV2
            ? system[0] == "cgroup2"
            : system[0] == "cgroup" && absl::c_linear_search(static_cast<std::vector<std::string>>(
                                                                 absl::StrSplit(system[2], ',')),
                                                             "memory");
    if (!matches) continue;
    // A container may see only its own part of the hierarchy, under the name it has outside, or be
    // in a group that is not visible from the mount ("/../x"): then the mount itself is all we
    // know.
    absl::string_view below = group;
    if (mount[3] != "/" && !absl::ConsumePrefix(&below, mount[3])) below = "";
    if (absl::StrContains(below, "..")) below = "";
    return Cgroup{&version, mount[4], std::string(below)};
  }
  return std::nullopt;
}

// A line of /proc/self/cgroup: ID:controllers:/group, with ID 0 and no controllers for version 2.
std::vector<Cgroup> FindCgroups(absl::string_view root) {
  std::vector<Cgroup> found;
  for (const std::string& line : Lines(absl::StrCat(root, "/proc/self/cgroup"))) {
    const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    const std::vector<std::string> controllers = absl::StrSplit(fields[1], ',');
    const bool v1 = absl::c_linear_search(controllers, "memory");
    if (!v1 && fields[0] != "0") continue;
    if (std::optional<Cgroup> cgroup = FindMount(root, v1 ? kV1 : kV2, fields[2])) {
      found.push_back(*std::move(cgroup));
    }
  }
  return found;
}

uint64_t PageCache(const CgroupVersion& version, const std::string& folder) {
  uint64_t bytes = 0;
  for (const std::string& line : Lines(folder + "/memory.stat")) {
    const std::vector<absl::string_view> fields = absl::StrSplit(line, ' ');
    uint64_t value = 0;
    if (fields.size() == 2 && absl::c_linear_search(version.cache_keys, fields[0]) &&
        absl::SimpleAtoi(fields[1], &value)) {
      bytes += value;
    }
  }
  return bytes;
}

void Lower(MemoryHeadroom& room, uint64_t bytes, std::string bound) {
  if (bytes >= room.bytes) return;
  room = {bytes, std::move(bound)};
}

// From our group up to the mount: each level limits all that is below it.
void LowerByCgroup(absl::string_view root, const Cgroup& cgroup, MemoryHeadroom& room) {
  for (absl::string_view group = cgroup.group;;) {
    group = absl::StripSuffix(group, "/");
    const std::string name = absl::StrCat(cgroup.mount, group);
    const std::string folder = absl::StrCat(root, name);
    const std::optional<uint64_t> limit = Number(absl::StrCat(folder, "/", cgroup.version->limit));
    const std::optional<uint64_t> usage = Number(absl::StrCat(folder, "/", cgroup.version->usage));
    if (limit.has_value() && usage.has_value() && *limit < kUnlimited) {
      const uint64_t used = *usage - std::min(*usage, PageCache(*cgroup.version, folder));
      Lower(room, *limit - std::min(*limit, used),
            absl::StrCat("the memory cgroup ", name, " (limit ", FormatBytes(*limit), ", ",
                         FormatBytes(used), " used)"));
    }
    if (group.empty()) return;
    group = group.substr(0, group.rfind('/'));
  }
}

}  // namespace

MemoryHeadroom AvailableMemory(absl::string_view root) {
  MemoryHeadroom room;
  for (const std::string& line : Lines(absl::StrCat(root, "/proc/meminfo"))) {
    absl::string_view value = line;
    uint64_t kib = 0;
    if (absl::ConsumePrefix(&value, "MemAvailable:") && absl::ConsumeSuffix(&value, "kB") &&
        absl::SimpleAtoi(absl::StripAsciiWhitespace(value), &kib)) {
      Lower(room, kib << 10, "the memory of this machine (MemAvailable)");
    }
  }
  for (const Cgroup& cgroup : FindCgroups(root)) LowerByCgroup(root, cgroup, room);
  return room;
}

std::string FormatBytes(uint64_t bytes) {
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return absl::StrCat(bytes, " bytes");
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  return absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

}  // namespace ddp::backends::shm
