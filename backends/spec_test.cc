#include "backends/spec.h"

#include "absl/strings/match.h"
#include "backends/backend.h"
#include "base/option_error.h"
#include "gtest/gtest.h"

namespace ddp::backends {
namespace {

TEST(BackendRegistryTest, AllLinksWhatItPromises) {
  EXPECT_EQ(BackendRegistry::Names(),
            (std::vector<std::string>{"gloo", "hier", "mpi", "nccl", "shm"}));
}

TEST(ParseBackendSpecTest, BareNamesMeanTheDevicesTheyServe) {
  EXPECT_EQ(*ParseBackendSpec("gloo", "cpu"), (BackendSpec{{"cpu", "gloo"}}));
  EXPECT_EQ(*ParseBackendSpec("gloo", "cuda"), (BackendSpec{{"cpu", "gloo"}, {"cuda", "gloo"}}));
  EXPECT_EQ(*ParseBackendSpec("nccl", "cuda"), (BackendSpec{{"cuda", "nccl"}}));
  EXPECT_EQ(*ParseBackendSpec("nccl", "cpu"), (BackendSpec{{"cuda", "nccl"}}));
}

TEST(ParseBackendSpecTest, PairsBindOneByOne) {
  EXPECT_EQ(*ParseBackendSpec("cpu:gloo,cuda:nccl", "cuda"),
            (BackendSpec{{"cpu", "gloo"}, {"cuda", "nccl"}}));
}

TEST(ParseBackendSpecTest, AutoFollowsTheDevice) {
  EXPECT_EQ(*ParseBackendSpec("auto", "cpu"), (BackendSpec{{"cpu", "auto"}}));
  EXPECT_EQ(*ParseBackendSpec("auto", "cuda"), (BackendSpec{{"cpu", "auto"}, {"cuda", "nccl"}}));
}

TEST(ParseBackendSpecTest, MistakesNameTheValueAndWhatIsAllowed) {
  absl::Status unknown = ParseBackendSpec("glow", "cpu").status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(unknown.message(), "backend=glow is none of auto, gloo, hier, mpi, nccl, shm");
  for (const char* text : {"glow", "cpu:glow"}) {
    unknown = ParseBackendSpec(text, "cpu").status();
    EXPECT_TRUE(absl::StrContains(unknown.message(), "gloo, hier, mpi, nccl, shm")) << unknown;
    ASSERT_TRUE(ProblemOf(unknown)) << unknown;
    EXPECT_EQ(ProblemOf(unknown)->path, "backend");
    EXPECT_EQ(ProblemOf(unknown)->value, text);
  }
  for (const char* text :
       {"", "cpu:", "gloo,nccl", "tpu:gloo", "cpu:gloo,cpu:gloo", "cpu:gloo,", "cpu:nccl"}) {
    absl::Status status = ParseBackendSpec(text, "cpu").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_TRUE(absl::StrContains(status.message(), "cpu:gloo,cuda:nccl")) << status;
  }
}

}  // namespace
}  // namespace ddp::backends
