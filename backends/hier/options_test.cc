// Options that depend on the parts' backends, and what hier tells about the parts.
#include "backends/hier/options.h"

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "backends/backend.h"
#include "backends/conformance/rank_threads.h"
#include "backends/hier/hier.h"
#include "backends/process_group.h"
#include "base/backend_capabilities.h"
#include "base/option_error.h"
#include "base/status.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroupGloo.hpp"
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

// Bytes that all ranks have sent over backend "other".
std::atomic<uint64_t> sent_bytes = 0;

class CountingGloo final : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int dst, int tag) override {
    for (const at::Tensor& tensor : tensors) sent_bytes += tensor.nbytes();
    return ProcessGroupGloo::send(tensors, dst, tag);
  }
};

// gloo under a name that hier does not know.
absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> CreateOther(const BackendOptions& options) {
  return CatchStatus("", [&]() -> c10::intrusive_ptr<c10d::Backend> {
    auto gloo =
        c10d::ProcessGroupGloo::Options::create(absl::ToChronoMilliseconds(options.group.timeout));
    gloo->devices = {c10d::ProcessGroupGloo::createDeviceForHostname(options.group.hostname)};
    return c10::make_intrusive<CountingGloo>(options.store, options.rank.rank,
                                             options.rank.world_size, gloo);
  });
}
const Registration<BackendRegistry> kOther("other",
                                           BackendEntry{
                                               .device_types = {"cpu"},
                                               .create = &CreateOther,
                                               .capabilities = {.shorter_messages_fit = true}});

TEST(HierOptionsTest, PackingDependsOnACapabilityAndNotOnAName) {
  const int64_t count = 100'003;
  const auto bytes_of = [count](Packing packing) {
    sent_bytes = 0;
    RunBackendThreads(
        4,
        [packing](BackendOptions options) {
          options.group.hostname = "127.0.0.1";
          HierOptions hier;
          hier.cross = "other";
          hier.packing = packing;
          hier.host_id = absl::StrCat("host", options.rank.rank / 2);
          return CreateHier(options, hier);
        },
        [count](int rank, c10::intrusive_ptr<c10d::Backend>& backend) {
          std::vector<at::Tensor> tensors = {torch::full({count}, 1.5F * rank)};
          backend->allreduce(tensors, {})->wait();
          EXPECT_TRUE(tensors[0].equal(torch::full({count}, 9.F)));
        });
    return sent_bytes.load();
  };
  EXPECT_LT(bytes_of(Packing::kAlways), bytes_of(Packing::kNever));
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
    const auto* declares = dynamic_cast<const CapabilityProvider*>(backend.get());
    ASSERT_NE(declares, nullptr);
    EXPECT_TRUE(declares->capabilities().collectives_use_callers_cores);
  });
}

}  // namespace
}  // namespace ddp::backends::hier
