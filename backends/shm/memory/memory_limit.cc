#include "backends/shm/memory/memory_limit.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/cgroup.h"
#include "base/file.h"

namespace ddp::backends::shm {
namespace {

// Version 1 writes "no limit" as the largest page-aligned int64.
constexpr uint64_t kUnlimited = uint64_t{1} << 60;

// File names of one version of cgroups.
struct CgroupVersion {
  const char* limit;
  const char* usage;
  const char*
      cache_keys[2];  // in memory.stat: page cache, which is dropped before a process is killed
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

void LowerByCgroup(absl::string_view root, const Cgroup& cgroup, MemoryHeadroom& room) {
  const CgroupVersion& version = cgroup.version == 2 ? kV2 : kV1;
  for (const std::string& name : cgroup.folders) {
    const std::string folder = absl::StrCat(root, name);
    const std::optional<uint64_t> limit = Number(absl::StrCat(folder, "/", version.limit));
    const std::optional<uint64_t> usage = Number(absl::StrCat(folder, "/", version.usage));
    if (!limit.has_value() || !usage.has_value() || *limit >= kUnlimited) continue;
    const uint64_t used = *usage - std::min(*usage, PageCache(version, folder));
    Lower(room, *limit - std::min(*limit, used),
          absl::StrCat("the memory cgroup ", name, " (limit ", FormatBytes(*limit), ", ",
                       FormatBytes(used), " used)"));
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
  for (const Cgroup& cgroup : FindCgroups("memory", root)) LowerByCgroup(root, cgroup, room);
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
