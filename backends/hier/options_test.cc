// Options that depend on the parts' backends, and what hier tells about the parts.
#include "backends/hier/options.h"

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "backends/backend.h"
#include "backends/gloo/gloo.h"
#include "backends/hier/hier.h"
#include "backends/process_group.h"
#include "backends/rank_threads.h"
#include "base/backend_capabilities.h"
#include "base/option_error.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/types.h"

namespace ddp::backends::hier {
namespace {

// shm's receive takes only what has the size that it expects.
TEST(HierOptionsTest, PacksOnlyWhereShorterMessagesFit) {
  BackendOptions options;
  options.store = c10::make_intrusive<c10d::HashStore>();
  const absl::Status status =
      CreateHier(options, {.cross = "shm", .packing = Packing::kAlways}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "hier.packing=always")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "cross=shm, whose receives take no shorter"))
      << status;
}

// gloo under a name that hier does not know.
absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> CreateOther(const BackendOptions& options) {
  return gloo::CreateGloo(options, {});
}
const Registration<BackendRegistry> kOther("other",
                                           BackendEntry{
                                               .device_types = {"cpu"},
                                               .create = &CreateOther,
                                               .capabilities = {.shorter_messages_fit = true}});

TEST(HierOptionsTest, PackingDependsOnACapabilityAndNotOnAName) {
  const int64_t count = 100'003;
  RunBackendThreads(
      4,
      [](BackendOptions options) {
        options.group.hostname = "127.0.0.1";
        HierOptions hier;
        hier.cross = "other";
        hier.packing = Packing::kAlways;
        hier.host_id = absl::StrCat("host", options.rank.rank / 2);
        return CreateHier(options, hier);
      },
      [&](int rank, c10::intrusive_ptr<c10d::Backend>& backend) {
        std::vector<at::Tensor> tensors = {torch::full({count}, 1.5F * rank)};
        backend->allreduce(tensors, {})->wait();
        EXPECT_TRUE(tensors[0].equal(torch::full({count}, 9.F)));
      });
}

absl::Status ValidateWith(const HierOptions& hier) {
  GroupOptions options;
  options.backend = "hier";
  options.implementations.Mutable<HierOptions>("hier") = hier;
  return Validate(options);
}

TEST(HierOptionsTest, ImpossibleOnesAreRefusedBeforeRanksAreStarted) {
  EXPECT_EQ(ValidateWith({}), absl::OkStatus());
  const auto refused = [](const HierOptions& hier) -> std::string {
    const absl::Status status = ValidateWith(hier);
    const std::optional<OptionProblem> problem = ProblemOf(status);
    return problem ? absl::StrCat(problem->path, "=", problem->value) : status.ToString();
  };
  EXPECT_EQ(refused({.cross = "shm", .packing = Packing::kAlways}), "hier.packing=always");
  EXPECT_EQ(refused({.local = "hier"}), "hier.local=hier");
  EXPECT_EQ(refused({.cross = "hier"}), "hier.cross=hier");
}

// DistributedDataParallel sees the capabilities of the backend that serves it: shm's.
TEST(HierOptionsTest, OnOneHostItHasTheLocalBackendsCapabilities) {
  RunRankThreads(2, "hier", [](const launchers::Rank&, const Group& group) {
    const auto backend = group.process_group->getBackend(c10::kCPU);
    const auto* declares = dynamic_cast<const DeclaresCapabilities*>(backend.get());
    ASSERT_NE(declares, nullptr);
    EXPECT_TRUE(declares->capabilities().collectives_use_callers_cores);
  });
}

}  // namespace
}  // namespace ddp::backends::hier
