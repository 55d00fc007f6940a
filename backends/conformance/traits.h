// What the suite expects of each backend beyond the contract, and what each is known to lack. A
// backend that is not named here must do everything.
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
  // Every case that it applies to is run all the same and must end in an error: a gap that has
  // closed is noticed, and so is garbage. Not so where the backend fails only now and then: such
  // cases are left out.
  bool always = true;
};

struct Traits {
  absl::string_view backend;
  absl::string_view device = "cpu";  // where the tensors are
  // Ranks may be threads of one process.
  bool threads_as_ranks = true;
  // Of floating-point reductions.
  Exactness exactness = Exactness::kBits;
  // All ranks get the same bits, and get them again in the next run.
  bool reproducible = true;
  // A group destroyed with work in flight ends it; otherwise its destructor waits for the timeout.
  bool ends_when_destroyed = true;
  // After a failure and an abort it closes its connections at once; gloo's, those between hier's
  // hosts too, may stay open until the timeout of what was under way.
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
