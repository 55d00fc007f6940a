// Parses --backend=…: which backend serves which device type.
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

// Used as a backend name: the backend is chosen after the ranks have joined (auto.h).
inline constexpr absl::string_view kAuto = "auto";

// Thread-safe; not collective. The syntax is PyTorch's: a bare name ("gloo") stands for those
// of the CPU and `device_type` that the backend serves; "cpu:shm,cuda:nccl" names one backend per
// device type; "auto" is kAuto for the CPU and, if `device_type` is "cuda", nccl for CUDA.
// OptionErrors: InvalidArgument for malformed text and for a device type that the backend does not
// serve; NotFound, with the list of linked backends, for an unknown name.
absl::StatusOr<BackendSpec> ParseBackendSpec(absl::string_view text, absl::string_view device_type);

// OK if every backend named in `text` can run on this machine and in this build; otherwise
// FailedPrecondition, with what to do. Backends that "auto" might choose are not checked.
absl::Status CheckAvailable(absl::string_view text);

}  // namespace ddp::backends
