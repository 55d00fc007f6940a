#include "checkpoint/format.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

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

bool LeadsOn(const ReadRequest& request, const std::string& path, bool is_dict) {
  const std::string below = absl::StrCat(path, "/");
  const auto next = request.parts.lower_bound(below);
  return next != request.parts.end() && absl::StartsWith(next->first, below) &&
         (is_dict || !next->second.optional);
}

bool Fits(const Wanted& wanted, const std::vector<int64_t>& shape) {
  return std::all_of(wanted.parts.begin(), wanted.parts.end(), [&](const Part& part) {
    return CheckPart({shape, part, wanted.memory_order}).ok();
  });
}

std::string InCommon(const ReadRequest& request) {
  const bool all = request.parts.empty();
  std::string text =
      absl::StrCat(all                ? "all"
                   : request.all_else ? "all else"
                                      : "some",
                   "\n", static_cast<int>(request.per_rank), request.meta ? " meta" : "", "\n");
  for (const auto& [path, wanted] : request.parts) {
    absl::StrAppend(&text, path, wanted.whole() ? "" : "/", wanted.optional ? "?" : "", "\n");
  }
  return text;
}

std::optional<ShardedTensor> Cut(const at::Tensor& whole, const Wanted& wanted) {
  if (!whole.defined() || whole.layout() != at::kStrided) return std::nullopt;
  if (!Fits(wanted, whole.sizes().vec())) return std::nullopt;
  ShardedTensor tensor{.global_shape = whole.sizes().vec(),
                       .dtype = whole.scalar_type(),
                       .memory_order = wanted.memory_order};
  for (const Part& part : wanted.parts) {
    tensor.parts.push_back({part, PartOf(whole, part, wanted.memory_order).clone()});
  }
  return tensor;
}

absl::StatusOr<std::unique_ptr<Format>> CreateFormat(absl::string_view name,
                                                     const FormatOptions& options) {
  DDP_ASSIGN_OR_RETURN(const FormatEntry entry, FormatRegistry::Find(name));
  return entry.create(options);
}

std::unique_ptr<Format> FormatBySuffix(absl::string_view path, const FormatOptions& options) {
  for (const auto& [name, entry] : FormatRegistry::All()) {
    std::unique_ptr<Format> format = entry.create(options);
    if (absl::EndsWith(path, format->suffix())) return format;
  }
  return nullptr;
}

std::string FormatByContent(const std::string& path) {
  // One that cannot be read is then still named for what it is.
  for (const auto& [name, entry] : FormatRegistry::All()) {
    if (entry.recognises != nullptr && entry.recognises(path)) return name;
  }
  for (const auto& [name, entry] : FormatRegistry::All()) {
    const absl::Status complete = entry.create({})->CheckComplete(path);
    // FailedPrecondition: not accepted, but of this format.
    if (complete.ok() || absl::IsFailedPrecondition(complete)) return name;
  }
  return "";
}

}  // namespace ddp::checkpoint
