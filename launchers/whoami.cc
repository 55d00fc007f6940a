// Prints, from each rank, one line that says what a program of ours would find out about its place
// in the job, and why:
//
//   srun -N2 -n2 whoami
//   mpirun -np 2 whoami
//   whoami --nproc_per_node=2
#include <stdio.h>
#include <unistd.h>

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "base/environment.h"
#include "base/status.h"
#include "launchers/launcher.h"

ABSL_FLAG(std::string, launcher, "auto", "auto, or a launcher's name: local, mpi, slurm, torchrun");
ABSL_FLAG(std::optional<int>, nproc_per_node, std::nullopt,
          "ranks to start on this machine, where no launcher has started them; 1 if not given");

namespace ddp::launchers {
namespace {

// One write, so that lines of several ranks do not mix.
void Print(const Rank& rank, const std::string& reason) {
  const std::string line =
      absl::StrCat("rank ", rank.rank, "/", rank.world_size, " local ", rank.local_rank, "/",
                   rank.local_world_size, " node ", rank.node_rank, " master ", rank.master_addr,
                   ":", rank.master_port, rank.master_is_external ? " (external)" : "",
                   rank.master_listen_fd ? absl::StrCat(" (fd ", *rank.master_listen_fd, ")") : "",
                   " restart ", rank.restart_count, " run ", rank.run_id, " [", reason, "]\n");
  [[maybe_unused]] ssize_t written = write(STDOUT_FILENO, line.data(), line.size());
}

absl::StatusOr<int> Run(int argc, char** argv) {
  const std::optional<int> nproc_per_node = absl::GetFlag(FLAGS_nproc_per_node);
  DDP_ASSIGN_OR_RETURN(Choice choice, Choose(absl::GetFlag(FLAGS_launcher), nproc_per_node,
                                             Environment::FromProcess()));
  if (choice.rank) {
    Print(*choice.rank, choice.reason);
    return 0;
  }
  LaunchRequest request;
  request.argv.assign(argv, argv + argc);
  request.argv[0] = std::filesystem::read_symlink("/proc/self/exe");
  request.nproc_per_node = nproc_per_node.value_or(1);
  DDP_ASSIGN_OR_RETURN(LaunchResult result, choice.launcher->Launch(request));
  if (!result.description.empty()) fprintf(stderr, "whoami: %s\n", result.description.c_str());
  return result.exit_code;
}

}  // namespace
}  // namespace ddp::launchers

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("prints this process's place in its job");
  absl::ParseCommandLine(argc, argv);
  absl::StatusOr<int> code = ddp::launchers::Run(argc, argv);
  if (code.ok()) return *code;
  fprintf(stderr, "whoami: %s\n", std::string(code.status().message()).c_str());
  return 1;
}
