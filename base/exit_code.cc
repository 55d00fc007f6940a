#include "base/exit_code.h"

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/stop_signals.h"

namespace ddp {
namespace {

constexpr absl::string_view kCode = "ddp/exit_code";
constexpr absl::string_view kSignal = "ddp/ended_by_signal";

}  // namespace

absl::Status WithExitCode(absl::Status status, int code) {
  status.SetPayload(kCode, absl::Cord(absl::StrCat(code)));
  return status;
}

std::optional<int> ExitCodeIn(const absl::Status& status) {
  const auto payload = status.GetPayload(kCode);
  int code = 0;
  if (!payload || !absl::SimpleAtoi(std::string(*payload), &code)) return std::nullopt;
  return code;
}

absl::Status EndedBy(int signal) {
  absl::Status status =
      absl::CancelledError(absl::StrCat("stopped by signal ", StopSignalName(signal)));
  status.SetPayload(kSignal, absl::Cord(absl::StrCat(signal)));
  return WithExitCode(std::move(status), 128 + signal);
}

bool HasEndedBySignal(const absl::Status& status) { return status.GetPayload(kSignal).has_value(); }

}  // namespace ddp
