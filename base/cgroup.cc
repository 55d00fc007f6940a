#include "base/cgroup.h"

#include <optional>

#include "absl/algorithm/container.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/file.h"

namespace ddp {
namespace {

bool Lists(absl::string_view list, absl::string_view name) {
  return absl::c_linear_search(
      static_cast<std::vector<absl::string_view>>(absl::StrSplit(list, ',')), name);
}

std::vector<std::string> Lines(const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile(path);
  if (!text.ok()) return {};
  return absl::StrSplit(*text, '\n', absl::SkipEmpty());
}

// Where `group` is mounted, for a line of mountinfo, if that is the controller's hierarchy:
// id parent device ROOT MOUNT options… - TYPE source SUPEROPTIONS
std::optional<Cgroup> Mounted(absl::string_view line, int version, absl::string_view controller,
                              absl::string_view group) {
  const std::vector<absl::string_view> halves = absl::StrSplit(line, absl::MaxSplits(" - ", 1));
  if (halves.size() != 2) return std::nullopt;
  const std::vector<absl::string_view> mount = absl::StrSplit(halves[0], ' ');
  const std::vector<absl::string_view> system = absl::StrSplit(halves[1], ' ');
  if (mount.size() < 5 || system.size() < 3) return std::nullopt;
  const bool matches =
      version == 2 ? system[0] == "cgroup2" : system[0] == "cgroup" && Lists(system[2], controller);
  if (!matches) return std::nullopt;
  // A container may see only its part of the hierarchy, under its name on the host, or be in a
  // group that is not visible from the mount ("/../x"): then only the mount itself can be read.
  if (mount[3] != "/" && !absl::ConsumePrefix(&group, mount[3])) group = "";
  if (!absl::StartsWith(group, "/") || absl::StrContains(group, "..")) group = "";
  Cgroup cgroup = {.version = version, .folders = {}};
  while (true) {
    group = absl::StripSuffix(group, "/");
    cgroup.folders.push_back(absl::StrCat(mount[4], group));
    if (group.empty()) return cgroup;
    group = group.substr(0, group.rfind('/'));
  }
}

}  // namespace

std::vector<Cgroup> FindCgroups(absl::string_view controller, absl::string_view root) {
  const std::vector<std::string> mounts = Lines(absl::StrCat(root, "/proc/self/mountinfo"));
  std::vector<Cgroup> found;
  // ID:controllers:/group, with ID 0 and no controllers for version 2.
  for (const std::string& line : Lines(absl::StrCat(root, "/proc/self/cgroup"))) {
    const std::vector<absl::string_view> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    const bool v1 = Lists(fields[1], controller);
    if (!v1 && fields[0] != "0") continue;
    for (const std::string& mount : mounts) {
      if (std::optional<Cgroup> cgroup = Mounted(mount, v1 ? 1 : 2, controller, fields[2])) {
        found.push_back(*std::move(cgroup));
        break;
      }
    }
  }
  return found;
}

}  // namespace ddp
