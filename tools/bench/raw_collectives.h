// Collectives below c10d, where a backend has such a layer: what --through=raw of
// //tools/bench:collectives times. No Work, no dispatch, no tensors.
//
//   absl::StatusOr<std::unique_ptr<RawCollectives>> Create(const RawOptions& options);
//   const ddp::Registration<RawRegistry> kShm("shm", &Create);
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "backends/process_group.h"
#include "base/registry.h"
#include "launchers/rank.h"
#include "tools/bench/collective_task.h"

namespace ddp::tools::bench {

// One rank's side. Thread-compatible. Run may throw std::exception.
class RawCollectives {
 public:
  virtual ~RawCollectives() = default;

  // Collective: `op` over `elements` elements of the larger of the two buffers, summing where it
  // reduces, from rank 0 where it has a root. all-reduce and broadcast are in place: input equals
  // output.
  virtual void Run(CollectiveOp op, Dtype dtype, const void* input, void* output,
                   int64_t elements) = 0;
};

struct RawOptions {
  launchers::Rank rank;
  const backends::Group& group;  // of that backend; outlives what is created
};

struct RawTag {
  static constexpr absl::string_view kWhat = "backend with a layer below c10d";
};

// Collective.
using CreateRaw = absl::StatusOr<std::unique_ptr<RawCollectives>> (*)(const RawOptions& options);
using RawRegistry = Registry<CreateRaw, RawTag>;

}  // namespace ddp::tools::bench
