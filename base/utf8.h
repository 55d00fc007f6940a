// UTF-8, which logs, checkpoints and configuration files hold: text from elsewhere may be anything.
//
//   if (!IsUtf8(name)) return absl::InvalidArgumentError(Printable(name) + " is no UTF-8");
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace ddp {

// Whether U+D800 to U+DFFF, the halves of a pair in UTF-16, may stand in UTF-8 as three bytes each.
// RFC 3629 forbids it, and so do most readers. Python strings may have them (file names that are no
// UTF-8, by its error handler "surrogateescape"), and its pickles are written with "surrogatepass".
enum class Surrogates { kRefuse, kAccept };

// Whether all of `text` is UTF-8 as of RFC 3629, but for `surrogates`: no overlong forms, or code
// points above U+10FFFF. Thread-safe, as is the function below.
bool IsUtf8(absl::string_view text, Surrogates surrogates = Surrogates::kRefuse);

// `text` with each byte that is zero or not part of UTF-8 as \xNN, for messages.
std::string Printable(absl::string_view text);

// Of the value of an option, whose name and value the message is to follow: InvalidArgument if it
// is not UTF-8, unless it may have `any_bytes`, or has a zero byte, at which a path ends.
absl::Status CheckText(absl::string_view text, bool any_bytes = false);

}  // namespace ddp
