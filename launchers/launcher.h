// A launcher knows one way in which the ranks of a job come to life: it recognises the environment
// that such a job's processes see, and, where it is able to, starts the processes itself.
//
//   DDP_ASSIGN_OR_RETURN(std::unique_ptr<Launcher> launcher, CreateLauncher("slurm"));
//   DDP_ASSIGN_OR_RETURN(std::optional<Rank> rank, launcher->Detect(Environment::FromProcess()));
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/environment.h"
#include "base/registry.h"
#include "launchers/rank.h"

namespace ddp::launchers {

// What to start.
struct LaunchRequest {
  std::vector<std::string> argv;  // program (a path) and its arguments
  int nproc_per_node = 1;         // ranks to start on this machine, >= 1
  std::string master_addr = "127.0.0.1";
  int master_port = 0;  // 0: the launcher finds a free one
  // How long the others get between SIGTERM and SIGKILL once one rank has failed.
  absl::Duration grace = absl::Seconds(3);
};

// How a launched job ended.
struct LaunchResult {
  int exit_code = 0;  // 0 if every rank exited with 0; else that of the first failure (128+signal)
  int failed_rank = -1;     // the rank that failed first; -1 if none
  std::string description;  // "rank 1 (pid 77) was killed by signal 9 (Killed)"; empty if none
};

// Thread-compatible. Implementations hold no state but their options.
class Launcher {
 public:
  virtual ~Launcher() = default;

  virtual absl::string_view name() const = 0;

  // This process's place in a job, if `env` is that of a process this launcher's system started;
  // nullopt if nothing of it is there. InvalidArgument if variables are half set or contradict
  // each other: the message lists them.
  virtual absl::StatusOr<std::optional<Rank>> Detect(const Environment& env) const = 0;

  // Whether Launch is implemented.
  virtual bool StartsRanks() const { return false; }

  // Starts the ranks, waits for all of them and reports. Blocks. Unimplemented, saying which
  // command starts such a job, for launchers whose system starts the ranks itself (the default).
  virtual absl::StatusOr<LaunchResult> Launch(const LaunchRequest& request);

  // The variables Detect looks at, for messages.
  virtual std::vector<std::string> Variables() const = 0;

  // A command line that starts such a job, for messages.
  virtual std::string HowToStart() const = 0;
};

struct LauncherTag {
  static constexpr absl::string_view kWhat = "launcher";
};
using LauncherFactory = std::unique_ptr<Launcher> (*)();
using LauncherRegistry = Registry<LauncherFactory, LauncherTag>;

// NotFound, listing what is linked in, for an unknown name.
absl::StatusOr<std::unique_ptr<Launcher>> CreateLauncher(absl::string_view name);

// What --launcher=… and the environment amount to.
struct Choice {
  std::unique_ptr<Launcher> launcher;
  std::optional<Rank> rank;  // set: this process is that rank. Unset: call launcher->Launch
  std::string reason;        // one line: what was seen and what was chosen
};

// `name` is a launcher's name or "auto", which takes the most specific launcher that recognises
// `env` (launchers/README.md has the order and why), and `local` if none does. `nproc_per_node`,
// the flag of that name where the user gave it, must agree with the environment's LOCAL_WORLD_SIZE.
//
// With `local` and no job in `env`: nproc_per_node 1 is rank 0 of a world of one, in this process;
// otherwise the choice has no rank, and the caller launches that many, or its own default number.
//
// InvalidArgument: nproc_per_node < 1 or other than the environment's; a launcher that starts no
// ranks and whose variables are absent (says how to start such a job); one that does, inside a rank
// of a larger job; half set or contradicting variables. NotFound: no such launcher (lists those
// there are).
absl::StatusOr<Choice> Choose(absl::string_view name, std::optional<int> nproc_per_node,
                              const Environment& env);

}  // namespace ddp::launchers
