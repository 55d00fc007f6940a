// A rank's part in a shared-memory group: how the ranks of a host meet, and what they then have.
//
//   DDP_ASSIGN_OR_RETURN(std::shared_ptr<ShmGroup> group,
//                        ShmGroup::Join({.rank = 1, .world_size = 4, .set = …, .get = …}));
//   group->engine().Submit(&op);
//   group->Leave();
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "backends/shm/engine/engine.h"
#include "backends/shm/engine/layout.h"
#include "backends/shm/memory/arena.h"
#include "backends/shm/memory/memfd.h"

namespace ddp::backends::shm {

struct ShmJoinOptions {
  int rank = 0;
  int world_size = 1;
  Limits limits = {};
  absl::Time deadline = absl::InfiniteFuture();

  // The ranks' common blackboard, for this group alone: `get` waits until the key has been set.
  std::function<absl::Status(const std::string& key, const std::string& value)> set = nullptr;
  std::function<absl::StatusOr<std::string>(const std::string& key)> get = nullptr;
};

// Owns the segment and the engine. Thread-safe.
class ShmGroup {
 public:
  // Collective. FailedPrecondition where not all ranks are on this host, or their limits differ;
  // ResourceExhausted for want of memory or descriptors, on all ranks.
  static absl::StatusOr<std::shared_ptr<ShmGroup>> Join(const ShmJoinOptions& options);

  int rank() const { return rank_; }
  int world_size() const { return layout_.world_size(); }
  Engine& engine() const { return *engine_; }

  // Null where the limits leave it no room.
  Arena* arena() { return arena_.has_value() ? &*arena_ : nullptr; }

  // This rank makes no more calls. The segment stays mapped as long as the group, for tensors that
  // live in it.
  void Leave() { engine_->Leave(); }

 private:
  ShmGroup(int rank, const Layout& layout, SharedMemory memory, std::vector<PeerInfo> peers);

  const int rank_;
  const Layout layout_;
  SharedMemory memory_;
  std::optional<Arena> arena_;
  std::shared_ptr<Engine> engine_;
};

}  // namespace ddp::backends::shm
