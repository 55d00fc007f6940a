#include "base/status.h"

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

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
  return absl::Status(code, context.empty() ? message : absl::StrCat(context, ": ", message));
}

}  // namespace ddp
