// Some ranks of the job as MPI knows them: two communicators, and the operations on them.
//
//   DDP_ASSIGN_OR_RETURN(std::shared_ptr<MpiGroup> group, MpiGroup::Create(*runtime, {0, 2, 5}));
//   group->Submit({.body = [](Channel& channel) { return Barrier(channel); }, …});
#pragma once

#include <mpi.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "backends/mpi/operation.h"
#include "backends/mpi/runtime.h"

namespace ddp::backends::mpi {

// Thread safe. Operations keep their group alive; MPI's communicators go with the last of them.
//
// An operation that fails breaks its group: what is under way and what comes later fails with the
// same error, because ranks no longer agree on what comes next. Another group of the same ranks can
// be made as long as all of them live.
class MpiGroup : public std::enable_shared_from_this<MpiGroup> {
 public:
  // Collective over `world_ranks`, distinct ranks of MPI_COMM_WORLD with this process among them,
  // in the order of their ranks here. Blocks the progress thread until all have called: they must
  // be known to be there, and groups that have ranks in common be made in one order everywhere.
  static absl::StatusOr<std::shared_ptr<MpiGroup>> Create(Runtime& runtime,
                                                          std::vector<int> world_ranks);
  // All of the job. Not collective; for what comes before there is anything else.
  static std::shared_ptr<MpiGroup> World(Runtime& runtime);
  ~MpiGroup();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(world_ranks_.size()); }
  const std::vector<int>& world_ranks() const { return world_ranks_; }
  // "rank 3", with its number in the job where that is another.
  std::string NameOf(int rank) const;
  Runtime& runtime() const { return runtime_; }
  // Largest tag of a message.
  int max_tag() const { return max_tag_; }

  // `operation.done` is called when it is over, in whatever way.
  void Submit(Operation operation);
  // Fails everything that is under way, and all that comes later, with `why`.
  void Abort(const absl::Status& why);

 private:
  friend class Runtime;

  explicit MpiGroup(Runtime& runtime) : runtime_(runtime) {}

  // All of the following on the progress thread.
  void Begin(Operation operation);
  void Finish(Operation& operation, const absl::Status& status, int source);
  void Break(const absl::Status& why);
  int NextTag(size_t signature);
  Runtime& runtime_;
  int rank_ = 0;
  std::vector<int> world_ranks_;
  int max_tag_ = 0;

  // Progress thread only.
  MPI_Comm collectives_ = MPI_COMM_NULL;
  MPI_Comm messages_ = MPI_COMM_NULL;
  uint32_t started_ = 0;  // collectives so far
  bool busy_ = false;     // a collective is running
  std::deque<Operation> collectives_behind_;
  absl::Status broken_;
  Channel::Memory scratch_;
};

}  // namespace ddp::backends::mpi
