// What --backend=… means: which backend serves which kind of device.
//
//   DDP_ASSIGN_OR_RETURN(BackendSpec spec, ParseBackendSpec("cpu:gloo,cuda:nccl"));
//   spec == BackendSpec{{"cpu", "gloo"}, {"cuda", "nccl"}};
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ddp::backends {

// (device type, backend name) pairs in the order given; each device type at most once.
using BackendSpec = std::vector<std::pair<std::string, std::string>>;

// In the place of a name: the choice among backends that is made once the ranks have met (auto.h).
inline constexpr absl::string_view kAuto = "auto";

// Pure. Takes PyTorch's spellings: a bare name ("gloo") is bound to every device type that the
// backend serves in this program; "cpu:shm,cuda:nccl" binds one by one; "auto" is kAuto for the
// CPU, and nccl for CUDA where `device_type` is "cuda". InvalidArgument for what is malformed and
// for a device type that the backend does not serve, NotFound (listing what is linked in) for an
// unknown name.
absl::StatusOr<BackendSpec> ParseBackendSpec(absl::string_view text, absl::string_view device_type);

// Whether this machine and build can serve every backend that `text` names outright (not those that
// "auto" would take): FailedPrecondition says what to do.
absl::Status CheckAvailable(absl::string_view text);

}  // namespace ddp::backends
