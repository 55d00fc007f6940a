// Each backend whose ranks can be threads waits for ranks that do not join as long as join_timeout
// says, and not as long as a collective may take.

#include <functional>
#include <future>
#include <string>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "backends/backend.h"
#include "backends/conformance/rank_threads.h"
#include "base/status.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"

namespace ddp::backends {
namespace {

class JoinTimeoutTest : public testing::TestWithParam<std::string> {};

TEST_P(JoinTimeoutTest, IsNotThatOfCollectives) {
  BackendOptions options;
  options.store = c10::make_intrusive<c10d::HashStore>();
  options.rank.world_size = 2;  // the other one never comes
  options.rank.local_world_size = 2;
  options.group.hostname = "127.0.0.1";
  options.group.timeout = absl::Hours(1);
  options.group.join_timeout = absl::Seconds(1);
  const absl::StatusOr<BackendEntry> entry = BackendRegistry::Find(GetParam());
  ASSERT_TRUE(entry.ok()) << entry.status();
  const absl::Time begin = absl::Now();
  const auto backend = entry->create(options);
  EXPECT_TRUE(absl::StrContains(backend.status().message(), "Timed out")) << backend.status();
  EXPECT_GE(absl::Now() - begin, absl::Milliseconds(900)) << backend.status();
  EXPECT_LT(absl::Now() - begin, absl::Minutes(5)) << backend.status();
}

// Rank 0 makes a group of all ranks from an existing one, and the others never do.
void ExpectJoinTimeout(const std::string& name, int size,
                       const std::function<void(c10d::Backend& backend)>& make_group) {
  const absl::StatusOr<BackendEntry> entry = BackendRegistry::Find(name);
  ASSERT_TRUE(entry.ok()) << entry.status();
  std::promise<void> ended;
  std::shared_future<void> end = ended.get_future();
  RunBackendThreads(
      size,
      [&](BackendOptions options) {
        options.group.hostname = "127.0.0.1";
        options.group.join_timeout = absl::Seconds(3);
        return entry->create(options);
      },
      [&](int rank, c10::intrusive_ptr<c10d::Backend>& backend) {
        if (rank != 0) return end.wait();
        const absl::Cleanup release = [&] { ended.set_value(); };
        const absl::Time begin = absl::Now();
        const absl::Status made = CatchStatus("", [&] { make_group(*backend); });
        EXPECT_FALSE(made.ok());
        EXPECT_TRUE(absl::StrContains(made.message(), "Timed out")) << made;
        EXPECT_TRUE(absl::StrContains(made.message(), "rank 1")) << made;
        EXPECT_GE(absl::Now() - begin, absl::Milliseconds(2900)) << made;
        EXPECT_LT(absl::Now() - begin, absl::Minutes(5)) << made;
      },
      /*timeout=*/absl::Hours(1));
}

TEST_P(JoinTimeoutTest, HoldsForSplit) {
  // Two ranks of hier would be one host, where it is shm, or one on each, where it is gloo.
  const std::vector<int> ranks =
      GetParam() == "hier_in_turns" ? std::vector<int>{0, 1, 2} : std::vector<int>{0, 1};
  ExpectJoinTimeout(GetParam(), static_cast<int>(ranks.size()), [&](c10d::Backend& backend) {
    backend.split(c10::make_intrusive<c10d::HashStore>(), ranks, backend.getBackendOptions());
  });
}

// Only gloo merges groups.
TEST(JoinTimeoutOfMergeTest, IsNotThatOfCollectives) {
  ExpectJoinTimeout("gloo", 2, [](c10d::Backend& backend) {
    backend.merge(c10::make_intrusive<c10d::HashStore>(), backend.getBackendOptions(), 0, 2);
  });
}

INSTANTIATE_TEST_SUITE_P(Over, JoinTimeoutTest, testing::Values("gloo", "hier_in_turns", "shm"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace ddp::backends
