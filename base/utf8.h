// UTF-8, which logs, checkpoints and configuration files hold: text from elsewhere may be anything.
//
//   if (!IsUtf8(name)) return absl::InvalidArgumentError(Printable(name) + " is no UTF-8");
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace ddp {

// Whether all of `text` is UTF-8 as of RFC 3629: no overlong forms, surrogates, or code points
// above U+10FFFF. Thread-safe, as is the function below.
bool IsUtf8(absl::string_view text);

// `text` with each byte that is zero or not part of UTF-8 as \xNN, for messages.
std::string Printable(absl::string_view text);

}  // namespace ddp
