#include "checkpoint/format.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/status.h"
#include "checkpoint/folder.h"
#include "checkpoint/foreign.h"

namespace ddp::checkpoint {
namespace {

// Suffixes of all linked formats.
std::vector<std::string> AllSuffixes() {
  std::vector<std::string> suffixes;
  for (const auto& [name, entry] : FormatRegistry::All()) {
    suffixes.emplace_back(entry.create({})->suffix());
  }
  return suffixes;
}

// Whether a format opens what is at `path`, which reads little.
bool IsCheckpoint(const std::string& path) {
  const std::unique_ptr<Format> format = FormatBySuffix(path);
  return format != nullptr ? format->CheckComplete(path).ok() : !FormatByContent(path).empty();
}

}  // namespace

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
  if (!whole.defined() || whole.layout() != at::kStrided || whole.is_quantized()) {
    return std::nullopt;
  }
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

std::string CheckpointIn(const std::string& folder) {
  constexpr size_t kMostEntries = 48;  // each is opened, by each format
  const Folder of_run(folder, AllSuffixes());
  std::vector<std::string> names;
  if (const absl::StatusOr<std::vector<NamedFile>> files = of_run.List(); files.ok()) {
    for (auto named = files->rbegin(); named != files->rend(); ++named) {
      names.push_back(named->file);
    }
  }
  std::vector<std::string> others = ListDirectory(folder).value_or(std::vector<std::string>());
  std::erase_if(others, [&](const std::string& name) {
    return absl::StartsWith(name, ".") || absl::c_linear_search(names, name) ||
           !DamagedOf(name).empty() || !AbandonedOf(name).empty();
  });
  // Python's trainers save optimizer.pt and scheduler.pt beside the weights.
  absl::c_stable_partition(
      others, [](const std::string& name) { return absl::StrContains(name, "model"); });
  names.insert(names.end(), others.begin(), others.end());
  if (names.size() > kMostEntries) names.resize(kMostEntries);
  for (const std::string& name : names) {
    const std::string path = of_run.PathOf(name);
    if (IsCheckpoint(path)) return path;
  }
  return "";
}

absl::StatusOr<State> ReadUnknown(const std::string& path, const ReadRequest& request,
                                  FormatOptions options) {
  options.broadcast = nullptr;
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    const std::string inside = CheckpointIn(path);
    return absl::NotFoundError(
        absl::StrCat(path,
                     " is a folder, but not a checkpoint of any format that is linked in; name a "
                     "checkpoint in it",
                     inside.empty() ? "" : absl::StrCat(", such as ", inside)));
  }
  if (!std::filesystem::is_regular_file(path, error)) {
    return absl::NotFoundError(absl::StrCat(path, " is no file"));
  }
  std::vector<std::string> known, unknown;
  for (const std::string& name : WritableFormats()) {
    DDP_ASSIGN_OR_RETURN(const std::unique_ptr<Format> format, CreateFormat(name, options));
    if (format->all_ranks_write()) continue;  // writes folders, as dcp does
    absl::StatusOr<State> state = format->Read(path, request);
    // Another error is one of the format that the file has.
    if (!absl::IsDataLoss(state.status())) return state;
    std::vector<std::string>& reasons = IsOfNoSuchFormat(state.status()) ? unknown : known;
    const std::string reason(state.status().message());
    if (!absl::c_linear_search(reasons, reason)) reasons.push_back(reason);
  }
  const std::vector<std::string>& reasons = known.empty() ? unknown : known;
  if (reasons.empty()) {
    return absl::NotFoundError(absl::StrCat(path, " is a file, and no format is linked in for it"));
  }
  return absl::DataLossError(absl::StrJoin(reasons, "; "));
}

}  // namespace ddp::checkpoint
