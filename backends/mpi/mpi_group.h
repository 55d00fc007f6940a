// A group of MPI processes: two communicators (collectives and messages), and the operations on
// them.
//
//   DDP_ASSIGN_OR_RETURN(std::shared_ptr<MpiGroup> group, MpiGroup::Create(*runtime, {0, 2, 5}));
//   group->Submit({.body = [](Channel& channel) { return Barrier(channel); }, …});
#pragma once

#include <mpi.h>

#include <atomic>
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

// Thread-safe. Pending operations keep their group alive; the communicators are freed after the
// last of them.
//
// If an operation fails, the group is broken: pending and later operations fail with the same
// error, because the ranks no longer agree on the next operation. Another group of the same ranks
// can be made as long as all of them are alive.
class MpiGroup : public std::enable_shared_from_this<MpiGroup> {
 public:
  // Collective over `world_ranks`: distinct ranks of MPI_COMM_WORLD, this process among them, in
  // the order of their ranks in the group. Blocks the progress thread until all have called. So the
  // caller must know that all will call, and groups with common ranks must be made in the same
  // order on all of them. No timeout.
  static absl::StatusOr<std::shared_ptr<MpiGroup>> Create(Runtime& runtime,
                                                          std::vector<int> world_ranks);
  // All processes of the job, over MPI_COMM_WORLD. Not collective.
  static std::shared_ptr<MpiGroup> World(Runtime& runtime);
  ~MpiGroup();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(world_ranks_.size()); }
  const std::vector<int>& world_ranks() const { return world_ranks_; }
  // "rank 3", with its rank in the job if that differs: "rank 3 (5 of the job)".
  std::string NameOf(int rank) const;
  Runtime& runtime() const { return runtime_; }
  // The largest tag of a message that MPI supports.
  int max_tag() const { return max_tag_; }

  // Does not block. `operation.done` is called once, on success and on failure.
  void Submit(Operation operation);
  // Fails all pending and later operations on this rank with `why`. Does not block. Other ranks are
  // not notified.
  void Abort(const absl::Status& why);
  // The code of the failure that broke the group; kOk before.
  absl::StatusCode failure_code() const { return failure_code_; }

 private:
  friend class Runtime;

  explicit MpiGroup(Runtime& runtime) : runtime_(runtime) {}

  // Any thread. The first failure counts.
  void SetFailureCode(absl::StatusCode code);

  // These run on the progress thread only.
  void Begin(Operation operation);
  void Finish(Operation& operation, const absl::Status& status, int source);
  void Break(const absl::Status& why);
  int NextTag(size_t signature);

  Runtime& runtime_;
  int rank_ = 0;
  std::vector<int> world_ranks_;
  int max_tag_ = 0;
  std::atomic<absl::StatusCode> failure_code_{absl::StatusCode::kOk};

  // Progress thread only.
  MPI_Comm collectives_ = MPI_COMM_NULL;
  MPI_Comm messages_ = MPI_COMM_NULL;
  uint32_t started_ = 0;  // number of collectives started
  bool busy_ = false;     // whether a collective is running
  std::deque<Operation> queued_collectives_;
  absl::Status broken_;
  Channel::Memory scratch_;
};

}  // namespace ddp::backends::mpi
