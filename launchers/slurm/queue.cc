#include "launchers/slurm/queue.h"

#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/command.h"
#include "base/environment.h"
#include "base/file.h"
#include "base/option_error.h"
#include "base/status.h"

namespace ddp::launchers::slurm {
namespace {

// squeue's compact codes of states in which no process of the job runs yet, or again.
const std::set<std::string, std::less<>>& QueuedStates() {
  static const auto* states =
      new std::set<std::string, std::less<>>{"PD", "CF", "RD", "RF", "RH", "RQ", "RV", "SE"};
  return *states;
}

// sbatch's and squeue's variables that count for more than the script's lines, or that change
// squeue's output. Those of options that are not set keep their effect: the script has no such
// line.
bool Interferes(absl::string_view name, absl::string_view script) {
  if (absl::StartsWith(name, "SQUEUE_")) return true;
  static constexpr std::pair<absl::string_view, absl::string_view> kOptions[] = {
      {"SBATCH_ACCOUNT", "account"},       {"SBATCH_ARRAY_INX", ""},
      {"SBATCH_CONSTRAINT", "constraint"}, {"SBATCH_GPUS_PER_NODE", "gpus-per-node"},
      {"SBATCH_JOB_NAME", "job-name"},     {"SBATCH_MEM_PER_NODE", "mem"},
      {"SBATCH_OPEN_MODE", "open-mode"},   {"SBATCH_OUTPUT", "output"},
      {"SBATCH_PARTITION", "partition"},   {"SBATCH_QOS", "qos"},
      {"SBATCH_TIMELIMIT", "time"},        {"SBATCH_WAIT", ""}};
  for (const auto& [variable, option] : kOptions) {
    if (name != variable) continue;
    return option.empty() || absl::StrContains(script, absl::StrCat("\n#SBATCH --", option, "="));
  }
  return false;
}

// Lines "sbatch: error: …" as one line without these prefixes.
std::string OneLine(absl::string_view text, absl::string_view command) {
  std::vector<absl::string_view> lines;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    absl::ConsumePrefix(&line, absl::StrCat(command, ": "));
    absl::ConsumePrefix(&line, "error: ");
    line = absl::StripAsciiWhitespace(line);
    if (!line.empty()) lines.push_back(line);
  }
  return absl::StrJoin(lines, "; ");
}

absl::StatusOr<CommandResult> Run(const std::vector<std::string>& argv,
                                  absl::string_view script = "") {
  std::map<std::string, std::string> environment = Environment::FromProcess().variables();
  std::erase_if(environment,
                [&](const auto& variable) { return Interferes(variable.first, script); });
  absl::StatusOr<CommandResult> result = RunCommand(argv, environment);
  if (absl::IsNotFound(result.status())) {
    return OptionError("launcher", "slurm",
                       absl::StrCat("finds no ", argv[0],
                                    " in PATH: submit on a machine of the cluster, where SLURM's "
                                    "commands are installed"),
                       absl::StatusCode::kFailedPrecondition);
  }
  return result;
}

absl::Status Failed(const std::vector<std::string>& argv, const CommandResult& result) {
  std::string words = OneLine(result.err, argv[0]);
  if (words.empty()) words = absl::StrCat("exit code ", result.exit_code);
  return absl::UnavailableError(absl::StrCat(absl::StrJoin(argv, " "), ": ", words));
}

}  // namespace

absl::StatusOr<std::string> SubmitScript(const std::string& path) {
  DDP_ASSIGN_OR_RETURN(const std::string script, ReadFile(path));
  DDP_ASSIGN_OR_RETURN(const CommandResult result, Run({"sbatch", "--parsable", path}, script));
  if (result.exit_code != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("sbatch refuses the job: ", OneLine(result.err, "sbatch")));
  }
  // sbatch prints "ID" or "ID;CLUSTER", after whatever a site's plug-in prints.
  const std::vector<std::string> lines =
      absl::StrSplit(absl::StripAsciiWhitespace(result.out), '\n');
  const std::string id = lines.back().substr(0, lines.back().find(';'));
  if (id.empty() || id.find_first_not_of("0123456789") != std::string::npos) {
    return absl::InternalError(
        absl::StrCat("sbatch --parsable printed no job id: '", absl::CEscape(result.out), "'"));
  }
  return id;
}

absl::StatusOr<std::map<std::string, std::string>> States(const std::vector<std::string>& ids) {
  std::map<std::string, std::string> states;
  if (ids.empty()) return states;
  std::set<std::string> jobs;  // without indices in an array: squeue's command line is limited
  for (const std::string& id : ids) jobs.insert(id.substr(0, id.find('_')));
  const std::vector<std::string> argv = {"squeue", "--noheader", "--array", "--format=%i %t",
                                         absl::StrCat("--jobs=", absl::StrJoin(jobs, ","))};
  DDP_ASSIGN_OR_RETURN(const CommandResult result, Run(argv));
  if (result.exit_code != 0) {
    // squeue says so of a single job that ended minutes ago.
    if (absl::StrContains(result.err, "Invalid job id")) return states;
    return Failed(argv, result);
  }
  const std::set<std::string> wanted(ids.begin(), ids.end());
  for (absl::string_view line : absl::StrSplit(result.out, '\n')) {
    const std::vector<std::string> fields = absl::StrSplit(line, ' ', absl::SkipEmpty());
    if (fields.size() != 2 || !wanted.contains(fields[0])) continue;
    states[fields[0]] = QueuedStates().contains(fields[1]) ? "queued" : "running";
  }
  return states;
}

absl::Status Cancel(const std::string& id) {
  const std::vector<std::string> argv = {"scancel", id};
  DDP_ASSIGN_OR_RETURN(const CommandResult result, Run(argv));
  return result.exit_code == 0 ? absl::OkStatus() : Failed(argv, result);
}

}  // namespace ddp::launchers::slurm
