#include "backends/auto.h"

#include <algorithm>
#include <cstddef>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "backends/backend.h"
#include "base/option_error.h"
#include "base/status.h"

namespace ddp::backends {
namespace {

constexpr absl::string_view kShm = "shm";
constexpr absl::string_view kHier = "hier";
constexpr absl::string_view kGloo = "gloo";

std::string UnavailableReason(absl::string_view name) {
  const absl::StatusOr<BackendEntry> entry = BackendRegistry::Find(name);
  if (!entry.ok()) return "not linked into this program";
  const absl::Status status = entry->available ? entry->available() : absl::OkStatus();
  return std::string(status.message());
}

// Two lines: reasons.
std::string Encode(const std::string& no_shm, const std::string& no_hier) {
  const auto line = [](const std::string& text) {
    return absl::StrReplaceAll(text, {{"\n", " "}});
  };
  return absl::StrCat(line(no_shm), "\n", line(no_hier));
}

absl::StatusOr<AutoReport> Decode(const std::string& host, absl::string_view text) {
  const std::vector<std::string> lines = absl::StrSplit(text, '\n');
  if (lines.size() != 2) {
    return absl::InternalError(absl::StrCat("a rank's report for backend=auto is '", text, "'"));
  }
  return AutoReport{host, lines[0], lines[1]};
}

bool IsAuto(const BackendSpec::value_type& binding) { return binding.second == kAuto; }

}  // namespace

AutoChoice ChooseBackend(const std::vector<AutoReport>& reports) {
  std::set<std::string> hosts;
  for (const AutoReport& report : reports) hosts.insert(report.host);
  const bool one_host = hosts.size() == 1;
  const absl::string_view wanted = one_host ? kShm : kHier;
  std::string reason =
      absl::StrCat(reports.size(), reports.size() == 1 ? " rank" : " ranks", " on ",
                   one_host ? "one host" : absl::StrCat(hosts.size(), " hosts"));

  const auto problem = [one_host](const AutoReport& report) -> const std::string& {
    return one_host ? report.no_shm : report.no_hier;
  };
  const auto hindered = [&](const AutoReport& report) { return !problem(report).empty(); };
  const auto first = std::find_if(reports.begin(), reports.end(), hindered);
  if (first == reports.end()) return {std::string(wanted), std::move(reason)};
  const bool all_alike = std::all_of(reports.begin(), reports.end(), [&](const AutoReport& report) {
    return problem(report) == problem(*first);
  });
  absl::StrAppend(&reason, "; no ", wanted,
                  all_alike ? "" : absl::StrCat(" on rank ", first - reports.begin()), ": ",
                  problem(*first));
  return {std::string(kGloo), std::move(reason)};
}

std::string ReportForAuto(const BackendSpec& spec) {
  if (std::none_of(spec.begin(), spec.end(), IsAuto)) return "";
  return Encode(UnavailableReason(kShm), UnavailableReason(kHier));
}

absl::StatusOr<std::string> ResolveAuto(const std::vector<std::string>& hosts,
                                        const std::vector<std::string>& reports,
                                        BackendSpec& spec) {
  const auto binding = std::find_if(spec.begin(), spec.end(), IsAuto);
  if (binding == spec.end()) return "";

  std::vector<AutoReport> decoded;
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    if (reports[rank].empty()) {
      return OptionError("backend", kAuto,
                         absl::StrCat("is not that of rank ", rank, ", which names its backend"));
    }
    DDP_ASSIGN_OR_RETURN(AutoReport report, Decode(hosts[rank], reports[rank]));
    decoded.push_back(std::move(report));
  }
  AutoChoice choice = ChooseBackend(decoded);
  binding->second = choice.backend;
  return absl::StrCat(choice.backend, " (auto: ", choice.reason, ")");
}

}  // namespace ddp::backends
