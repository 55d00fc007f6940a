// Values of a sweep, as text.
//
//   ParseChoices("0.1,0.01")        // {"0.1", "0.01"}
//   ParseChoices("choice(a, b)")    // {"a", "b"}
//   ParseChoices("range(0, 1, 0.5)")// {"0", "0.5"}: without the stop, as in Python
//   ParseChoices("[1, 2],[3]")      // {"[1, 2]", "[3]"}: two lists
//   ParseChoices("'a,b',c")         // {"a,b", "c"}
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ddp::config {

// Returns at least one choice; a text without commas at its top level is the only one.
// InvalidArgument, whose message is the problem alone, for an empty choice or range, a range
// without an end, unbalanced brackets or quotes. Thread-safe.
absl::StatusOr<std::vector<std::string>> ParseChoices(absl::string_view text);

// Whether `text` has a comma outside of brackets and quotes, or is a choice() or range(): under
// --multirun that means several values.
bool LooksLikeChoices(absl::string_view text);

}  // namespace ddp::config
