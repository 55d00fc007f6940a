// A launcher knows one way in which the ranks of a job come to life: it recognises the environment
// that such a job's processes see, and, where it is able to, starts the processes itself.
//
//   DDP_ASSIGN_OR_RETURN(Choice choice, Choose(options, Environment::FromProcess()));
//   if (choice.rank) return RunAs(*choice.rank);          // this process is a rank
//   return choice.launcher->Launch(options);              // it starts the ranks, or submits them
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/environment.h"
#include "base/implementation_options.h"
#include "base/options.h"
#include "base/registry.h"
#include "launchers/rank.h"

namespace ddp::launchers {

class Launcher;

// Where `auto` asks a launcher: one that starts ranks asks for its own children first; the rest
// from the most specific environment to the least. README.md has the reasons.
enum DetectOrder {
  kDetectOwnChildren = 0,
  kDetectOthers = 10,  // a launcher of another repository, whose authors know their system
  kDetectTorchrun = 20,
  kDetectMpi = 30,
  kDetectSlurm = 40,
};

struct LauncherEntry {
  std::unique_ptr<Launcher> (*create)() = nullptr;
  // &AnyOptions::Of<…> for options of this launcher alone, "launcher.NAME.…"; null: it has none.
  AnyOptions (*options)() = nullptr;
  int detect_order = kDetectOthers;
  // `auto` starts ranks with it where no launcher recognises the environment. At most one has it.
  bool starts_by_default = false;
};

struct LauncherTag {
  static constexpr absl::string_view kWhat = "launcher";
};
using LauncherRegistry = Registry<LauncherEntry, LauncherTag>;

// "auto" and the names of the launchers that are linked in.
std::vector<std::string> LauncherNames();

// What to start, and how. What every launcher that starts ranks needs; what one alone needs is in
// `implementations`.
struct LaunchOptions {
  std::string name = "auto";
  int nnodes = 1;
  // Unset: what the environment says of a job that runs already, or default_nproc_per_node.
  std::optional<int> nproc_per_node = std::nullopt;
  // Between SIGTERM and SIGKILL of the other ranks once one has failed.
  absl::Duration grace = absl::Seconds(3);
  // How often all ranks are started anew after one has failed; TORCHELASTIC_RESTART_COUNT counts.
  int max_restarts = 0;
  ImplementationOptions implementations = ImplementationOptions::From<LauncherRegistry>();

  // From the program, not from its user.
  int default_nproc_per_node = 1;
  std::vector<std::string> argv = {};                   // program (a path) and its arguments
  std::map<std::string, std::string> environment = {};  // added to this process's own

  int NprocPerNode() const { return nproc_per_node.value_or(default_nproc_per_node); }
};

constexpr auto OptionsOf(const LaunchOptions&) {
  return Options(
      Option("name", &LaunchOptions::name, "how ranks come to life").OneOfThese(&LauncherNames),
      Option("nnodes", &LaunchOptions::nnodes, "nodes to start ranks on").AtLeast(1).AtMost(1e6),
      Option("nproc_per_node", &LaunchOptions::nproc_per_node,
             "ranks on each node; auto: what the launcher's environment says, or the program's "
             "default")
          .AtLeast(1)
          .AtMost(1e6),
      Option("grace_s", &LaunchOptions::grace,
             "time between SIGTERM and SIGKILL of the other ranks once one has failed")
          .AtLeast(0)
          .AtMost(1e7),
      Option("max_restarts", &LaunchOptions::max_restarts,
             "how often all ranks are started anew after one has failed")
          .AtLeast(0)
          .AtMost(1e6),
      Inline(&LaunchOptions::implementations));
}

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

  // Whether the ranks that Launch starts run on this machine: then what they need (devices,
  // backends) can be checked before they are started.
  virtual bool StartsRanksHere() const { return false; }

  // Whether Launch with these options would start one rank that may as well be this process.
  virtual bool RunsInProcess(const LaunchOptions&) const { return false; }

  // Starts the ranks, waits for all of them and reports. Blocks. Unimplemented, saying which
  // command starts such a job, for launchers whose system starts the ranks itself (the default).
  virtual absl::StatusOr<LaunchResult> Launch(const LaunchOptions& options);

  // The variables Detect looks at, for messages.
  virtual std::vector<std::string> Variables() const = 0;

  // A command line that starts such a job, for messages.
  virtual std::string HowToStart() const = 0;
};

// NotFound, listing what is linked in, for an unknown name.
absl::StatusOr<std::unique_ptr<Launcher>> CreateLauncher(absl::string_view name);

// What the options and the environment amount to: the role of this process.
struct Choice {
  std::unique_ptr<Launcher> launcher;
  std::optional<Rank> rank;  // set: this process is that rank. Unset: call launcher->Launch
  std::string reason;        // one line: what was seen and what was chosen
  // Whether to print `reason`: once per job. The process that starts the ranks does it for them.
  bool announce = false;
};

// options.name is a launcher's name or "auto", which takes the most specific launcher that
// recognises `env` (launchers/README.md has the order and why), and the default one if none does.
// options.nproc_per_node, where it is set, must agree with the environment's LOCAL_WORLD_SIZE.
//
// Where no job is in `env`: a launcher that would start one rank in this process makes it rank 0 of
// a world of one; otherwise the choice has no rank, and the caller calls Launch.
//
// OptionError: options out of range; a launcher that starts no ranks and whose variables are absent
// (says how to start such a job); one that does, inside a rank of a larger job. InvalidArgument:
// half set or contradicting variables. NotFound: no such launcher (lists those there are).
absl::StatusOr<Choice> Choose(const LaunchOptions& options, const Environment& env);

}  // namespace ddp::launchers
