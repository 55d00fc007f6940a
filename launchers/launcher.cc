#include "launchers/launcher.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace ddp::launchers {
namespace {

constexpr absl::string_view kLocal = "local";

// Launchers in the order in which `auto` asks them. Those that are none of ours come right after
// our own children: whoever registers one knows their system better than we do.
std::vector<std::string> Order() {
  const std::vector<std::string> ours = {"torchrun", "mpi", "slurm"};
  std::vector<std::string> names = LauncherRegistry::Names();
  auto place = [&](const std::string& name) {
    if (name == kLocal) return -1;
    const auto it = std::find(ours.begin(), ours.end(), name);
    return it == ours.end() ? 0 : static_cast<int>(it - ours.begin()) + 1;
  };
  std::stable_sort(names.begin(), names.end(),
                   [&](const std::string& a, const std::string& b) { return place(a) < place(b); });
  return names;
}

std::string Place(const Rank& rank) {
  return absl::StrCat("rank ", rank.rank, " of ", rank.world_size);
}

// A launcher that starts no ranks was asked for by name, and this is none of its processes.
absl::Status Absent(const Launcher& launcher, const Environment& env) {
  std::string others;
  for (const std::string& name : Order()) {
    absl::StatusOr<std::unique_ptr<Launcher>> other = CreateLauncher(name);
    if (!other.ok()) continue;
    absl::StatusOr<std::optional<Rank>> rank = (*other)->Detect(env);
    if (rank.ok() && *rank) {
      absl::StrAppend(&others, "; this is ", Place(**rank), " of launcher '", name, "'");
    }
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "--launcher=", launcher.name(),
      ": this process was not started by it (set: ", env.Describe(launcher.Variables()), ")",
      others, "; start such a job with: ", launcher.HowToStart()));
}

// A launcher that starts ranks was asked for by name. Starting some inside each rank of a larger
// job is never meant.
absl::Status CheckNoLargerJob(absl::string_view name, const Environment& env) {
  for (const std::string& candidate : Order()) {
    DDP_ASSIGN_OR_RETURN(std::unique_ptr<Launcher> other, CreateLauncher(candidate));
    absl::StatusOr<std::optional<Rank>> rank = other->Detect(env);
    // Half set variables do no harm: the new ranks get all of them anew.
    if (!rank.ok() || !*rank || (*rank)->world_size == 1) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "--launcher=", name, " would start ranks inside ", Place(**rank), " of a job of launcher '",
        candidate, "' (set: ", env.Describe(other->Variables()),
        "); leave --launcher out to join that job, or unset these variables"));
  }
  return absl::OkStatus();
}

absl::Status CheckAgrees(const Launcher& launcher, const Rank& rank, int nproc_per_node,
                         const Environment& env) {
  if (rank.local_world_size == nproc_per_node) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--nproc_per_node=", nproc_per_node, " disagrees with the environment, where launcher '",
      launcher.name(), "' has LOCAL_WORLD_SIZE ", rank.local_world_size, " (set: ",
      env.Describe(launcher.Variables()), "); leave the flag out: ranks are started already"));
}

// The choice of launcher `name`; without a rank if it does not recognise this process.
absl::StatusOr<Choice> Ask(absl::string_view name, std::optional<int> nproc_per_node,
                           const Environment& env) {
  Choice choice;
  DDP_ASSIGN_OR_RETURN(choice.launcher, CreateLauncher(name));
  absl::StatusOr<std::optional<Rank>> rank = choice.launcher->Detect(env);
  if (!rank.ok()) return Annotate(rank.status(), absl::StrCat("launcher '", name, "'"));
  choice.rank = *std::move(rank);
  if (!choice.rank) return choice;
  if (nproc_per_node) {
    DDP_RETURN_IF_ERROR(CheckAgrees(*choice.launcher, *choice.rank, *nproc_per_node, env));
  }
  choice.reason = absl::StrCat(name, ": ", Place(*choice.rank), ", from ",
                               env.Describe(choice.launcher->Variables()));
  return choice;
}

// There are no ranks yet.
absl::StatusOr<Choice> StartRanks(absl::string_view name, std::optional<int> nproc_per_node,
                                  absl::string_view why) {
  Choice choice;
  DDP_ASSIGN_OR_RETURN(choice.launcher, CreateLauncher(name));
  if (name == kLocal && nproc_per_node == 1) {
    choice.rank = Rank();
    choice.reason = absl::StrCat(name, ": ", why, "; one rank, in this process");
  } else {
    choice.reason = absl::StrCat(name, ": ", why, "; this process starts the ranks");
  }
  return choice;
}

}  // namespace

absl::StatusOr<LaunchResult> Launcher::Launch(const LaunchRequest&) {
  return absl::UnimplementedError(absl::StrCat(
      "launcher '", name(), "' starts no ranks itself; start such a job with: ", HowToStart()));
}

absl::StatusOr<std::unique_ptr<Launcher>> CreateLauncher(absl::string_view name) {
  DDP_ASSIGN_OR_RETURN(LauncherFactory create, LauncherRegistry::Find(name));
  return create();
}

absl::StatusOr<Choice> Choose(absl::string_view name, std::optional<int> nproc_per_node,
                              const Environment& env) {
  if (nproc_per_node && *nproc_per_node < 1) {
    return absl::InvalidArgumentError(absl::StrCat("--nproc_per_node=", *nproc_per_node,
                                                   " is not a number of ranks: give 1 or more"));
  }
  if (name == "auto") {
    for (const std::string& candidate : Order()) {
      DDP_ASSIGN_OR_RETURN(Choice choice, Ask(candidate, nproc_per_node, env));
      if (choice.rank) return choice;
    }
    return StartRanks(kLocal, nproc_per_node, "no launcher's variables are set");
  }
  DDP_ASSIGN_OR_RETURN(Choice choice, Ask(name, nproc_per_node, env));
  if (choice.rank) return choice;
  if (!choice.launcher->StartsRanks()) return Absent(*choice.launcher, env);
  DDP_RETURN_IF_ERROR(CheckNoLargerJob(name, env));
  return StartRanks(name, nproc_per_node, "as asked for");
}

}  // namespace ddp::launchers
