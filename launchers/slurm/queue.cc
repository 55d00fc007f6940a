#include "launchers/slurm/queue.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "base/command.h"
#include "base/environment.h"
#include "base/file.h"
#include "base/host_name.h"
#include "base/option_error.h"
#include "base/status.h"
#include "launchers/queue.h"

namespace ddp::launchers::slurm {
namespace {

// SLURM's own default.
constexpr int kDefaultMaxArraySize = 1001;
// Of one scancel: command lines are limited.
constexpr size_t kIdsAtOnce = 1000;
// How often the queue is asked for a job whose sbatch has given no answer.
constexpr int kLooks = 3;
constexpr absl::Duration kLookPause = absl::Seconds(5);
// How long a submission without an answer may yet take effect: longer than SubmitScript waits.
constexpr absl::Duration kUnclearFor = absl::Minutes(20);
constexpr char kTimeFormat[] = "%Y-%m-%dT%H:%M:%SZ";
constexpr char kNone[] = "-";  // in a line of Submitting

// squeue's compact codes of states in which no process of the job runs yet, or again.
const std::set<std::string, std::less<>>& QueuedStates() {
  static const auto* states =
      new std::set<std::string, std::less<>>{"PD", "CF", "RD", "RF", "RH", "RQ", "RV", "SE"};
  return *states;
}

// Whether `script` has a line of sbatch's `option`.
bool HasLine(absl::string_view script, absl::string_view option) {
  const std::string line = absl::StrCat("\n#SBATCH --", option);
  for (const char* end : {"=", "\n", " "}) {
    if (absl::StrContains(script, absl::StrCat(line, end))) return true;
  }
  return false;
}

// sbatch's and squeue's variables that count for more than the script's lines, or that change
// squeue's output. Those of options that are not set keep their effect: the script has no such
// line.
bool Interferes(absl::string_view name, absl::string_view script) {
  if (absl::StartsWith(name, "SQUEUE_")) return true;
  // Only sbatch has a script. Others ask for ids, and those have their cluster.
  if (script.empty() && name == "SLURM_CLUSTERS") return true;
  // Variables that are not named as the option of which they take the effect. "": any script.
  static constexpr std::pair<absl::string_view, absl::string_view> kOptions[] = {
      {"SBATCH_ARRAY_INX", ""},
      {"SBATCH_CPUS_PER_GPU", "cpus-per-task"},
      {"SBATCH_ERROR", "output"},  // Errors are in the output's file, unless they have their own.
      {"SBATCH_GPUS", "gpus-per-node"},
      {"SBATCH_GPUS_PER_TASK", "gpus-per-node"},
      {"SBATCH_INPUT", ""},
      {"SBATCH_MEM_PER_CPU", "mem"},
      {"SBATCH_MEM_PER_GPU", "mem"},
      {"SBATCH_MEM_PER_NODE", "mem"},
      {"SBATCH_NO_REQUEUE", "requeue"},
      {"SBATCH_TIMELIMIT", "time"},
      {"SBATCH_WAIT", ""},
      {"SLURM_CLUSTERS", "clusters"}};
  for (const auto& [variable, option] : kOptions) {
    if (name == variable && (option.empty() || HasLine(script, option))) return true;
  }
  // SBATCH_JOB_NAME is --job-name.
  return absl::ConsumePrefix(&name, "SBATCH_") &&
         HasLine(script, absl::StrReplaceAll(absl::AsciiStrToLower(name), {{"_", "-"}}));
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
                                  absl::string_view script = "",
                                  absl::Duration timeout = absl::Minutes(2)) {
  std::map<std::string, std::string> environment = Environment::FromProcess().variables();
  std::erase_if(environment,
                [&](const auto& variable) { return Interferes(variable.first, script); });
  absl::StatusOr<CommandResult> result = RunCommand(argv, environment, timeout);
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

void AddCluster(const std::string& cluster, std::vector<std::string>& argv) {
  if (!cluster.empty()) argv.push_back(absl::StrCat("--clusters=", cluster));
}

// The value of "#SBATCH --clusters=" in `script`.
std::string ClusterOf(absl::string_view script) {
  constexpr absl::string_view kLine = "\n#SBATCH --clusters=";
  const size_t found = script.find(kLine);
  if (found == absl::string_view::npos) return "";
  script.remove_prefix(found + kLine.size());
  return std::string(script.substr(0, script.find('\n')));
}

// The id of `job`, a number with or without an index in an array.
std::string WithCluster(const std::string& job, const std::string& cluster) {
  return cluster.empty() ? job : absl::StrCat(job, ";", cluster);
}

bool IsNumber(absl::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == absl::string_view::npos;
}

// The jobs that have not ended, without indices in an array, by their scripts. All submissions of
// one job have the same script: the newest counts. Those that have ended are left out: one may be
// an earlier submission, and a job that has begun has written its id itself.
absl::StatusOr<std::map<std::string, int64_t>> JobsByScript(const std::string& cluster) {
  // --all: hidden partitions, too. squeue shows them of its own accord where it is asked for ids.
  std::vector<std::string> argv = {"squeue", "--noheader", "--all", "--format=%F %o"};
  AddCluster(cluster, argv);
  DDP_ASSIGN_OR_RETURN(const CommandResult result, Run(argv));
  if (result.exit_code != 0) return Failed(argv, result);
  std::map<std::string, int64_t> jobs;
  for (absl::string_view line : absl::StrSplit(result.out, '\n')) {
    const std::pair<absl::string_view, std::string> fields =
        absl::StrSplit(absl::StripAsciiWhitespace(line), absl::MaxSplits(' ', 1));
    int64_t number = 0;
    if (!IsNumber(fields.first) || !absl::SimpleAtoi(fields.first, &number)) continue;
    int64_t& newest = jobs[fields.second];
    newest = std::max(newest, number);
  }
  return jobs;
}

// Whether an sbatch that failed may have submitted its job: a signal killed it, or SLURM's words
// (slurm_errno.c, strerror) are those of a connection that was made and had no answer.
bool MayHaveSubmitted(const CommandResult& sbatch) {
  if (sbatch.exit_code > 128 && sbatch.exit_code < 128 + NSIG) return true;
  for (const char* words :
       {"Socket timed out", "Zero Bytes were transmitted or received", "Message send failure",
        "Message receive failure", "Communication shutdown failure", "(send failure)",
        "(receive failure)", "(shutdown failure)", "Unexpected missing socket",
        "Connection timed out", "Connection reset", "Connection forced closed", "Broken pipe",
        "delayed socket error", "Interrupted system call"}) {
    if (absl::StrContains(sbatch.err, words)) return true;
  }
  return false;
}

// The job whose script is `path`, as far as the queue has it. sbatch has ended, but what it has
// sent to a busy controller may take effect later.
absl::StatusOr<std::string> FindSubmitted(const std::string& path, const std::string& cluster) {
  for (int i = 0; i < kLooks; ++i) {
    if (i > 0) absl::SleepFor(kLookPause);
    const absl::StatusOr<std::map<std::string, int64_t>> jobs = JobsByScript(cluster);
    if (!jobs.ok()) continue;
    if (const auto job = jobs->find(path); job != jobs->end()) return absl::StrCat(job->second);
  }
  return absl::NotFoundError(path);
}

// The id of a job whose submission had no answer, for the reason `why`.
absl::StatusOr<std::string> WithoutAnswer(const std::string& path, const std::string& cluster,
                                          absl::string_view why) {
  const absl::StatusOr<std::string> found = FindSubmitted(path, cluster);
  if (found.ok()) return WithCluster(*found, cluster);
  return absl::DeadlineExceededError(
      absl::StrCat(why, "; the job may be queued yet: its script is ", path,
                   ", which 'squeue --all --format=\"%i %o\"' shows; cancel it with scancel"));
}

// What a line of Submitting says.
struct Submission {
  absl::Time since;
  std::string cluster;         // empty: none is named
  std::optional<size_t> task;  // of an array
  std::string script;
};

// nullopt for an id, and for what is no such line.
std::optional<Submission> ParseSubmitting(absl::string_view line) {
  if (!absl::ConsumePrefix(&line, kSubmitting)) return std::nullopt;
  // TIME HOST PID TASK CLUSTER SCRIPT
  const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(' ', 5));
  Submission submission;
  size_t task = 0;
  std::string error;
  if (fields.size() != 6 || !absl::ParseTime(kTimeFormat, fields[0], &submission.since, &error)) {
    return std::nullopt;
  }
  if (absl::SimpleAtoi(fields[3], &task)) submission.task = task;
  if (fields[4] != kNone) submission.cluster = fields[4];
  submission.script = fields[5];
  return submission;
}

// Adds the states of those of `wanted`, ids in `cluster` without its name, that squeue lists.
absl::Status AddStates(const std::string& cluster, const std::set<std::string>& wanted,
                       std::map<std::string, std::string>& states) {
  std::set<std::string> jobs;  // without indices in an array: squeue's command line is limited
  for (const std::string& id : wanted) jobs.insert(id.substr(0, id.find('_')));
  std::vector<std::string> argv = {"squeue", "--noheader", "--array", "--format=%i %t",
                                   absl::StrCat("--jobs=", absl::StrJoin(jobs, ","))};
  AddCluster(cluster, argv);
  DDP_ASSIGN_OR_RETURN(const CommandResult result, Run(argv));
  if (result.exit_code != 0) {
    // squeue says so of a single job that ended minutes ago.
    if (absl::StrContains(result.err, "Invalid job id")) return absl::OkStatus();
    return Failed(argv, result);
  }
  for (absl::string_view line : absl::StrSplit(result.out, '\n')) {
    const std::vector<std::string> fields = absl::StrSplit(line, ' ', absl::SkipEmpty());
    if (fields.size() != 2 || !wanted.contains(fields[0])) continue;
    states[WithCluster(fields[0], cluster)] =
        QueuedStates().contains(fields[1]) ? "queued" : "running";
  }
  return absl::OkStatus();
}

// The ids of KnownIds without their clusters, by cluster.
std::map<std::string, std::set<std::string>> ByCluster(
    const std::map<std::string, std::string>& known) {
  std::map<std::string, std::set<std::string>> clusters;
  for (const auto& [line, id] : known) {
    const auto [job, cluster] = SplitCluster(id);
    clusters[cluster].insert(job);
  }
  return clusters;
}

// Leaves of `jobs` those that a scancel with these errors has cancelled: none, if the errors name
// none of them.
void RemoveFailed(absl::string_view errors, std::vector<std::string>& jobs) {
  const size_t removed = std::erase_if(jobs, [&](const std::string& job) {
    return absl::StrContains(errors, absl::StrCat("job id ", job, ":"));
  });
  if (removed == 0) jobs.clear();
}

}  // namespace

absl::StatusOr<std::string> SubmitScript(const std::string& path, absl::Duration timeout) {
  DDP_ASSIGN_OR_RETURN(const std::string script, ReadFile(path));
  const std::string cluster = ClusterOf(script);
  const absl::StatusOr<CommandResult> result = Run({"sbatch", "--parsable", path}, script, timeout);
  if (absl::IsDeadlineExceeded(result.status())) {
    return WithoutAnswer(path, cluster, result.status().message());
  }
  if (!result.ok()) return result.status();
  if (result->exit_code != 0 && MayHaveSubmitted(*result)) {
    return WithoutAnswer(path, cluster, Failed({"sbatch"}, *result).message());
  }
  if (result->exit_code != 0) {
    // A site's wrapper may say why on its standard output.
    std::string why = OneLine(result->err, "sbatch");
    if (why.empty()) why = OneLine(result->out, "sbatch");
    if (why.empty()) why = absl::StrCat("exit code ", result->exit_code, ", without a word");
    return absl::FailedPreconditionError(absl::StrCat("sbatch refuses the job: ", why));
  }
  // sbatch prints "ID" or "ID;CLUSTER", after whatever a site's plug-in prints.
  const std::vector<std::string> lines =
      absl::StrSplit(absl::StripAsciiWhitespace(result->out), '\n');
  const auto [id, where] = SplitCluster(lines.back());
  if (!IsNumber(id)) {
    return WithoutAnswer(
        path, cluster,
        absl::StrCat("sbatch --parsable printed no job id: '", absl::CEscape(result->out), "'"));
  }
  return WithCluster(id, where.empty() ? cluster : where);
}

std::string Submitting(const std::string& script, const std::string& cluster,
                       std::optional<size_t> task) {
  return absl::StrCat(kSubmitting, absl::FormatTime(kTimeFormat, absl::Now(), absl::UTCTimeZone()),
                      " ", HostName(), " ", getpid(), " ", task ? absl::StrCat(*task) : kNone, " ",
                      cluster.empty() ? kNone : cluster, " ", script);
}

absl::StatusOr<std::map<std::string, std::string>> KnownIds(const std::vector<std::string>& ids) {
  std::map<std::string, std::string> known;
  std::map<std::string, std::map<std::string, int64_t>> queues;  // by cluster
  for (const std::string& id : ids) {
    if (!IsSubmitting(id)) {
      known[id] = id;
      continue;
    }
    const std::optional<Submission> submission = ParseSubmitting(id);
    if (!submission) continue;
    const std::string& cluster = submission->cluster;
    if (!queues.contains(cluster)) {
      DDP_ASSIGN_OR_RETURN(queues[cluster], JobsByScript(cluster));
    }
    const auto job = queues[cluster].find(submission->script);
    if (job == queues[cluster].end()) continue;
    const std::string whole = WithCluster(absl::StrCat(job->second), cluster);
    known[id] = submission->task ? TaskId(whole, *submission->task) : whole;
  }
  return known;
}

std::pair<std::string, std::string> SplitCluster(absl::string_view id) {
  return absl::StrSplit(id, absl::MaxSplits(';', 1));
}

std::string TaskId(const std::string& id, size_t index) {
  const auto [job, cluster] = SplitCluster(id);
  return WithCluster(absl::StrCat(job, "_", index), cluster);
}

int MaxArraySize(const std::string& cluster) {
  std::vector<std::string> argv = {"scontrol", "show", "config"};
  AddCluster(cluster, argv);
  const absl::StatusOr<CommandResult> result = Run(argv);
  if (!result.ok()) return kDefaultMaxArraySize;
  for (absl::string_view line : absl::StrSplit(result->out, '\n')) {
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, absl::ByAnyChar(" ="), absl::SkipEmpty());
    int size = 0;
    if (words.size() == 2 && words[0] == "MaxArraySize" && absl::SimpleAtoi(words[1], &size)) {
      return std::max(size, 1);
    }
  }
  return kDefaultMaxArraySize;
}

