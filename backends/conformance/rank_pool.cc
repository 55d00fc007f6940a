#include "backends/conformance/rank_pool.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/threads_testing.h"
#include "third_party/libtorch/compat.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"

namespace ddp::backends::conformance {

RankPool::RankPool(std::string backend, int world_size, absl::Duration timeout)
    : backend_(std::move(backend)), world_size_(world_size), timeout_(timeout) {
  DisableUnsafeFlightRecorder();
}

std::vector<absl::Status> RankPool::Run(
    const std::function<absl::Status(int rank, Groups& groups)>& body) {
  BackendOptions options;
  if (groups_.empty()) {
    groups_.resize(world_size_);
    options.store = c10::make_intrusive<c10d::HashStore>();
  }
  options.rank.world_size = options.rank.local_world_size = world_size_;
  options.rank.run_id = absl::StrCat("generation ", generation_);
  options.group.timeout = timeout_;
  std::vector<absl::Status> statuses(world_size_);
  RunThreads(world_size_, [&](int rank) {
    statuses[rank] = CatchStatus(absl::StrCat("rank ", rank), [&] {
      if (groups_[rank] == nullptr) {
        BackendOptions mine = options;
        mine.rank.rank = mine.rank.local_rank = rank;
        DDP_ASSIGN_OR_RETURN(groups_[rank], Groups::Make(backend_, mine));
      }
      return body(rank, *groups_[rank]);
    });
  });
  return statuses;
}

void RankPool::Reset() {
  groups_.clear();
  ++generation_;
}

absl::Status Worst(const std::vector<absl::Status>& statuses) {
  absl::Status worst;
  for (const absl::Status& status : statuses) {
    if (absl::IsDataLoss(status)) return status;
    worst.Update(status);
  }
  return worst;
}

}  // namespace ddp::backends::conformance
