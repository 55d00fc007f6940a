// Strict JSON of files that others wrote: bounded depth, no duplicate keys, no comments.
//
//   DDP_ASSIGN_OR_RETURN(const nlohmann::json index, ParseJson(text, {.depth = 2}));
//
// Integers stay integers (int64_t or uint64_t) and are told from floats. Thread-safe.
#pragma once

#include <cstddef>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace ddp {

struct JsonLimits {
  size_t depth = 64;           // of nested objects and arrays
  size_t items = ~size_t{0};   // of one array
  size_t values = ~size_t{0};  // in all: bounds memory, which may be 40 times the text's size
};

// InvalidArgument, with the byte where it stands, for text that is not one JSON value in UTF-8
// (white space may surround it), that has a key twice in one object, or that exceeds a limit.
absl::StatusOr<nlohmann::json> ParseJson(absl::string_view text, const JsonLimits& limits = {});

}  // namespace ddp
