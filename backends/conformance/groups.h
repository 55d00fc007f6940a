// The process groups of one rank; runs cases on them.
//
//   DDP_ASSIGN_OR_RETURN(std::unique_ptr<Groups> groups, Groups::Make("gloo", options));
//   absl::Status status = groups->Run(c, salt);
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "backends/backend.h"
#include "backends/conformance/case.h"
#include "backends/conformance/traits.h"

namespace ddp::backends::conformance {

// Not thread safe. Made straight from the registry's factory: the calls go to the backend, without
// c10d's dispatcher in between.
class Groups {
 public:
  // Collective.
  static absl::StatusOr<std::unique_ptr<Groups>> Make(const std::string& backend,
                                                      const BackendOptions& options);

  // Collective: runs the case on the groups of its scope. `salt` and the next few numbers
  // distinguish calls. DataLoss for a wrong result, otherwise the backend's own error.
  absl::Status Run(const Case& c, uint64_t salt);

  c10d::Backend& world() { return *world_; }
  // Destroys the group of all ranks; operations may be in flight.
  void ReleaseWorld() { world_.reset(); }
  // The group that a collective of this scope runs on; of kTwoThreads, the second one.
  c10d::Backend& group(Scope scope);
  const Traits& traits() const { return traits_; }

 private:
  explicit Groups(const Traits& traits) : traits_(traits) {}
  absl::Status RunOn(c10d::Backend& backend, const Case& c, uint64_t salt);

  const Traits& traits_;
  c10::intrusive_ptr<c10d::Backend> world_, second_, subgroup_, split_;
};

}  // namespace ddp::backends::conformance
