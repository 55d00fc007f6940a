// For the tests of ddp/ under mpirun: RunRanks runs its body once, as the rank that this process
// is, over a new process group of backend mpi.

#include <exception>

#include "backends/process_group.h"
#include "base/environment.h"
#include "ddp/nets_testing.h"
#include "gtest/gtest.h"
#include "launchers/launcher.h"

namespace ddp {
namespace {

launchers::Rank ThisRank() {
  auto launcher = launchers::CreateLauncher("mpi");
  auto detected = (*launcher)->Detect(Environment::FromProcess());
  EXPECT_TRUE(detected.ok()) << detected.status();
  return **detected;
}

void RunThisRank(int world_size, const RankBody& body) {
  static const auto* const self = new launchers::Rank(ThisRank());
  if (world_size == 1) return body(0, nullptr);
  if (world_size != self->world_size) GTEST_SKIP() << "needs " << world_size << " ranks";
  auto group = backends::CreateProcessGroup(*self, {.backend = "mpi"});
  ASSERT_TRUE(group.ok()) << group.status();
  try {
    body(self->rank, group->process_group);
  } catch (const std::exception& error) {
    ADD_FAILURE() << "rank " << self->rank << ": " << error.what();
  }
  // Rank 0 serves the store.
  group->process_group->barrier()->wait();
}

const bool kRegistered = [] {
  RankRunner() = &RunThisRank;
  return true;
}();

}  // namespace
}  // namespace ddp
