// What differs between the versions of LibTorch that this project compiles with: 2.11 and 2.15.
//
// The sources are written for the pinned version. Whatever uses a name below includes this header;
// no other file asks for torch's version, but forwarding.h, for virtual functions that only newer
// versions have. docs/using.md says which versions are tried.
#pragma once

#include <cstdlib>
#include <type_traits>
#include <utility>

#include "ATen/core/TensorBase.h"
#include "torch/headeronly/version.h"

#define DDP_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||      \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

// 2.13 renamed the collectives on one tensor of c10d's ProcessGroup, and deprecated their old
// names; 2.14 did the same with Backend's. An override must have the name that ProcessGroupGloo
// overrides. Older versions get the old names from the preprocessor.
#if !DDP_TORCH_AT_LEAST(2, 14)
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"  // before the macros: 2.13 has both names

#define all_gather_single _allgather_base
#define all_gather_single_coalesced allgather_into_tensor_coalesced
#define all_to_all_single alltoall_base
#define reduce_scatter_single _reduce_scatter_base
#define reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced
#endif

#if !DDP_TORCH_AT_LEAST(2, 13)
#define PreMulSumSupplement NCCLPreMulSumSupplement
#define makePreMulSum makeNCCLPreMulSum
#endif

namespace ddp {

// Defects of older versions, which have work-arounds. Each was tried on 2.11 and on 2.15, by what
// docs/decisions.md says; so were the defects that both have, whose work-arounds do not ask.

// c10d's flight recorder, one for the process, inserted a new group into a map before it took its
// lock: with ranks as threads, which make their groups at the same time, the process crashed.
// Call this before the recorder is first used, which reads the variable.
inline void DisableUnsafeFlightRecorder() {
  if (!DDP_TORCH_AT_LEAST(2, 15)) setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/1);
}

// c10d's Logger, which the Reducer needs, cast any backend of type GLOO to ProcessGroupGloo, also
// one that the watchdog wraps.
inline constexpr bool kLoggerTakesAnyGlooBackend = DDP_TORCH_AT_LEAST(2, 15);

// How autograd holds a node of its graph: std::shared_ptr until 2.12, then c10::intrusive_ptr.
using NodePtr = std::remove_cvref_t<decltype(std::declval<const at::TensorBase&>().grad_fn())>;

}  // namespace ddp
