// Starts ranks on this machine that sum up their rank numbers:
//   sum_ranks --nproc_per_node=3      prints "rank 0 of 3: sum 3" and the like
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/status/statusor.h"
#include "backends/process_group.h"
#include "base/environment.h"
#include "launchers/launcher.h"

ABSL_FLAG(std::optional<int>, nproc_per_node, std::nullopt, "ranks to start on this machine");

namespace {

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "sum_ranks: %s\n", status.ToString().c_str());
  return 1;
}

int RunRank(const ddp::launchers::Rank& rank) {
  auto group = ddp::backends::CreateProcessGroup(rank, {.backend = "gloo"});
  if (!group.ok()) return Fail(group.status());
  std::vector<at::Tensor> sum = {at::full({1}, rank.rank)};
  group->process_group->allreduce(sum)->wait();
  std::printf("rank %d of %d: sum %d\n", rank.rank, rank.world_size, sum[0].item<int>());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  ddp::launchers::LaunchOptions options = {.name = "local", .default_nproc_per_node = 2};
  options.nproc_per_node = absl::GetFlag(FLAGS_nproc_per_node);
  auto choice = ddp::launchers::Choose(options, ddp::Environment::FromProcess());
  if (!choice.ok()) return Fail(choice.status());
  if (choice->rank) return RunRank(*choice->rank);

  options.argv.assign(argv, argv + argc);
  options.argv[0] = std::filesystem::read_symlink("/proc/self/exe");
  auto result = choice->launcher->Launch(options);
  if (!result.ok()) return Fail(result.status());
  return result->exit_code;
}
