#include "backends/mpi/create_group.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "backends/common/join.h"
#include "base/status.h"

namespace ddp::backends::mpi {
namespace {

std::string Key(int rank) { return absl::StrCat("mpi_world_rank/", rank); }

// The rank in MPI_COMM_WORLD of each rank of the group.
absl::StatusOr<std::vector<int>> ExchangeWorldRanks(c10d::Store& store, int rank, int size,
                                                    int world_rank, absl::Duration timeout) {
  DDP_RETURN_IF_ERROR(CatchStatus("telling the other ranks this one's place in MPI", [&] {
    const std::string mine = absl::StrCat(world_rank);
    store.set(Key(rank), std::vector<uint8_t>(mine.begin(), mine.end()));
  }));
  DDP_RETURN_IF_ERROR(WaitForAllRanks(store, rank, size, timeout));
  std::vector<int> world_ranks(size);
  DDP_RETURN_IF_ERROR(CatchStatus("reading the other ranks' places in MPI", [&]() -> absl::Status {
    for (int peer = 0; peer < size; ++peer) {
      const std::vector<uint8_t> value = store.get(Key(peer));
      if (!absl::SimpleAtoi(std::string(value.begin(), value.end()), &world_ranks[peer])) {
        return absl::InternalError(absl::StrCat("the store's ", Key(peer), " is not a number"));
      }
    }
    return absl::OkStatus();
  }));
  return world_ranks;
}

}  // namespace

absl::StatusOr<std::shared_ptr<MpiGroup>> CreateGroup(Runtime& runtime,
                                                      const c10::intrusive_ptr<c10d::Store>& store,
                                                      int rank, int size, absl::Duration timeout) {
  DDP_ASSIGN_OR_RETURN(std::vector<int> world_ranks,
                       ExchangeWorldRanks(*store, rank, size, runtime.world_rank(), timeout));
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank || world_ranks[peer] != world_ranks[rank]) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("ranks ", rank, " and ", peer, " are both rank ", world_ranks[peer], " of ",
                     runtime.world_size(),
                     " to MPI: each rank must be a process of its own, started by the "
                     "mpirun of the MPI that this program was built with, which is ",
                     LibraryVersion()));
  }
  return MpiGroup::Create(runtime, std::move(world_ranks));
}

}  // namespace ddp::backends::mpi
