#include "launchers/log_error.h"

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace ddp::launchers {
namespace {

absl::string_view WithoutRank(absl::string_view line) {
  if (!absl::StartsWith(line, "[rank ")) return line;
  const size_t end = line.find("] ");
  return end == absl::string_view::npos ? line : line.substr(end + 2);
}

}  // namespace

std::string LastErrorIn(absl::string_view log) {
  absl::string_view ours, slurms;
  for (absl::string_view line : absl::StrSplit(log, absl::ByAnyChar("\n\r"))) {
    line = absl::StripAsciiWhitespace(WithoutRank(line));
    if (absl::ConsumePrefix(&line, "error: ")) {
      ours = line;
    } else if (absl::StartsWith(line, "slurmstepd: error: ") ||
               absl::StartsWith(line, "srun: error: ")) {
      slurms = line;
    }
  }
  return std::string(ours.empty() ? slurms : ours);
}

}  // namespace ddp::launchers
