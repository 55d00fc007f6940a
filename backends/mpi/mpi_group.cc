#include "backends/mpi/mpi_group.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace ddp::backends::mpi {
namespace {

absl::StatusOr<MPI_Comm> MakeComm(const std::vector<int>& world_ranks) {
  MPI_Group world = MPI_GROUP_NULL, members = MPI_GROUP_NULL;
  DDP_RETURN_IF_ERROR(MpiStatus(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group"));
  absl::Status status = MpiStatus(
      MPI_Group_incl(world, static_cast<int>(world_ranks.size()), world_ranks.data(), &members),
      "MPI_Group_incl");
  MPI_Comm comm = MPI_COMM_NULL;
  if (status.ok()) {
    status = MpiStatus(MPI_Comm_create_group(MPI_COMM_WORLD, members, /*tag=*/0, &comm),
                       "MPI_Comm_create_group");
    MPI_Group_free(&members);
  }
  MPI_Group_free(&world);
  DDP_RETURN_IF_ERROR(status);
  return comm;
}

}  // namespace

absl::StatusOr<std::shared_ptr<MpiGroup>> MpiGroup::Create(Runtime& runtime,
                                                           std::vector<int> world_ranks) {
  const auto self = std::find(world_ranks.begin(), world_ranks.end(), runtime.world_rank());
  if (self == world_ranks.end()) {
    return absl::InvalidArgumentError("this process is none of the ranks of the group");
  }
  std::shared_ptr<MpiGroup> group(new MpiGroup(runtime));
  group->rank_ = static_cast<int>(self - world_ranks.begin());
  group->world_ranks_ = std::move(world_ranks);
  group->max_tag_ = runtime.max_tag();
  DDP_RETURN_IF_ERROR(runtime.Call([&]() -> absl::Status {
    DDP_ASSIGN_OR_RETURN(group->collectives_, MakeComm(group->world_ranks_));
    DDP_RETURN_IF_ERROR(
        MpiStatus(MPI_Comm_dup(group->collectives_, &group->messages_), "MPI_Comm_dup"));
    return absl::OkStatus();
  }));
  return group;
}

std::shared_ptr<MpiGroup> MpiGroup::World(Runtime& runtime) {
  std::shared_ptr<MpiGroup> group(new MpiGroup(runtime));
  group->rank_ = runtime.world_rank();
  group->world_ranks_.resize(runtime.world_size());
  std::iota(group->world_ranks_.begin(), group->world_ranks_.end(), 0);
  group->max_tag_ = runtime.max_tag();
  group->collectives_ = group->messages_ = MPI_COMM_WORLD;
  return group;
}

MpiGroup::~MpiGroup() {
  if (collectives_ == MPI_COMM_WORLD) return;
  // The last reference may be released by any thread.
  runtime_.Post([collectives = collectives_, messages = messages_]() mutable {
    if (collectives != MPI_COMM_NULL) MPI_Comm_free(&collectives);
    if (messages != MPI_COMM_NULL) MPI_Comm_free(&messages);
  });
}

void MpiGroup::Submit(Operation operation) {
  runtime_.Post([self = shared_from_this(), operation = std::move(operation)]() mutable {
    self->Begin(std::move(operation));
  });
}

void MpiGroup::SetFailureCode(absl::StatusCode code) {
  absl::StatusCode none = absl::StatusCode::kOk;
  failure_code_.compare_exchange_strong(none, code);
}

void MpiGroup::Abort(const absl::Status& why) {
  SetFailureCode(why.code());
  runtime_.Post([self = shared_from_this(), why] { self->Break(why); });
}

void MpiGroup::Begin(Operation operation) {
  if (!broken_.ok()) {
    operation.done(broken_, /*source=*/-1);
    return;
  }
  if (operation.is_collective && busy_) {
    queued_collectives_.push_back(std::move(operation));
    return;
  }
  if (operation.is_collective) busy_ = true;
  runtime_.Launch(shared_from_this(), std::move(operation));
}

void MpiGroup::Finish(Operation& operation, const absl::Status& status, int source) {
  if (!status.ok()) {
    const absl::Status failure =
        Annotate(status, absl::StrCat(NameOf(rank_), ": ", operation.describe()));
    SetFailureCode(failure.code());
    operation.done(failure, source);
    Break(absl::Status(failure.code(),
                       absl::StrCat("the group is broken since: ", failure.message())));
    return;
  }
  if (operation.is_collective) {
    busy_ = false;
    if (!queued_collectives_.empty()) {
      Operation next = std::move(queued_collectives_.front());
      queued_collectives_.pop_front();
      Begin(std::move(next));
    }
  }
  operation.done(status, source);
}

void MpiGroup::Break(const absl::Status& why) {
  if (broken_.ok()) broken_ = why;
  for (const std::unique_ptr<Runtime::Running>& running : runtime_.running_) {
    if (running->group.get() != this || running->reported) continue;
    Runtime::Abandon(*running);
    running->operation.done(broken_, /*source=*/-1);
  }
  for (std::deque<Operation> queued = std::move(queued_collectives_);
       Operation & operation : queued) {
    operation.done(broken_, /*source=*/-1);
  }
  queued_collectives_.clear();
}

int MpiGroup::NextTag(size_t signature) {
  const size_t mixed = (signature + ++started_) * 0x9e3779b97f4a7c15u;
  return static_cast<int>((mixed >> 32) % (static_cast<size_t>(max_tag_) + 1));
}

std::string MpiGroup::NameOf(int rank) const {
  const int world_rank = world_ranks_[rank];
  return world_rank == rank ? absl::StrCat("rank ", rank)
                            : absl::StrCat("rank ", rank, " (", world_rank, " of the job)");
}

}  // namespace ddp::backends::mpi
