#include "backends/gloo/gloo.h"

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"

namespace ddp::backends::gloo {
namespace {

TEST(GlooTest, AnUnknownInterfaceIsNamedWithWhereItCameFrom) {
  BackendOptions options;
  options.store = c10::make_intrusive<c10d::HashStore>();
  absl::Status status = CreateGloo(options, {{"GLOO_SOCKET_IFNAME", "nosuch0"}}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(status.message(), "nosuch0")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "GLOO_SOCKET_IFNAME")) << status;

  options.interface = "nosuch1";
  status = CreateGloo(options, {}).status();
  EXPECT_TRUE(absl::StrContains(status.message(), "nosuch1")) << status;
}

TEST(GlooTest, AWorldOfOneNeedsNoPeer) {
  BackendOptions options;
  options.store = c10::make_intrusive<c10d::HashStore>();
  auto backend = CreateGloo(options, {});
  ASSERT_TRUE(backend.ok()) << backend.status();
  EXPECT_EQ((*backend)->getSize(), 1);
}

}  // namespace
}  // namespace ddp::backends::gloo
