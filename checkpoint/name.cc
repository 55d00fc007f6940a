#include "checkpoint/name.h"

#include <algorithm>

#include "absl/log/absl_check.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace ddp::checkpoint {
namespace {

constexpr absl::string_view kEpoch = "epoch_";
constexpr absl::string_view kStep = "step_";

// Takes a number off the front of `text`, in the one spelling that absl::StrCat gives it.
std::optional<int64_t> ConsumeNumber(absl::string_view& text) {
  const auto end = std::find_if_not(text.begin(), text.end(), absl::ascii_isdigit);
  const absl::string_view digits = text.substr(0, static_cast<size_t>(end - text.begin()));
  int64_t number = 0;
  if (digits.empty() || (digits.size() > 1 && digits[0] == '0') ||
      !absl::SimpleAtoi(digits, &number)) {
    return std::nullopt;
  }
  text.remove_prefix(digits.size());
  return number;
}

}  // namespace

std::string EpochName(int64_t epochs) {
  ABSL_CHECK_GE(epochs, 0);
  return absl::StrCat(kEpoch, epochs);
}

std::string StepName(int64_t steps) {
  ABSL_CHECK_GE(steps, 0);
  return absl::StrCat(kStep, steps);
}

std::string EpochStepName(int64_t epochs, int64_t steps) {
  return absl::StrCat(EpochName(epochs), "_", StepName(steps));
}

std::optional<CheckpointName> ParseName(absl::string_view name) {
  CheckpointName parsed;
  if (absl::ConsumePrefix(&name, kEpoch)) {
    parsed.epochs = ConsumeNumber(name);
    if (!parsed.epochs.has_value()) return std::nullopt;
    if (name.empty()) return parsed;
    if (!absl::ConsumePrefix(&name, "_")) return std::nullopt;
  }
  if (!absl::ConsumePrefix(&name, kStep)) return std::nullopt;
  parsed.steps = ConsumeNumber(name);
  if (!parsed.steps.has_value() || !name.empty()) return std::nullopt;
  return parsed;
}

std::optional<NamedFile> ParseFileName(absl::string_view file,
                                       const std::vector<std::string>& suffixes) {
  for (absl::string_view suffix : suffixes) {
    absl::string_view name = file;
    if (!absl::ConsumeSuffix(&name, suffix)) continue;
    if (std::optional<CheckpointName> parsed = ParseName(name)) {
      return NamedFile{*parsed, std::string(file)};
    }
  }
  return std::nullopt;
}

std::string WithoutSlashes(absl::string_view path) {
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  return std::string(path);
}

absl::Status SortByAge(std::vector<NamedFile>& files) {
  std::stable_sort(files.begin(), files.end(),
                   [](const NamedFile& a, const NamedFile& b) { return a.name < b.name; });
  // An unset number of epochs sorts first.
  if (!files.empty() &&
      files.front().name.epochs.has_value() != files.back().name.epochs.has_value()) {
    return absl::FailedPreconditionError(
        absl::StrCat(files.front().file, " is named by steps alone and ", files.back().file,
                     " by epochs, so that neither is the newer: keep one run in one folder"));
  }
  return absl::OkStatus();
}

}  // namespace ddp::checkpoint
