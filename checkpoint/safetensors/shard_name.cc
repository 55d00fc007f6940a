#include "checkpoint/safetensors/shard_name.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/utf8.h"

namespace ddp::checkpoint::safetensors {
namespace {

constexpr absl::string_view kSuffix = ".safetensors";
constexpr absl::string_view kOf = "-of-";
constexpr size_t kMostDigits = 6;
constexpr size_t kMostNamed = 10;

std::string Padded(int64_t number, size_t digits) {
  const std::string text = absl::StrCat(number);
  return std::string(digits - std::min(digits, text.size()), '0') + text;
}

// Takes digits off the end of `text`.
absl::string_view ConsumeDigits(absl::string_view& text) {
  size_t begin = text.size();
  while (begin > 0 && absl::ascii_isdigit(static_cast<unsigned char>(text[begin - 1]))) --begin;
  const absl::string_view digits = text.substr(begin);
  text.remove_suffix(digits.size());
  return digits;
}

}  // namespace

std::string ShardName::FileOf(int64_t other) const {
  return absl::StrCat(model, "-", Padded(other, digits), kOf, Padded(of, digits), kSuffix);
}

bool ShardName::IsOfSameModel(const ShardName& other) const {
  return model == other.model && of == other.of && digits == other.digits;
}

std::optional<ShardName> ParseShardName(absl::string_view file) {
  if (!absl::ConsumeSuffix(&file, kSuffix)) return std::nullopt;
  ShardName name;
  const absl::string_view of = ConsumeDigits(file);
  if (!absl::ConsumeSuffix(&file, kOf)) return std::nullopt;
  const absl::string_view number = ConsumeDigits(file);
  if (number.size() != of.size() || number.size() > kMostDigits) return std::nullopt;
  if (!absl::SimpleAtoi(number, &name.number) || !absl::SimpleAtoi(of, &name.of)) {
    return std::nullopt;
  }
  if (name.number < 1 || name.number > name.of) return std::nullopt;
  if (!absl::ConsumeSuffix(&file, "-") || file.empty()) return std::nullopt;
  name.model = std::string(file);
  name.digits = number.size();
  return name;
}

std::vector<std::string> ShardsIn(const std::string& folder) {
  absl::StatusOr<std::vector<std::string>> files = ListDirectory(folder);
  if (!files.ok()) return {};
  std::erase_if(*files, [&](const std::string& file) {
    std::error_code error;
    // A link that leads nowhere, as in a cache that was cleared, is one that is missing.
    return !ParseShardName(file).has_value() ||
           !std::filesystem::is_regular_file(absl::StrCat(folder, "/", file), error);
  });
  return *std::move(files);
}

absl::StatusOr<std::vector<std::string>> AllShards(const std::string& folder) {
  std::vector<std::string> files = ShardsIn(folder);
  if (files.empty()) return files;
  const ShardName first = *ParseShardName(files[0]);
  for (const std::string& file : files) {
    if (first.IsOfSameModel(*ParseShardName(file))) continue;
    return absl::FailedPreconditionError(
        absl::StrCat(folder, " has files of more than one model, ", Printable(files[0]), " and ",
                     Printable(file), ", and no index: put each model into a folder of its own"));
  }
  const auto all = static_cast<size_t>(first.of);
  if (files.size() == all) return files;
  std::vector<std::string> missing;
  for (int64_t number = 1; number <= first.of && missing.size() < kMostNamed; ++number) {
    const std::string file = first.FileOf(number);
    if (!std::binary_search(files.begin(), files.end(), file)) missing.push_back(Printable(file));
  }
  const size_t count = all - files.size();
  return absl::DataLossError(absl::StrCat(folder, " lacks ", count, " of the ", all,
                                          " files of its model: ", absl::StrJoin(missing, ", "),
                                          count > missing.size() ? ", …" : "",
                                          "; fetch what is missing"));
}

}  // namespace ddp::checkpoint::safetensors
