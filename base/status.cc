#include "base/status.h"

#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace ddp {

absl::Status Annotate(const absl::Status& status, absl::string_view context) {
  if (status.ok() || context.empty()) return status;
  absl::Status annotated(status.code(), absl::StrCat(context, ": ", status.message()));
  status.ForEachPayload([&annotated](absl::string_view url, const absl::Cord& payload) {
    annotated.SetPayload(url, payload);
  });
  return annotated;
}

std::string ExceptionMessage(const std::exception& error) {
  absl::string_view text = error.what();
  // c10::Error::what(): the message, then "Exception raised from FUNCTION at FILE:LINE", frames.
  for (absl::string_view mark : {"\nException raised from ", "Exception raised from "}) {
    if (size_t at = text.find(mark); at != absl::string_view::npos && at > 0) {
      text = text.substr(0, at);
    }
  }
  // Gloo's: "[enforce fail at FILE:LINE] CONDITION. MESSAGE".
  absl::string_view rest = text;
  if (absl::ConsumePrefix(&rest, "[enforce fail at ")) {
    const size_t condition = rest.find("] ");
    const size_t message =
        condition == absl::string_view::npos ? condition : rest.find(". ", condition);
    if (message != absl::string_view::npos && message + 2 < rest.size()) {
      text = rest.substr(message + 2);
    }
  }
  return std::string(absl::StripAsciiWhitespace(text));
}

absl::Status StatusFromException(absl::string_view context, const std::exception& error) {
  std::string message = ExceptionMessage(error);
  const std::string lower = absl::AsciiStrToLower(message);
  absl::StatusCode code = absl::StatusCode::kInternal;
  if (absl::StrContains(lower, "timed out") || absl::StrContains(lower, "timeout")) {
    code = absl::StatusCode::kDeadlineExceeded;
  } else if (absl::StrContains(lower, "connection") || absl::StrContains(lower, "broken pipe")) {
    code = absl::StatusCode::kUnavailable;
  }
  absl::Status status(code, context.empty() ? message : absl::StrCat(context, ": ", message));
  const auto* of_system = dynamic_cast<const std::system_error*>(&error);
  if (of_system == nullptr) return status;
  const std::error_category& category = of_system->code().category();
  if (category != std::generic_category() && category != std::system_category()) return status;
  // For base/process_limits.cc: what the error is, whatever its text says.
  status.SetPayload("ddp/errno", absl::Cord(absl::StrCat(of_system->code().value())));
  return status;
}

}  // namespace ddp
