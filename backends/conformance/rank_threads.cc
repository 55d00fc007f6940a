#include "backends/conformance/rank_threads.h"

#include <barrier>
#include <vector>

#include "absl/strings/str_cat.h"
#include "backends/backend.h"
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
  backend = watch::Watch(backend, c10::make_intrusive<c10d::PrefixStore>("watch", options.store),
                         {.stall = options.group.stall, .capabilities = entry.capabilities});
  Group group;
  group.store = options.store;
  group.process_group = c10::make_intrusive<c10d::ProcessGroup>(options.store, options.rank.rank,
                                                                options.rank.world_size);
  const auto type = TypeOf(name);
  group.process_group->setBackend(c10::kCPU, type, backend);
  group.process_group->setDefaultBackend(type);
  return group;
}

// Calls `rank_main` in a thread for each rank; an error of any rank fails the test. Each rank calls
// `all_joined` once, after its group has been created or could not be: a rank whose body does not
// communicate would otherwise end, and close connections, while another one is still connecting.
void RunRankMains(int world_size, absl::Duration timeout,
                  const std::function<absl::Status(const BackendOptions&,
                                                   std::barrier<>& all_joined)>& rank_main) {
  DisableUnsafeFlightRecorder();
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::barrier<> all_joined(world_size);
  std::vector<absl::Status> statuses(world_size);
  RunThreads(world_size, [&](int rank) {
    BackendOptions options;
    options.store = store;
    options.rank.rank = options.rank.local_rank = rank;
    options.rank.world_size = options.rank.local_world_size = world_size;
    options.group.timeout = timeout;
    statuses[rank] = rank_main(options, all_joined);
  });
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
}

std::string RankName(const BackendOptions& options) {
  return absl::StrCat("rank ", options.rank.rank);
}

}  // namespace

void RunRankThreads(
    int world_size, const std::string& backend,
    const std::function<void(const launchers::Rank& rank, const Group& group)>& body,
    absl::Duration timeout, absl::Duration stall) {
  RunRankMains(world_size, timeout, [&](BackendOptions options, std::barrier<>& all_joined) {
    options.group.stall = stall;
    const absl::StatusOr<Group> group = MakeGroup(backend, options);
    all_joined.arrive_and_wait();
    if (!group.ok()) return group.status();
    return CatchStatus(RankName(options), [&] { body(options.rank, *group); });
  });
}

void RunBackendThreads(
    int world_size,
    const std::function<absl::StatusOr<c10::intrusive_ptr<c10d::Backend>>(BackendOptions options)>&
        create,
    const std::function<void(int rank, c10::intrusive_ptr<c10d::Backend>& backend)>& body,
    absl::Duration timeout) {
  RunRankMains(world_size, timeout, [&](const BackendOptions& options, std::barrier<>& all_joined) {
    absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> backend = create(options);
    all_joined.arrive_and_wait();
    if (!backend.ok()) return backend.status();
    return CatchStatus(RankName(options), [&] { body(options.rank.rank, *backend); });
  });
}

}  // namespace ddp::backends
