#include "launchers/threads.h"

#include <algorithm>
#include <climits>
#include <optional>
#include <thread>

#include "absl/status/statusor.h"
#include "base/cores.h"
#include "launchers/detect.h"

namespace ddp::launchers {
namespace {

// SLURM's --cpus-per-task, if this process is a task or in the shell of a job's only one. Does not
// judge variables that make no sense: Detect does.
int CoresPerTask(const Environment& env) {
  const absl::StatusOr<std::optional<int>> cores = FirstInt(env, {"SLURM_CPUS_PER_TASK"});
  if (!cores.ok() || cores->value_or(0) == 0) return INT_MAX;
  if (!env.Has("SLURM_STEP_NUM_TASKS")) {
    const absl::StatusOr<std::optional<int>> tasks =
        FirstInt(env, {"SLURM_NTASKS", "SLURM_NPROCS"});
    if (!tasks.ok() || tasks->value_or(1) > 1) return INT_MAX;
  }
  return **cores;
}

}  // namespace

int CoresOfTask(const Environment& env, absl::string_view root) {
  return std::min(AvailableCores(root), CoresPerTask(env));
}

int ThreadsOfRank(const Rank& rank, const Environment& env) {
  const bool bound = BoundCores() < static_cast<int>(std::thread::hardware_concurrency());
  const int share = bound ? AvailableCores() : AvailableCores() / rank.local_world_size;
  return std::max(1, std::min(share, CoresPerTask(env)));
}

}  // namespace ddp::launchers