absl::StatusOr<std::map<std::string, std::string>> States(const std::vector<std::string>& ids) {
  DDP_ASSIGN_OR_RETURN(const auto known, KnownIds(ids));
  std::map<std::string, std::string> of_known;
  for (const auto& [cluster, jobs] : ByCluster(known)) {
    DDP_RETURN_IF_ERROR(AddStates(cluster, jobs, of_known));
  }
  std::map<std::string, std::string> states;
  for (const std::string& id : ids) {
    if (const auto own = known.find(id); own != known.end()) {
      const auto state = of_known.find(own->second);
      if (state != of_known.end()) states[id] = state->second;
    } else if (const auto submission = ParseSubmitting(id);
               submission && absl::Now() - submission->since < kUnclearFor) {
      states[id] = "unknown";
    }
  }
  return states;
}

Cancellation Cancel(const std::vector<std::string>& ids) {
  std::map<std::string, std::string> known;
  absl::StatusOr<std::map<std::string, std::string>> found = KnownIds(ids);
  std::vector<std::string> cancelled;
  absl::Status first = found.status();
  if (found.ok()) known = *std::move(found);
  for (const std::string& id : ids) {
    if (!IsSubmitting(id)) {
      known[id] = id;
    } else if (!known.contains(id)) {
      first.Update(absl::UnavailableError(absl::StrCat("the queue does not have it yet: ", id)));
    }
  }
  for (const auto& [cluster, jobs] : ByCluster(known)) {
    for (auto next = jobs.begin(); next != jobs.end();) {
      std::vector<std::string> argv = {"scancel"};
      AddCluster(cluster, argv);
      std::vector<std::string> some;
      for (size_t i = 0; i < kIdsAtOnce && next != jobs.end(); ++i) some.push_back(*next++);
      argv.insert(argv.end(), some.begin(), some.end());
      const absl::StatusOr<CommandResult> result = Run(argv);
      if (!result.ok()) {
        first.Update(result.status());
        continue;
      }
      if (result->exit_code != 0) {
        first.Update(Failed({"scancel"}, *result));
        RemoveFailed(result->err, some);
      }
      for (const std::string& job : some) cancelled.push_back(WithCluster(job, cluster));
    }
  }
  return {.cancelled = std::move(cancelled), .status = std::move(first)};
}

}  // namespace ddp::launchers::slurm
