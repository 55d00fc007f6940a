// Each backend waits for ranks that do not join as long as join_timeout says, and not as long as a
// collective may take.

#include <string>

#include "absl/time/clock.h"
#include "backends/backend.h"
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
  EXPECT_FALSE(backend.ok());
  EXPECT_GE(absl::Now() - begin, absl::Milliseconds(900)) << backend.status();
  EXPECT_LT(absl::Now() - begin, absl::Minutes(5)) << backend.status();
}

INSTANTIATE_TEST_SUITE_P(Over, JoinTimeoutTest, testing::Values("gloo", "hier", "shm"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace ddp::backends
