#include "launchers/launcher.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/option_error.h"
#include "base/status.h"
#include "launchers/detect.h"
#include "launchers/threads.h"

namespace ddp::launchers {
namespace {

constexpr absl::string_view kAuto = "auto";

// Launchers in the order in which `auto` asks them.
std::vector<std::string> Order() {
  std::vector<std::string> names = LauncherRegistry::Names();
  const auto order = [](const std::string& name) {
    return LauncherRegistry::All().at(name).detect_order;
  };
  std::stable_sort(names.begin(), names.end(),
                   [&](const std::string& a, const std::string& b) { return order(a) < order(b); });
  return names;
}

absl::StatusOr<std::string> DefaultLauncher() {
  for (const auto& [name, entry] : LauncherRegistry::All()) {
    if (entry.starts_by_default) return name;
  }
  return OptionError(
      "launcher", kAuto,
      absl::StrCat("finds no job in this process's environment, and no launcher that starts ranks "
                   "is linked into this program; linked: ",
                   absl::StrJoin(LauncherRegistry::Names(), ", ")),
      absl::StatusCode::kFailedPrecondition);
}

std::string Place(const Rank& rank) {
  return absl::StrCat("rank ", rank.rank, " of ", rank.world_size);
}

// The error if a launcher that cannot start ranks was named and this process is not one of its
// ranks.
absl::Status NotStartedByError(const Launcher& launcher, const Environment& env) {
  std::string others;
  for (const std::string& name : Order()) {
    absl::StatusOr<std::unique_ptr<Launcher>> other = CreateLauncher(name);
    if (!other.ok()) continue;
    absl::StatusOr<std::optional<Rank>> rank = (*other)->Detect(env);
    if (rank.ok() && *rank) {
      absl::StrAppend(&others, "; this is ", Place(**rank), " of launcher '", name, "'");
    }
  }
  return OptionError(
      "launcher", launcher.name(),
      absl::StrCat("did not start this process (set: ", env.Describe(launcher.Variables()), ")",
                   others, "; start such a job with: ", launcher.HowToStart()));
}

// Refuses to start ranks inside each rank of a larger job, with a launcher that was named.
absl::Status CheckNoLargerJob(absl::string_view name, const Environment& env) {
  for (const std::string& candidate : Order()) {
    DDP_ASSIGN_OR_RETURN(std::unique_ptr<Launcher> other, CreateLauncher(candidate));
    absl::StatusOr<std::optional<Rank>> rank = other->Detect(env);
    // Incomplete variables do no harm: the new ranks get all of them.
    if (!rank.ok() || !*rank || (*rank)->world_size == 1) continue;
    return OptionError(
        "launcher", name,
        absl::StrCat("would start ranks inside ", Place(**rank), " of a job of launcher '",
                     candidate, "' (set: ", env.Describe(other->Variables()),
                     "); leave the option out to join that job, or unset these variables"));
  }
  return absl::OkStatus();
}

// `rank` is of a running job, whose size the options cannot change.
absl::Status CheckAgrees(const Launcher& launcher, const Rank& rank, const LaunchOptions& options,
                         const Environment& env) {
  // A job of one process is an interactive shell or a pod as often as not.
  const absl::string_view remedy =
      rank.world_size == 1
          ? "); leave the option out to be that one rank, or start ranks in it with launcher=local"
          : "); leave the option out: ranks are started already";
  const auto error = [&](absl::string_view option, int value, absl::string_view size) {
    return OptionError(
        option, absl::StrCat(value),
        absl::StrCat("disagrees with the environment, where launcher '", launcher.name(), "' has ",
                     size, " (set: ", env.Describe(launcher.Variables()), remedy));
  };
  const bool is_known = rank.local_world_size_is_known;
  const int most = is_known ? rank.local_world_size : rank.world_size;
  if (options.nproc_per_node &&
      (*options.nproc_per_node < rank.local_world_size || *options.nproc_per_node > most)) {
    return error("nproc_per_node", *options.nproc_per_node,
                 is_known ? absl::StrCat("LOCAL_WORLD_SIZE ", rank.local_world_size)
                          : absl::StrCat("LOCAL_RANK ", rank.local_rank, " and WORLD_SIZE ", most));
  }
  // Each other node has at least one rank; launchers tell no more about them. 1 fits any job.
  if (options.Nnodes() - 1 > rank.world_size - rank.local_world_size) {
    return error("nnodes", options.Nnodes(),
                 absl::StrCat("WORLD_SIZE ", rank.world_size, " and LOCAL_WORLD_SIZE ",
                              rank.local_world_size));
  }
  // Launchers that restart ranks run on the ranks' machine, and their ranks have the same options.
  if (options.max_restarts != 0 && !launcher.StartsRanksHere()) {
    return OptionError(
        "max_restarts", absl::StrCat(options.max_restarts),
        absl::StrCat(
            "has no effect on ranks that are started already, by launcher '", launcher.name(),
            "'; use what has started them: ", launcher.HowToStart(),
            rank.world_size == 1 ? "; or start ranks in this one with launcher=local" : ""));
  }
  return absl::OkStatus();
}

// Which job this is, and which of its lives: what SLURM says of it counts, too, whatever has
// started this process.
absl::Status ReadJob(const Launcher& launcher, const Environment& env, Rank& rank) {
  DDP_ASSIGN_OR_RETURN(const int requeues, RequeuesOfJob(env));
  rank.restart_count = std::max(rank.restart_count, requeues);
  rank.job = JobOf(env, rank.run_id);
  rank.job_is_shared = IsInSlurmJob(env) && launcher.CountsRestarts();
  return absl::OkStatus();
}

// The choice of launcher `name`; without a rank if it does not detect one.
absl::StatusOr<Choice> DetectWith(absl::string_view name, const LaunchOptions& options,
                                  const Environment& env) {
  Choice choice;
  DDP_ASSIGN_OR_RETURN(choice.launcher, CreateLauncher(name));
  absl::StatusOr<std::optional<Rank>> rank = choice.launcher->Detect(env);
  if (!rank.ok()) return Annotate(rank.status(), absl::StrCat("launcher '", name, "'"));
  choice.rank = *std::move(rank);
  choice.detected = choice.rank.has_value();
  if (!choice.detected) return choice;
  DDP_RETURN_IF_ERROR(Annotate(ReadJob(*choice.launcher, env, *choice.rank),
                               absl::StrCat("launcher '", name, "'")));
  DDP_RETURN_IF_ERROR(CheckAgrees(*choice.launcher, *choice.rank, options, env));
  choice.reason = absl::StrCat(name, ": ", Place(*choice.rank), ", from ",
                               env.Describe(choice.launcher->Variables()));
  // A process that started the ranks has announced the choice already; one that queued them did so
  // somewhere else.
  choice.announce =
      choice.rank->rank == 0 && (!choice.launcher->StartsRanks() || choice.launcher->Queues());
  return choice;
}

// Whether a word of nproc_per_node has a number where the ranks are to be started.
absl::Status CheckWord(const Launcher& launcher, const LaunchOptions& options) {
  const Nproc& nproc = options.nproc_per_node;
  if (!nproc.is_word()) return absl::OkStatus();
  if (!launcher.StartsRanksHere()) {
    return OptionError("nproc_per_node", FormatOption(nproc),
                       absl::StrCat("is counted on the machine that starts the ranks, which "
                                    "launcher '",
                                    launcher.name(), "' does elsewhere: give a number"));
  }
  if (nproc.kind() == Nproc::Kind::kGpu && options.default_nproc_here.value_or(0) == 0) {
    return OptionError("nproc_per_node", "gpu",
                       "finds no GPU that the ranks could use on this machine",
                       absl::StatusCode::kFailedPrecondition);
  }
  return absl::OkStatus();
}

// The choice if ranks are still to be started.
absl::StatusOr<Choice> StartRanks(absl::string_view name, const LaunchOptions& options,
                                  const Environment& env, absl::string_view why) {
  Choice choice;
  choice.announce = true;
  DDP_ASSIGN_OR_RETURN(choice.launcher, CreateLauncher(name));
  DDP_RETURN_IF_ERROR(CheckWord(*choice.launcher, options));
  if (choice.launcher->RunsInProcess(options)) {
    choice.rank = Rank();
    DDP_RETURN_IF_ERROR(ReadJob(*choice.launcher, env, *choice.rank));
    choice.reason = absl::StrCat(name, ": ", why, "; one rank, in this process");
  } else {
    choice.reason = absl::StrCat(name, ": ", why, "; this process ",
                                 choice.launcher->Queues() ? "submits a job" : "starts the ranks");
  }
  return choice;
}

}  // namespace

int LaunchOptions::NprocHere() const {
  switch (nproc_per_node.kind()) {
    case Nproc::Kind::kNumber:
      return *nproc_per_node;
    case Nproc::Kind::kCpu:
      return CoresOfTask(Environment::FromProcess());
    case Nproc::Kind::kAuto:
      return default_nproc_here.value_or(CoresOfTask(Environment::FromProcess()));
    case Nproc::Kind::kUnset:
    case Nproc::Kind::kGpu:
      break;
  }
  return default_nproc_here.value_or(default_nproc_per_node);
}

std::vector<std::string> LauncherNames() {
  std::vector<std::string> names = LauncherRegistry::Names();
  names.insert(names.begin(), std::string(kAuto));
  return names;
}

absl::StatusOr<LaunchResult> Launcher::Launch(const LaunchOptions&) {
  return absl::UnimplementedError(absl::StrCat(
      "launcher '", name(), "' starts no ranks itself; start such a job with: ", HowToStart()));
}

absl::StatusOr<std::vector<absl::Status>> Launcher::Submit(const std::vector<BatchJob>&, int,
                                                           const std::vector<std::string>&) {
  return absl::UnimplementedError(absl::StrCat("launcher '", name(), "' has no queue"));
}

absl::StatusOr<std::map<std::string, std::string>> Launcher::Unfinished(
    const std::vector<std::string>&) {
  return absl::UnimplementedError(absl::StrCat("launcher '", name(), "' has no queue"));
}

absl::Status Launcher::Interrupt(const LaunchOptions&, const std::vector<std::string>&) {
  return absl::UnimplementedError(absl::StrCat("launcher '", name(), "' has no queue"));
}

absl::StatusOr<std::unique_ptr<Launcher>> CreateLauncher(absl::string_view name) {
  DDP_ASSIGN_OR_RETURN(const LauncherEntry entry, LauncherRegistry::Find(name));
  return entry.create();
}

absl::StatusOr<Choice> Choose(const LaunchOptions& options, const Environment& env) {
  DDP_RETURN_IF_ERROR(ValidateOptions(options));
  if (options.name == kAuto) {
    for (const std::string& candidate : Order()) {
      DDP_ASSIGN_OR_RETURN(Choice choice, DetectWith(candidate, options, env));
      if (choice.rank) return choice;
    }
    DDP_ASSIGN_OR_RETURN(const std::string name, DefaultLauncher());
    return StartRanks(name, options, env, "no launcher's variables are set");
  }
  DDP_ASSIGN_OR_RETURN(Choice choice, DetectWith(options.name, options, env));
  if (choice.rank) return choice;
  if (!choice.launcher->StartsRanks()) return NotStartedByError(*choice.launcher, env);
  DDP_RETURN_IF_ERROR(CheckNoLargerJob(options.name, env));
  return StartRanks(options.name, options, env, "as requested");
}

}  // namespace ddp::launchers
