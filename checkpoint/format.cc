#include "checkpoint/format.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace ddp::checkpoint {

std::vector<std::string> WritableFormats() {
  std::vector<std::string> names;
  for (const auto& [name, entry] : FormatRegistry::All()) {
    if (entry.read_only.empty()) names.push_back(name);
  }
  return names;
}

absl::Status CheckRequest(const ReadRequest& request) {
  for (const auto& [path, wanted] : request.parts) {
    const std::string below = absl::StrCat(path, "/");
    const auto next = request.parts.lower_bound(below);
    if (next != request.parts.end() && absl::StartsWith(next->first, below)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "cannot give '", next->first, "', which lies below '", path, "', also asked for"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Format>> CreateFormat(absl::string_view name,
                                                     const FormatOptions& options) {
  DDP_ASSIGN_OR_RETURN(const FormatEntry entry, FormatRegistry::Find(name));
  return entry.create(options);
}

}  // namespace ddp::checkpoint
