#include "launchers/slurm/nodelist.h"

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/status.h"

namespace ddp::launchers {
namespace {

// Takes digits only (no sign, no blank), few enough for an int.
absl::StatusOr<int> ParseNumber(absl::string_view text) {
  int value = 0;
  if (text.empty() || text.size() > 9 ||
      text.find_first_not_of("0123456789") != absl::string_view::npos ||
      !absl::SimpleAtoi(text, &value)) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", text, "' is not a number of 1 to 9 digits"));
  }
  return value;
}

// Appends "07", "08", … for "07-12", or "7" for "7".
absl::Status AppendRange(absl::string_view range, std::vector<std::string>& numbers) {
  range = absl::StripAsciiWhitespace(range);
  const std::pair<absl::string_view, absl::string_view> ends =
      absl::StrSplit(range, absl::MaxSplits('-', 1));
  DDP_ASSIGN_OR_RETURN(int first, ParseNumber(ends.first));
  int last = first;
  if (range.find('-') != absl::string_view::npos) {
    DDP_ASSIGN_OR_RETURN(last, ParseNumber(ends.second));
  }
  if (last < first) return absl::InvalidArgumentError(absl::StrCat("range '", range, "' is empty"));
  if (last - first >= kMaxNodes - static_cast<int>(numbers.size())) {
    return absl::InvalidArgumentError(absl::StrCat("more than ", kMaxNodes, " nodes"));
  }
  const int width = static_cast<int>(ends.first.size());
  for (int n = first; n <= last; ++n) numbers.push_back(absl::StrFormat("%0*d", width, n));
  return absl::OkStatus();
}

// Every name followed by every suffix.
absl::Status Multiply(const std::vector<std::string>& suffixes, std::vector<std::string>& names) {
  if (names.size() * suffixes.size() > kMaxNodes) {
    return absl::InvalidArgumentError(absl::StrCat("more than ", kMaxNodes, " nodes"));
  }
  std::vector<std::string> product;
  product.reserve(names.size() * suffixes.size());
  for (const std::string& name : names) {
    for (const std::string& suffix : suffixes) product.push_back(absl::StrCat(name, suffix));
  }
  names = std::move(product);
  return absl::OkStatus();
}

// One item: literals and brackets by turns, such as a[1-2]b[3-4].
absl::StatusOr<std::vector<std::string>> ExpandItem(absl::string_view item) {
  item = absl::StripAsciiWhitespace(item);
  if (item.empty()) return absl::InvalidArgumentError("a name is empty");
  std::vector<std::string> names = {""};
  while (!item.empty()) {
    const size_t open = item.find('[');
    const absl::string_view literal = item.substr(0, open);
    if (literal.find_first_of("] \t\n") != absl::string_view::npos) {
      return absl::InvalidArgumentError(absl::StrCat("stray bracket or blank in '", literal, "'"));
    }
    DDP_RETURN_IF_ERROR(Multiply({std::string(literal)}, names));
    if (open == absl::string_view::npos) break;
    const size_t close = item.find(']', open);
    if (close == absl::string_view::npos) return absl::InvalidArgumentError("'[' is never closed");
    std::vector<std::string> numbers;
    for (absl::string_view range : absl::StrSplit(item.substr(open + 1, close - open - 1), ',')) {
      DDP_RETURN_IF_ERROR(AppendRange(range, numbers));
    }
    DDP_RETURN_IF_ERROR(Multiply(numbers, names));
    item.remove_prefix(close + 1);
  }
  return names;
}

// The items between commas that are not within brackets.
std::vector<absl::string_view> SplitItems(absl::string_view list) {
  std::vector<absl::string_view> items;
  size_t begin = 0;
  int depth = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    if (list[i] == '[') ++depth;
    if (list[i] == ']') --depth;
    if (list[i] == ',' && depth <= 0) {
      items.push_back(list.substr(begin, i - begin));
      begin = i + 1;
    }
  }
  items.push_back(list.substr(begin));
  return items;
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ExpandNodeList(absl::string_view list) {
  const std::string context = absl::StrCat("SLURM node list '", list, "'");
  std::vector<std::string> nodes;
  for (absl::string_view item : SplitItems(list)) {
    absl::StatusOr<std::vector<std::string>> names = ExpandItem(item);
    if (!names.ok()) return Annotate(names.status(), context);
    if (nodes.size() + names->size() > kMaxNodes) {
      return absl::InvalidArgumentError(absl::StrCat(context, ": more than ", kMaxNodes, " nodes"));
    }
    nodes.insert(nodes.end(), names->begin(), names->end());
  }
  return nodes;
}

absl::StatusOr<std::vector<int>> ExpandTasksPerNode(absl::string_view list) {
  const std::string context = absl::StrCat("SLURM tasks per node '", list, "'");
  std::vector<int> tasks;
  for (absl::string_view item : absl::StrSplit(list, ',')) {
    absl::string_view count = absl::StripAsciiWhitespace(item);
    absl::string_view repeat = "1";
    if (const size_t open = count.find("(x"); open != absl::string_view::npos) {
      repeat = count.substr(open + 2);
      count = count.substr(0, open);
      if (!absl::ConsumeSuffix(&repeat, ")")) {
        return absl::InvalidArgumentError(absl::StrCat(context, ": '(x' is never closed"));
      }
    }
    absl::StatusOr<int> value = ParseNumber(count);
    if (!value.ok()) return Annotate(value.status(), context);
    absl::StatusOr<int> times = ParseNumber(repeat);
    if (!times.ok()) return Annotate(times.status(), context);
    if (*times > kMaxNodes - static_cast<int>(tasks.size())) {
      return absl::InvalidArgumentError(absl::StrCat(context, ": more than ", kMaxNodes, " nodes"));
    }
    tasks.insert(tasks.end(), *times, *value);
  }
  return tasks;
}

}  // namespace ddp::launchers
