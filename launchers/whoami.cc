// Prints, from each rank, the rank, world size and so on that our programs would detect, and why:
//
//   srun -N2 -n2 whoami
//   mpirun -np 2 whoami
//   whoami --nproc_per_node=2
#include <stdio.h>
#include <unistd.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/environment.h"
#include "base/option_flags.h"
#include "base/process.h"
#include "base/status.h"
#include "launchers/launcher.h"

namespace ddp::launchers {
namespace {

// Prints with a single write, so that lines of several ranks do not mix.
void Print(const Rank& rank, const std::string& reason) {
  const std::string line =
      absl::StrCat("rank ", rank.rank, "/", rank.world_size, " local ", rank.local_rank, "/",
                   rank.local_world_size, " node ", rank.node_rank, " master ", rank.master_addr,
                   ":", rank.master_port, rank.master_is_external ? " (external)" : "",
                   rank.master_listen_fd ? absl::StrCat(" (fd ", *rank.master_listen_fd, ")") : "",
                   " restart ", rank.restart_count, " run ", rank.run_id, " [", reason, "]\n");
  [[maybe_unused]] ssize_t written = write(STDOUT_FILENO, line.data(), line.size());
}

struct Options {
  LaunchOptions launcher;
};
constexpr auto OptionsOf(const Options&) {
  return ddp::Options(Nested("launcher", &Options::launcher, "how the ranks are started"));
}

absl::StatusOr<int> Run(LaunchOptions options, int argc, char** argv) {
  DDP_ASSIGN_OR_RETURN(Choice choice, Choose(options, Environment::FromProcess()));
  if (choice.rank) {
    Print(*choice.rank, choice.reason);
    return 0;
  }
  options.argv.assign(argv, argv + argc);
  options.argv[0] = ExecutablePath();
  DDP_ASSIGN_OR_RETURN(LaunchResult result, choice.launcher->Launch(options));
  if (!result.description.empty()) fprintf(stderr, "whoami: %s\n", result.description.c_str());
  return result.exit_code;
}

int Main(int argc, char** argv) {
  Options options;
  const OptionList list = ListOptions(options);
  const absl::StatusOr<OptionFlags> flags = OptionFlags::Parse(argc, argv, list);
  if (!flags.ok()) {
    fprintf(stderr, "whoami: %s\n", std::string(flags.status().message()).c_str());
    return 2;
  }
  if (flags->help) {
    printf("whoami prints this process's place in its job.\n\n%s", list.Describe("--").c_str());
    return 0;
  }
  const absl::StatusOr<int> code = Run(options.launcher, argc, argv);
  if (code.ok()) return *code;
  fprintf(stderr, "whoami: %s\n", flags->Explain(code.status(), list).c_str());
  return 1;
}

}  // namespace
}  // namespace ddp::launchers

int main(int argc, char** argv) { return ddp::launchers::Main(argc, argv); }
