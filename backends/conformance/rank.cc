// The conformance suite by hand, and its long forms.
//
//   rank --backend=gloo                        # cases in threads, all world sizes
//   rank --backend=shm --full --shard=3/100    # a hundredth of the full product
//   rank --backend=shm --fuzz --seed=7 --steps=100000
//   rank --backend=shm --kills=1000 --max_detection_s=0.5
//   rank --backend=gloo --kills=1000 --max_detection_s=0.5 --separate_hosts
//   rank --backend=shm --huge
//   rank --backend=gloo --nproc=4              # ranks as processes of this machine
//   mpirun -n 4 rank --backend=mpi [--fuzz]    # or torchrun, srun: each process is a rank
//
// Exit status 0: no failure.

#include <cstdio>
#include <iostream>
#include <optional>
#include <string>

#include "ATen/Parallel.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_join.h"
#include "backends/conformance/kill.h"
#include "backends/conformance/runs.h"
#include "backends/conformance/traits.h"
#include "backends/process_group.h"
#include "base/environment.h"
#include "base/status.h"
#include "launchers/launcher.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"

ABSL_FLAG(std::string, backend, "gloo", "which backend");
ABSL_FLAG(bool, full, false, "the full product of all dimensions, not only all pairs");
ABSL_FLAG(bool, huge, false, "messages of more than 2^31 bytes; needs 17 GB of memory");
ABSL_FLAG(std::string, filter, "", "only cases whose names contain this");
ABSL_FLAG(std::string, shard, "0/1", "I/N: every N-th case, from the I-th on");
ABSL_FLAG(bool, fuzz, false, "random sequences from --seed, not cases");
ABSL_FLAG(uint64_t, seed, 1, "of --fuzz and --kills");
ABSL_FLAG(int64_t, steps, 10000, "collectives of --fuzz");
ABSL_FLAG(int, kills, 0, "kill so many ranks, and run nothing else");
ABSL_FLAG(bool, separate_hosts, false,
          "--kills: ranks run as different users, as on different hosts; needs root");
ABSL_FLAG(double, max_detection_s, 5,
          "--kills: maximum time until a survivor's call fails, in seconds");
ABSL_FLAG(int, nproc, 0, "start so many ranks as processes; 0: ranks are threads, or a launcher's");
ABSL_FLAG(double, timeout_s, 60, "of one collective");

namespace ddp::backends::conformance {
namespace {

constexpr int kUsageError = 2;

absl::StatusOr<RunOptions> Options() {
  RunOptions options;
  options.backend = absl::GetFlag(FLAGS_backend);
  options.full = absl::GetFlag(FLAGS_full);
  options.filter = absl::GetFlag(FLAGS_filter);
  options.seed = absl::GetFlag(FLAGS_seed);
  options.steps = absl::GetFlag(FLAGS_steps);
  const std::string shard = absl::GetFlag(FLAGS_shard);
  long long index = 0, count = 0;
  if (std::sscanf(shard.c_str(), "%lld/%lld", &index, &count) != 2 || index < 0 || index >= count) {
    return absl::InvalidArgumentError(
        absl::StrCat("--shard=", shard, " must be I/N with 0 <= I < N"));
  }
  options.shard = index;
  options.shards = count;
  return options;
}

absl::StatusOr<int> RunAsRank(const launchers::Rank& rank, const RunOptions& options) {
  const absl::Duration timeout = absl::Seconds(absl::GetFlag(FLAGS_timeout_s));
  BackendOptions backend_options;
  backend_options.rank = rank;
  backend_options.group.timeout = timeout;
  // Joins as any program does, then makes groups of its own over the same store.
  DDP_ASSIGN_OR_RETURN(const Group group,
                       CreateProcessGroup(rank, {.backend = options.backend, .timeout = timeout},
                                          std::string(TraitsOf(options.backend).device)));
  backend_options.store = group.store;
  if (group.store == nullptr) backend_options.store = c10::make_intrusive<c10d::HashStore>();
  DDP_ASSIGN_OR_RETURN(std::unique_ptr<Groups> groups,
                       Groups::Make(options.backend, backend_options));
  const int failures =
      absl::GetFlag(FLAGS_fuzz) ? FuzzRank(options, *groups) : RunCases(options, *groups);
  // Nobody leaves while others are at work.
  if (failures == 0) {
    DDP_RETURN_IF_ERROR(CatchStatus("", [&] { groups->world().barrier()->wait(); }));
  }
  return failures;
}

absl::StatusOr<int> Kill(const RunOptions& options) {
  const KillReport report =
      RunKills({.backend = options.backend,
                .kills = absl::GetFlag(FLAGS_kills),
                .seed = options.seed,
                .max_detection_time = absl::Seconds(absl::GetFlag(FLAGS_max_detection_s)),
                .separate_hosts = absl::GetFlag(FLAGS_separate_hosts)});
  for (const std::string& failure : report.failures) std::cout << "FAILED " << failure << "\n";
  std::cout << options.backend << ": " << Summary(report) << std::endl;
  return static_cast<int>(report.failures.size());
}

absl::StatusOr<int> Main(char** argv) {
  DDP_ASSIGN_OR_RETURN(RunOptions options, Options());
  if (absl::GetFlag(FLAGS_kills) > 0) return Kill(options);

  const int nproc = absl::GetFlag(FLAGS_nproc);
  DDP_ASSIGN_OR_RETURN(
      launchers::Choice choice,
      launchers::Choose({.nproc_per_node = nproc > 0 ? std::optional<int>(nproc) : std::nullopt},
                        Environment::FromProcess()));
  const bool as_processes = nproc == 1 || !TraitsOf(options.backend).threads_as_ranks;
  if (choice.rank && (choice.rank->world_size > 1 || as_processes)) {
    at::set_num_threads(1);
    return RunAsRank(*choice.rank, options);
  }
  if (nproc > 1) {
    launchers::LaunchOptions request;
    request.nproc_per_node = nproc;
    request.argv.push_back("/proc/self/exe");
    for (char** arg = argv + 1; *arg != nullptr; ++arg) request.argv.push_back(*arg);
    DDP_ASSIGN_OR_RETURN(launchers::LaunchResult result, choice.launcher->Launch(request));
    if (result.exit_code != 0) std::cout << "FAILED " << result.description << std::endl;
    return result.exit_code;
  }
  if (absl::GetFlag(FLAGS_huge)) return RunHugeInThreads(options);
  return absl::GetFlag(FLAGS_fuzz) ? FuzzInThreads(options) : RunCasesInThreads(options);
}

}  // namespace
}  // namespace ddp::backends::conformance

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("the conformance suite of the backends; see the head of rank.cc");
  absl::ParseCommandLine(argc, argv);
  const absl::StatusOr<int> failures = ddp::backends::conformance::Main(argv);
  if (!failures.ok()) {
    std::cerr << failures.status() << std::endl;
    return ddp::backends::conformance::kUsageError;
  }
  return *failures == 0 ? 0 : 1;
}
