// The words by which a backend that watches its peers' processes names a dead one. Errors of a
// collective are c10::Error, which carries no payload: backends/watch finds the words in its text.
#pragma once

#include "absl/strings/string_view.h"

namespace ddp::backends {

// Follows the name of a rank: "Connection closed by peer: rank 2 has died".
inline constexpr absl::string_view kHasDied = " has died";

}  // namespace ddp::backends
