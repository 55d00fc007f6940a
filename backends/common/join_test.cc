#include "backends/common/join.h"

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/time/time.h"
#include "base/threads_testing.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"

namespace ddp::backends {
namespace {

TEST(WaitForAllRanksTest, EndsWhenAllHaveCome) {
  c10d::HashStore store;
  RunThreads(3, [&store](int rank) {
    EXPECT_EQ(WaitForAllRanks(store, rank, 3, absl::Minutes(1)), absl::OkStatus());
  });
}

TEST(WaitForAllRanksTest, NamesTheRanksThatDoNotCome) {
  c10d::HashStore store;
  absl::Status status = WaitForAllRanks(store, 1, 3, absl::Milliseconds(50));
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "Timed out after 50ms: rank 1 waited")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "never came: rank 0, 2")) << status;
}

}  // namespace
}  // namespace ddp::backends
