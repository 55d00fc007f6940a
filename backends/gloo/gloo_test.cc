#include "backends/gloo/gloo.h"

#include <signal.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/option_error.h"
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

  options.group.interface = "nosuch1";
  status = CreateGloo(options, {}).status();
  EXPECT_TRUE(absl::StrContains(status.message(), "nosuch1")) << status;
  ASSERT_TRUE(ProblemOf(status)) << status;
  EXPECT_EQ(ProblemOf(status)->path, "interface");
  EXPECT_EQ(ProblemOf(status)->value, "nosuch1");
}

TEST(GlooTest, TakesAListOfInterfacesAsPyTorchDoes) {
  BackendOptions options;
  options.store = c10::make_intrusive<c10d::HashStore>();
  for (const char* names : {"lo", "lo,lo", "lo, lo"}) {
    const auto backend = CreateGloo(options, {{"GLOO_SOCKET_IFNAME", names}});
    EXPECT_TRUE(backend.ok()) << names << ": " << backend.status();
  }
  for (const auto& [names, problem] : std::vector<std::pair<std::string, std::string>>{
           {"lo,nosuch0", "'nosuch0': "}, {"lo,", "a name between commas is missing"}}) {
    const absl::Status status = CreateGloo(options, {{"GLOO_SOCKET_IFNAME", names}}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(absl::StrContains(status.message(), absl::StrCat("GLOO_SOCKET_IFNAME=", names)))
        << status;
    EXPECT_TRUE(absl::StrContains(status.message(), problem)) << status;
  }
}

TEST(GlooTest, AHostNameThatIsNotOursIsNamed) {
  BackendOptions options;
  options.store = c10::make_intrusive<c10d::HashStore>();
  options.group.hostname = "nosuchhost.invalid";
  absl::Status status = CreateGloo(options, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(status.message(), "nosuchhost.invalid")) << status;
  ASSERT_TRUE(ProblemOf(status)) << status;
  EXPECT_EQ(ProblemOf(status)->path, "hostname");
}

// In the tests' sandbox there is no other network than loopback, whatever the machine has.
TEST(GlooTest, LoopbackForSeveralNodesIsRefusedWithTheVariableToSet) {
  BackendOptions options;
  options.store = c10::make_intrusive<c10d::HashStore>();
  options.rank.world_size = 2;
  options.rank.local_world_size = 1;
  absl::Status status = CreateGloo(options, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "GLOO_SOCKET_IFNAME")) << status;
}

TEST(GlooTest, AWriteToADeadPeerDoesNotEndTheProcess) {
  signal(SIGPIPE, SIG_DFL);
  BackendOptions options;
  options.store = c10::make_intrusive<c10d::HashStore>();
  ASSERT_TRUE(CreateGloo(options, {}).ok());
  EXPECT_EQ(signal(SIGPIPE, SIG_DFL), SIG_IGN);

  const auto own = [](int) {};
  signal(SIGPIPE, own);
  ASSERT_TRUE(CreateGloo(options, {}).ok());
  EXPECT_EQ(signal(SIGPIPE, SIG_DFL), static_cast<void (*)(int)>(own));
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
