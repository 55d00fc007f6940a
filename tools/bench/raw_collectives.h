// Collectives of backends that have an API below c10d, without Work, dispatcher and tensors: what
// //tools/bench:collectives -- --through=raw measures.
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

// The collectives of one rank. Thread-compatible. Run may throw std::exception.
class RawCollectives {
 public:
  virtual ~RawCollectives() = default;

  // Collective. Runs `op`; `elements` is the size of the larger buffer. Reductions sum; the root is
  // rank 0. All-reduce and broadcast are in place: input equals output.
  virtual void Run(CollectiveOp op, Dtype dtype, const void* input, void* output,
                   int64_t elements) = 0;
};

struct RawOptions {
  launchers::Rank rank;
  const backends::Group& group;  // of that backend; must outlive the result
};

struct RawTag {
  static constexpr absl::string_view kWhat = "backend with a layer below c10d";
};

// Collective.
using CreateRaw = absl::StatusOr<std::unique_ptr<RawCollectives>> (*)(const RawOptions& options);
using RawRegistry = Registry<CreateRaw, RawTag>;

}  // namespace ddp::tools::bench
