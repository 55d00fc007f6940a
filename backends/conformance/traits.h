// Known properties and gaps of each backend. A backend without an entry must support every case.
//
//   const Traits& traits = TraitsOf("gloo");
//   if (const Gap* gap = FindGap(traits, c)) …   // the case must end in an error
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "backends/conformance/case.h"
#include "backends/conformance/values.h"

namespace ddp::backends::conformance {

// Something that a backend lacks.
struct Gap {
  absl::string_view what;
  bool (*applies)(const Case& c);
  // True: cases in the gap are run and must return an error, so that the suite detects wrong
  // results and gaps that have been closed. False: the backend fails only sometimes, and the cases
  // are skipped.
  bool always = true;
};

struct Traits {
  absl::string_view backend;
  absl::string_view device = "cpu";  // where the tensors are
  // Ranks may be threads of one process.
  bool threads_as_ranks = true;
  // Accuracy of floating-point reductions.
  Exactness exactness = Exactness::kBits;
  // Results are bit-identical on all ranks and in all runs.
  bool reproducible = true;
  // Destroying a group ends its pending work. False: the destructor waits for the timeout.
  bool ends_when_destroyed = true;
  // Closes its connections at once after a failure and abort(). False for gloo, and for hier
  // between hosts: connections may stay open until pending operations time out.
  bool closes_at_once = true;
  // Ranks that make the same call with different sizes get an error; otherwise the process may end.
  bool survives_wrong_sizes = true;
  absl::Span<const Gap> gaps = {};
};

const Traits& TraitsOf(absl::string_view backend);

// Names of the linked backends whose ranks may be threads of one process.
std::vector<std::string> ThreadBackends();

// The first gap that applies to the case; null: the backend must do it.
const Gap* FindGap(const Traits& traits, const Case& c);

}  // namespace ddp::backends::conformance
