// One rank's membership in a shared-memory group: the rendezvous of the ranks of a host, then the
// segment, the arena and the engine. No torch.
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

  // A key-value store that all ranks share, for this group alone. `get` waits, at most until
  // `deadline`, until the key has been set.
  std::function<absl::Status(const std::string& key, const std::string& value)> set = nullptr;
  std::function<absl::StatusOr<std::string>(const std::string& key)> get = nullptr;
};

// Owns the segment and the engine. Thread-safe.
class ShmGroup {
 public:
  // Collective. FailedPrecondition if not all ranks are on this host, or their limits differ;
  // ResourceExhausted if there is not enough memory, or no file descriptor left; DeadlineExceeded
  // if not all ranks join by `deadline`. If rank 0 fails, so do all other ranks.
  static absl::StatusOr<std::shared_ptr<ShmGroup>> Join(const ShmJoinOptions& options);

  int rank() const { return rank_; }
  int world_size() const { return layout_.world_size(); }
  Engine& engine() const { return *engine_; }

  // Null if Limits::arena_bytes is 0. Valid as long as the group.
  Arena* arena() { return arena_.has_value() ? &*arena_ : nullptr; }

  // Announces that this rank makes no more calls; see Engine::Leave. The segment stays mapped until
  // the group is destroyed, for tensors in the arena.
  void Leave() { engine_->Leave(); }

 private:
  ShmGroup(int rank, const SegmentLayout& layout, SharedMemory memory, std::vector<PeerInfo> peers);

  const int rank_;
  const SegmentLayout layout_;
  SharedMemory memory_;
  std::optional<Arena> arena_;
  std::shared_ptr<Engine> engine_;
};

}  // namespace ddp::backends::shm
