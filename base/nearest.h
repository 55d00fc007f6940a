// Suggestions for misspelled names, for messages.
//
//   absl::StrCat("there is no file ", name, DidYouMean(name, names))
//   // "there is no file bse; did you mean base?"
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace ddp {

// Levenshtein distance: minimum number of insertions, deletions and substitutions that turn `a`
// into `b`.
size_t EditDistance(absl::string_view a, absl::string_view b);

// Whether two names this far apart may be mistaken for each other.
bool IsNear(size_t distance, absl::string_view name);

// "; did you mean A, B?" with the nearest three of `candidates`; empty if none is near.
std::string DidYouMean(absl::string_view name, const std::vector<std::string>& candidates);

// The same, for candidates whose distances are known.
std::string DidYouMean(std::vector<std::pair<size_t, std::string>> near);

}  // namespace ddp
