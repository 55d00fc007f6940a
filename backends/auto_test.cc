#include "backends/auto.h"

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "backends/backend.h"
#include "backends/common/host.h"
#include "backends/process_group.h"
#include "base/status.h"
#include "gtest/gtest.h"

namespace ddp::backends {
namespace {

absl::Status ValidateBackend(const std::string& backend) {
  GroupOptions options;
  options.backend = backend;
  return Validate(options);
}

// This test links gloo, and under the other names these: gloo, too, if it comes to work.
absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> CreateStandIn(const BackendOptions& options) {
  DDP_ASSIGN_OR_RETURN(BackendEntry gloo, BackendRegistry::Find("gloo"));
  return gloo.create(options);
}
const Registration<BackendRegistry> kShm("shm", BackendEntry{{"cpu"}, &CreateStandIn, nullptr});
const Registration<BackendRegistry> kMpi("mpi", BackendEntry{{"cpu"}, &CreateStandIn, nullptr});
const Registration<BackendRegistry> kMine("mine", BackendEntry{{"cuda"}, &CreateStandIn, nullptr});

TEST(ChooseBackendTest, ShmOnOneHostAndHierOnSeveral) {
  AutoChoice choice = ChooseBackend({{"a", "", ""}, {"a", "", ""}});
  EXPECT_EQ(choice.backend, "shm");
  EXPECT_EQ(choice.reason, "2 ranks on one host");
  choice = ChooseBackend({{"a", "", ""}, {"b", "", ""}, {"a", "", ""}});
  EXPECT_EQ(choice.backend, "hier");
  EXPECT_EQ(choice.reason, "3 ranks on 2 hosts");
}

TEST(ChooseBackendTest, GlooWithTheReasonWhereTheOneWantedCannotServe) {
  AutoChoice choice = ChooseBackend({{"a", "not linked", ""}, {"a", "not linked", ""}});
  EXPECT_EQ(choice.backend, "gloo");
  EXPECT_EQ(choice.reason, "2 ranks on one host; no shm: not linked");
  choice = ChooseBackend({{"a", "", ""}, {"b", "", "no memfd"}});
  EXPECT_EQ(choice.backend, "gloo");
  EXPECT_EQ(choice.reason, "2 ranks on 2 hosts; no hier on rank 1: no memfd");
  // What is missing and not wanted is no reason.
  EXPECT_EQ(ChooseBackend({{"a", "", "not linked"}}).backend, "shm");
}

TEST(ResolveAutoTest, LeavesOtherNamesAlone) {
  BackendSpec spec = {{"cpu", "gloo"}};
  EXPECT_EQ(ReportForAuto(spec), "");
  EXPECT_EQ(*ResolveAuto({"a", "a"}, {"", ""}, spec), "");
  EXPECT_EQ(spec, (BackendSpec{{"cpu", "gloo"}}));
}

TEST(ResolveAutoTest, ARankThatNamesItsBackendIsAnError) {
  BackendSpec spec = {{"cpu", std::string(kAuto)}};
  const absl::Status status = ResolveAuto({"a", "a"}, {ReportForAuto(spec), ""}, spec).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "backend=auto is not that of rank 1")) << status;
}

TEST(ResolveAutoTest, RanksOfThisProcessShareAHost) {
  BackendSpec spec = {{"cpu", std::string(kAuto)}, {"cuda", "nccl"}};
  const absl::StatusOr<std::string> choice =
      ResolveAuto(std::vector<std::string>(3, HostId()),
                  std::vector<std::string>(3, ReportForAuto(spec)), spec);
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(*choice, "shm (auto: 3 ranks on one host)");
  EXPECT_EQ(spec, (BackendSpec{{"cpu", "shm"}, {"cuda", "nccl"}}));
}

TEST(ValidateTest, ABackendIsHeldToTheDevicesItServes) {
  absl::Status status = ValidateBackend("cpu:mine");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "mine serves cuda tensors, not cpu")) << status;
}

TEST(ValidateTest, ABackendMustServeTheDeviceThatTheProgramComputesOn) {
  GroupOptions options;
  options.backend = "mpi";
  EXPECT_TRUE(Validate(options, "cpu").ok());
  const absl::Status status = Validate(options, "cuda");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "backend=mpi")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "cuda tensors")) << status;
  options.backend = "gloo";
  EXPECT_TRUE(Validate(options, "cuda").ok());
}

TEST(ValidateTest, AnInterfaceAndAHostNameAreOneTooMany) {
  GroupOptions options;
  options.backend = "gloo";
  options.interface = "lo";
  EXPECT_TRUE(Validate(options).ok()) << Validate(options);
  options.hostname = "localhost";
  const absl::Status status = Validate(options);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "interface=lo")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "hostname=localhost")) << status;
}

// c10d would take the first of them for both devices, and say nothing.
TEST(ValidateTest, TwoBackendsThatC10dCannotTellApartAreRefused) {
  absl::Status status = ValidateBackend("cpu:shm,cuda:mine");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "shm")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "mine")) << status;
  EXPECT_TRUE(ValidateBackend("cpu:mpi,cuda:mine").ok());
}

}  // namespace
}  // namespace ddp::backends
