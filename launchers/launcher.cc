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
  const std::vector<std::string> ours = {"local", "torchrun", "mpi", "slurm"};
  std::vector<std::string> names = LauncherRegistry::Names();
  std::stable_sort(names.begin(), names.end(), [&](const std::string& a, const std::string& b) {
    auto place = [&](const std::string& name) {
      const auto it = std::find(ours.begin(), ours.end(), name);
      return it == ours.end() ? 0.5 : static_cast<double>(it - ours.begin());
    };
    return place(a) < place(b);
  });
  return names;
}

std::string Place(const Rank& rank) {
  return absl::StrCat("rank ", rank.rank, " of ", rank.world_size);
}

// A launcher other than `local` was asked for by name, and this is none of its processes.
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

// `local` was asked for by name: starting copies inside each rank of a larger job is never meant.
absl::Status CheckNoLargerJob(const Environment& env) {
  for (const std::string& name : Order()) {
    DDP_ASSIGN_OR_RETURN(std::unique_ptr<Launcher> other, CreateLauncher(name));
    absl::StatusOr<std::optional<Rank>> rank = other->Detect(env);
    // Half set variables matter not: children of `local` get all of them anew.
    if (!rank.ok() || !*rank || (*rank)->world_size == 1) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--launcher=local would start ranks inside ", Place(**rank),
                     " of a job of launcher '", name, "' (set: ", env.Describe(other->Variables()),
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

absl::StatusOr<Choice> ChooseLocal(std::optional<int> nproc_per_node, absl::string_view why) {
  Choice choice;
  DDP_ASSIGN_OR_RETURN(choice.launcher, CreateLauncher(kLocal));
  if (nproc_per_node == 1) {
    choice.rank = Rank();
    choice.reason = absl::StrCat("local: ", why, "; one rank, in this process");
  } else {
    choice.reason = absl::StrCat("local: ", why, "; ranks are started on this machine");
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
  const bool automatic = name == "auto";
  std::vector<std::string> names;
  if (automatic) {
    names = Order();
  } else {
    names = {std::string(name)};
  }
  for (const std::string& candidate : names) {
    Choice choice;
    DDP_ASSIGN_OR_RETURN(choice.launcher, CreateLauncher(candidate));
    absl::StatusOr<std::optional<Rank>> rank = choice.launcher->Detect(env);
    if (!rank.ok()) return Annotate(rank.status(), absl::StrCat("launcher '", candidate, "'"));
    choice.rank = *rank;
    if (!choice.rank) continue;
    if (nproc_per_node) {
      DDP_RETURN_IF_ERROR(CheckAgrees(*choice.launcher, *choice.rank, *nproc_per_node, env));
    }
    choice.reason = absl::StrCat(candidate, ": ", Place(*choice.rank), ", from ",
                                 env.Describe(choice.launcher->Variables()));
    return choice;
  }
  if (automatic) return ChooseLocal(nproc_per_node, "no launcher's variables are set");
  if (name == kLocal) {
    DDP_RETURN_IF_ERROR(CheckNoLargerJob(env));
    return ChooseLocal(nproc_per_node, "as asked for");
  }
  DDP_ASSIGN_OR_RETURN(std::unique_ptr<Launcher> asked, CreateLauncher(name));
  return Absent(*asked, env);
}

}  // namespace ddp::launchers
