// Values of a sweep, as text.
//
//   ParseChoices("0.1,0.01")        // {"0.1", "0.01"}
//   ParseChoices("choice(a, b)")    // {"a", "b"}
//   ParseChoices("range(0, 1, 0.5)")// {"0", "0.5"}: without the stop, as in Python
//   ParseChoices("[1, 2],[3]")      // {"[1, 2]", "[3]"}: two lists
//   ParseChoices("'a,b',c")         // {"a,b", "c"}
//   Unquoted("'a,b'")               // "a,b"
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/option_list.h"

namespace ddp::config {

// Returns at least one choice; a text without commas at its top level is the only one.
// InvalidArgument, whose message is the problem alone, for an empty choice or range, a range
// without an end, unbalanced brackets or quotes. Thread-safe.
absl::StatusOr<std::vector<std::string>> ParseChoices(absl::string_view text);

// Whether `text`, a value of an option of this kind, has a comma outside of brackets and quotes, or
// is a choice() or range(): under --multirun that means several values. A comma is no choice
// (CommasAreOfTheValue) between elements of a list that has no brackets, and in a device map. Also
// true of a text with commas whose brackets or quotes are unbalanced, which ParseChoices refuses.
bool LooksLikeChoices(absl::string_view text, OptionKind kind);

// Whether `text` has such commas: "1,2" for a list, "cpu:gloo,cuda:nccl" for a text.
bool CommasAreOfTheValue(absl::string_view text, OptionKind kind);

// The name of a function that other programs' sweeps have and these have not, as "interval" of
// "interval(0, 1)"; empty if `text` is none.
absl::string_view UnknownSweepFunction(absl::string_view text);

// The problem of a value with such a function: "calls interval(), …".
std::string NoSuchSweepFunction(absl::string_view name);

// A value without the quotes around the whole of it: "'a'" is a, with '' for ' inside; "\"a\"" is
// a. Other texts as they are. Thread-safe.
std::string Unquoted(absl::string_view text);

// A text of which Unquoted makes `value`: the same, unless it begins with a quote or would be taken
// for one with references.
std::string Quoted(absl::string_view value);

}  // namespace ddp::config
