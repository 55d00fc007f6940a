#include "backends/conformance/rank_threads.h"

#include <barrier>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "backends/backend.h"
#include "backends/watch/training_thread.h"
#include "backends/watch/watch.h"
#include "base/status.h"
#include "base/threads_testing.h"
#include "gtest/gtest.h"
#include "third_party/libtorch/compat.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"

namespace ddp::backends {
namespace {

absl::StatusOr<Group> MakeGroup(const std::string& name, const BackendOptions& options) {
  if (options.rank.world_size == 1) return Group{};
  DDP_ASSIGN_OR_RETURN(BackendEntry entry, BackendRegistry::Find(name));
  DDP_ASSIGN_OR_RETURN(c10::intrusive_ptr<c10d::Backend> backend, entry.create(options));
  Group group;
  group.training_thread = std::make_shared<watch::TrainingThread>();
  backend = watch::Watch(backend, c10::make_intrusive<c10d::PrefixStore>("watch", options.store),
                         {.stall = options.group.stall,
                          .capabilities = entry.capabilities,
                          .training_thread = group.training_thread});
  group.store = options.store;
  group.process_group = c10::make_intrusive<c10d::ProcessGroup>(options.store, options.rank.rank,
                                                                options.rank.world_size);
  const auto type = TypeOf(name);
  group.process_group->setBackend(c10::kCPU, type, backend);
  group.process_group->setDefaultBackend(type);
  return group;
}

// Creates a group and runs `body` with it, in a thread for each rank; an error of any rank fails
// the test. Bodies begin once every rank has its group, or could not make it: a rank whose body
// does not communicate would otherwise end, and close connections, while another one is still
// connecting.
template <typename T>
void RunAsRanks(int world_size, const GroupOptions& group_options,
                const std::function<absl::StatusOr<T>(const BackendOptions&)>& create,
                const std::function<void(const launchers::Rank& rank, T& group)>& body) {
  DisableUnsafeFlightRecorder();
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::barrier<> all_joined(world_size);
  std::vector<absl::Status> statuses(world_size);
  RunThreads(world_size, [&](int rank) {
    BackendOptions options;
    options.store = store;
    options.rank.rank = options.rank.local_rank = rank;
    options.rank.world_size = options.rank.local_world_size = world_size;
    options.group = group_options;
    absl::StatusOr<T> group = create(options);
    all_joined.arrive_and_wait();
    statuses[rank] = group.status();
    if (!group.ok()) return;
    statuses[rank] = CatchStatus(absl::StrCat("rank ", rank), [&] { body(options.rank, *group); });
  });
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
}

}  // namespace

void RunRankThreads(
    int world_size, const std::string& backend,
    const std::function<void(const launchers::Rank& rank, const Group& group)>& body,
    absl::Duration timeout, absl::Duration stall) {
  GroupOptions options;
  options.timeout = timeout;
  options.stall = stall;
  RunAsRanks<Group>(
      world_size, options,
      [&](const BackendOptions& of_rank) { return MakeGroup(backend, of_rank); }, body);
}

void RunBackendThreads(
    int world_size,
    const std::function<absl::StatusOr<c10::intrusive_ptr<c10d::Backend>>(BackendOptions options)>&
        create,
    const std::function<void(int rank, c10::intrusive_ptr<c10d::Backend>& backend)>& body,
    absl::Duration timeout) {
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  GroupOptions options;
  options.timeout = timeout;
  RunAsRanks<BackendPtr>(
      world_size, options, create,
      [&](const launchers::Rank& rank, BackendPtr& backend) { body(rank.rank, backend); });
}

}  // namespace ddp::backends
