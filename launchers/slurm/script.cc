#include "launchers/slurm/script.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"

namespace ddp::launchers::slurm {
namespace {

// Variables that sbatch would hand to the job, but that describe the process which submits it.
constexpr absl::string_view kForeignVariables =
    // Bazel sets these variables; the staged program has runfiles of its own.
    "unset RUNFILES_DIR RUNFILES_MANIFEST_FILE RUNFILES_MANIFEST_ONLY JAVA_RUNFILES TEST_SRCDIR\n"
    "unset BUILD_WORKING_DIRECTORY BUILD_WORKSPACE_DIRECTORY\n"
    // torchrun, launcher local and mpirun set these variables for a rank, Kubernetes for a pod
    // (PET_…).
    "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT\n"
    "unset GROUP_WORLD_SIZE ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE \"${!PET_@}\" "
    "\"${!TORCHELASTIC_@}\"\n"
    "unset DDP_ATTEMPTS_FILE DDP_LAUNCHER DDP_MASTER_LISTEN_FD DDP_PROGRESS_FD\n"
    // Of OMPI_MCA_… and PMIX_MCA_…, only those that mpirun sets: others are the user's settings.
    "unset OMPI_APP_CTX_NUM_PROCS OMPI_ARGV OMPI_COMMAND OMPI_FILE_LOCATION OMPI_FIRST_RANKS\n"
    "unset OMPI_NUM_APP_CTX OMPI_UNIVERSE_SIZE \"${!OMPI_COMM_WORLD_@}\"\n"
    "unset OMPI_MCA_initial_wdir OMPI_MCA_pmix \"${!OMPI_MCA_ess@}\" \"${!OMPI_MCA_orte_@}\"\n"
    "unset PMIX_BFROP_BUFFER_TYPE PMIX_GDS_MODULE PMIX_HOSTNAME PMIX_ID PMIX_NAMESPACE PMIX_RANK\n"
    "unset PMIX_SECURITY_MODE PMIX_SERVER_TMPDIR PMIX_SYSTEM_TMPDIR PMIX_VERSION\n"
    "unset \"${!PMIX_DSTORE_@}\" \"${!PMIX_SERVER_URI@}\"\n"
    "unset PMI_APPNUM PMI_FD PMI_ID PMI_JOBID PMI_LOCAL_RANK PMI_LOCAL_SIZE PMI_PORT PMI_RANK\n"
    "unset PMI_SIZE PMI_SPAWNED MPI_LOCALRANKID MPI_LOCALNRANKS\n"
    // These may be of another job's step.
    "unset SLURM_STEP_ID SLURM_STEPID\n"
    // srun's options --error, --input and --output: what the ranks print goes to the job's log.
    "unset SRUN_ERROR SRUN_INPUT SRUN_OUTPUT SLURM_STDERRMODE SLURM_STDINMODE SLURM_STDOUTMODE\n";

// The words of srun that run one rank. The first rank that fails leaves its code in a new file, $0,
// so that it is known whose code is the job's: srun's own is the highest, and hides it behind the
// SIGTERM by which srun then ends the other ranks. Rank 0 leaves $0.begun: srun has started a step.
// A shell with a trap waits for the program.
constexpr absl::string_view kRank = R"sh(
ddp_rank='trap : INT TERM USR1 USR2
[ "$SLURM_PROCID" != 0 ] || (: >"$0.begun") 2>/dev/null
"$@"
ddp_code=$?
[ $ddp_code = 0 ] || (set -C; echo "$ddp_code $SLURM_PROCID $SLURMD_NODENAME" >"$0") 2>/dev/null
exit $ddp_code'
)sh";

// What the job leaves in its folder, and what ends it. An end by `exit` in a line of the user's,
// too, leaves a code.
constexpr absl::string_view kBegin = R"sh(
ddp_job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}}
ddp_job=${ddp_job:-$SLURM_JOB_ID}
ddp_restarts=${SLURM_RESTART_COUNT:-0}
ddp_say() { echo "job $ddp_job: $*" >&2; }
ddp_end() {
  trap - EXIT
  # A life on a node that SLURM has lost may end after the next one has begun.
  if (($(cat "$ddp_folder/attempts" 2>/dev/null | wc -l) > ddp_attempt)); then
    ddp_say "a later attempt has begun: the job has not ended with code $1"
  else
    echo "$1" >"$ddp_folder/.exit_code.new" &&
      mv -f "$ddp_folder/.exit_code.new" "$ddp_folder/exit_code"
  fi
  exit "$1"
}

rm -f "$ddp_folder/exit_code"
grep -qsxF "$ddp_job$ddp_cluster" "$ddp_folder/job_id" ||
  echo "$ddp_job$ddp_cluster" >>"$ddp_folder/job_id"
ddp_attempt=$(($(cat "$ddp_folder/attempts" 2>/dev/null | wc -l) + 1))
ddp_about="restart $ddp_restarts, on ${SLURM_JOB_NODELIST:-$HOSTNAME}, $(date -u +%FT%TZ)"
echo "$ddp_attempt: job $ddp_job, $ddp_about" >>"$ddp_folder/attempts"
((ddp_attempt == 1)) || ddp_say "attempt $ddp_attempt, $ddp_about"

ddp_ranks='' ddp_signals=0 ddp_asked='' ddp_terminated=''
ddp_pass_on() {
  ddp_signals=$((ddp_signals + 1))
  [[ -z $ddp_ranks ]] || kill "-$1" "$ddp_ranks" 2>/dev/null
}
)sh";

constexpr absl::string_view kTraps = R"sh(trap 'ddp_terminated=yes; ddp_pass_on TERM' TERM
trap 'ddp_end $?' EXIT
)sh";

// The user's lines run in this shell, so that the ranks have what they export. All names of the
// script begin with ddp_: those lines, and the user's environment, may have any others.
constexpr absl::string_view kAfterSetup = R"sh(
# Settings of the shell by these lines do not change what follows.
set +aefmuC +o pipefail
IFS=$' \t\n'
)sh";

// srun is in the background, since bash runs a trap only between commands and during `wait`, which
// then has not waited.
constexpr absl::string_view kRun = R"sh(
ddp_failure=$ddp_folder/.failure.$ddp_attempt
ddp_code=$((128 + $(kill -l "${ddp_asked:-TERM}")))
ddp_started=$SECONDS ddp_no_step=''
if [[ -z $ddp_asked$ddp_terminated ]]; then
  "${ddp_start[@]}" sh -c "$ddp_rank" "$ddp_failure" "${ddp_command[@]}" &
  ddp_ranks=$!
  [[ -z $ddp_asked ]] || kill "-$ddp_asked" "$ddp_ranks"
  [[ -z $ddp_terminated ]] || kill -TERM "$ddp_ranks"
  ddp_waited=-1
  until ((ddp_waited == ddp_signals)); do
    ddp_waited=$ddp_signals
    wait "$ddp_ranks"
    ddp_code=$?
  done
  ddp_ranks=''
fi
# SLURM ends all processes of this script, too, once it is queued again: not those of its last words.
trap '' TERM USR1 USR2

ddp_failed='' ddp_node='' ddp_again='' ddp_preempted='' ddp_reason=''
if ((ddp_code != 0)); then
  # Clients of network file systems look again for a file that was not there.
  ls -a "$ddp_folder" >/dev/null
  if [[ -s $ddp_failure ]]; then read -r ddp_code ddp_failed ddp_node <"$ddp_failure"; fi
  # SLURM 22.05 lets srun wait for ever in a job that has begun while one of its nodes came back.
  if [[ ! -e $ddp_failure.begun ]] && ((SECONDS - ddp_started >= ddp_step_wait)); then
    ddp_no_step=yes
    echo "error: SLURM has begun no rank on the job's nodes within $ddp_step_wait s" >&2
  fi
  # The user's filters could hide this job.
  unset "${!SQUEUE_@}"
  read -r ddp_again ddp_preempted ddp_reason < <(squeue --noheader --states=all \
    --jobs="$ddp_job" --Format=RestartCnt:12,PreemptTime:24,Reason:32 2>/dev/null)
fi
rm -f "$ddp_failure" "$ddp_failure.begun"
[[ -z $ddp_terminated ]] || ddp_code=143
# SLURM itself begins the job again, and counts that already: this is not its end.
if [[ $ddp_again =~ ^[0-9]+$ ]] && ((ddp_again > ddp_restarts)); then
  ddp_say "SLURM queues it again"
  trap - EXIT
  exit "$ddp_code"
fi
)sh";

// The names of signals that end a failing program are those of base/process.h.
constexpr absl::string_view kEnd = R"sh(
ddp_names=([4]="Illegal instruction" [6]=Aborted [7]="Bus error" [8]="Floating point exception"
  [9]=Killed [11]="Segmentation fault")
ddp_name=${ddp_names[ddp_code > 128 ? ddp_code - 128 : 0]:-}
if [[ -n $ddp_failed && -z $ddp_terminated && -n $ddp_name ]]; then
  echo "error: rank $ddp_failed on $ddp_node was killed by signal" \
    "$((ddp_code - 128)) ($ddp_name)" >&2
fi
ddp_end "$ddp_code"
)sh";

constexpr absl::string_view kRequeue = R"sh(
# A run that was asked to stop and did, that came to its time limit nevertheless, whose ranks did not
# begin, or that SLURM preempts after a time of grace.
if [[ -n $ddp_asked && $ddp_code == "$ddp_stopped" || $ddp_reason == TimeLimit ||
  -n $ddp_no_step && -z $ddp_terminated ||
  $ddp_code == 143 && -z $ddp_terminated && $ddp_preempted == [0-9]* ]]; then
  if ((ddp_restarts >= ddp_max_requeues)); then
    ddp_say "is not queued again: that has happened $ddp_restarts times," \
      "slurm.max_requeues=$ddp_max_requeues"
  elif ddp_words=$(scontrol requeue "$ddp_job" 2>&1); then
    ddp_say "is queued again, to go on"
    trap - EXIT
    exit "$ddp_code"
  else
    ddp_say "cannot be queued again: $ddp_words"
  fi
fi
)sh";

bool IsHarmless(char c) {
  return absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
         absl::string_view("_-+./:,=@%").find(c) != absl::string_view::npos;
}

// A value as sbatch reads it from an #SBATCH line, which is not quite as bash does.
std::string SbatchWord(absl::string_view value) {
  if (std::all_of(value.begin(), value.end(), IsHarmless)) return std::string(value);
  return absl::StrCat("\"", absl::StrReplaceAll(value, {{"\\", "\\\\"}, {"\"", "\\\""}}), "\"");
}

// The log: a file name pattern, in which sbatch replaces "%a" by the index in an array.
std::string LogPattern(const ScriptOptions& options) {
  return SbatchWord(absl::StrCat(absl::StrReplaceAll(options.folder, {{"%", "%%"}}),
                                 options.jobs.size() > 1 ? "/%a/" : "/", BatchJob::kLog));
}

class Header {
 public:
  template <typename T>
  void Add(absl::string_view name, const T& value) {
    absl::StrAppend(&text_, "#SBATCH --", name, "=", value, "\n");
  }
  void AddIfSet(absl::string_view name, const std::string& value) {
    if (!value.empty()) Add(name, SbatchWord(value));
  }
  void AddIfSet(absl::string_view name, const std::optional<int>& value) {
    if (value) Add(name, *value);
  }
  void AddLine(absl::string_view option) { absl::StrAppend(&text_, "#SBATCH ", option, "\n"); }
  const std::string& text() const { return text_; }

 private:
  std::string text_ = "#!/bin/bash\n";
};

std::string ArrayRange(size_t jobs, int at_once) {
  return absl::StrCat("0-", jobs - 1, at_once > 0 ? absl::StrCat("%", at_once) : "");
}

// "," means: all of them.
std::string Dependency(const std::string& users, const std::string& after) {
  if (after.empty()) return users;
  return absl::StrCat("afterany:", after, users.empty() ? "" : ",", users);
}

std::string HeaderOf(const ScriptOptions& options) {
  const SlurmOptions slurm = SlurmOptionsOf(options.launch);
  Header header;
  header.Add("job-name", SbatchWord(slurm.job_name.empty() ? options.name : slurm.job_name));
  header.Add("nodes", options.launch.Nnodes());
  header.Add("ntasks-per-node", TasksPerNode(options.launch));
  if (options.jobs.size() > 1) {
    header.Add("array", ArrayRange(options.jobs.size(), options.at_once));
  }
  header.Add("output", LogPattern(options));
  header.Add("open-mode", "append");
  header.Add("chdir", SbatchWord(options.chdir));
  header.AddIfSet("partition", slurm.partition);
  header.AddIfSet("gpus-per-node", slurm.gpus_per_node);
  header.AddIfSet("cpus-per-task", slurm.cpus_per_task);
  header.AddIfSet("mem", slurm.mem);
  header.AddIfSet("time", slurm.time);
  header.AddIfSet("account", slurm.account);
  header.AddIfSet("qos", slurm.qos);
  header.AddIfSet("constraint", slurm.constraint);
  header.AddIfSet("clusters", slurm.clusters);
  header.AddIfSet("dependency", Dependency(slurm.dependency, options.after));
  if (slurm.requeue) {
    header.AddLine("--requeue");
    // To this script only, which passes it on: it must know.
    header.Add("signal", absl::StrCat("B:", slurm.signal));
  }
  for (const std::string& extra : JoinedElements(slurm.extra)) header.AddLine(extra);
  return header.text();
}

// The folder and the command of one job.
std::string Assignments(const ScriptOptions& options, const BatchJob& job,
                        absl::string_view indent) {
  std::vector<std::string> words = {BashWord(options.program)};
  for (size_t i = 1; i < job.argv.size(); ++i) words.push_back(BashWord(job.argv[i]));
  return absl::StrCat(indent, "ddp_folder=", BashWord(job.folder), "\n", indent, "ddp_command=(",
                      absl::StrJoin(words, " "), ")\n");
}

std::string SelectJob(const ScriptOptions& options) {
  if (options.jobs.size() == 1) return Assignments(options, options.jobs[0], "");
  std::string text = "case $SLURM_ARRAY_TASK_ID in\n";
  for (size_t i = 0; i < options.jobs.size(); ++i) {
    absl::StrAppend(&text, "  ", i, ")\n", Assignments(options, options.jobs[i], "    "),
                    "    ;;\n");
  }
  return absl::StrCat(text, "esac\n");
}

// How the ranks are started. srun takes the numbers of nodes and tasks from the job, but not the
// cores of a task (since SLURM 22.05). It ends if no step begins within ddp_step_wait seconds,
// which kRun then reports. It gets --export, since sbatch --export=NONE would hold for srun, too.
std::string Start(const SlurmOptions& slurm) {
  std::string words = "srun --kill-on-bad-exit=1 --export=ALL \"--immediate=$ddp_step_wait\"";
  if (slurm.label) absl::StrAppend(&words, " --label");
  for (const std::string& word : JoinedElements(slurm.srun_args)) {
    absl::StrAppend(&words, " ", BashWord(word));
  }
  return absl::StrCat("ddp_step_wait=${ddp_step_wait:-120}\nddp_start=(", words, R"()
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
  ddp_start+=("--cpus-per-task=$SLURM_CPUS_PER_TASK")
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}
fi
)");
}

// What ends the job, or asks for a requeue.
std::string Traps(const SlurmOptions& slurm) {
  if (!slurm.requeue) return std::string(kTraps);
  const std::string name = SignalOf(slurm.signal).name;
  return absl::StrCat(kTraps, "trap 'ddp_asked=", name, "; ddp_pass_on ", name, "' ", name, "\n");
}

std::string RequeueLimit(const SlurmOptions& slurm) {
  return absl::StrCat("ddp_max_requeues=", slurm.max_requeues, " ddp_stopped=$((128 + $(kill -l ",
                      SignalOf(slurm.signal).name, R"()))
if ((ddp_restarts > ddp_max_requeues)); then
  echo "error: the job was queued again $ddp_restarts times," \
    "slurm.max_requeues=$ddp_max_requeues" >&2
  ddp_end 1
fi
)");
}

}  // namespace

SlurmOptions SlurmOptionsOf(const LaunchOptions& options) {
  return options.implementations.Get<SlurmOptions>("slurm");
}

int TasksPerNode(const LaunchOptions& options) {
  if (options.nproc_per_node) return *options.nproc_per_node;
  const int gpus = SlurmOptionsOf(options).gpus_per_node.value_or(0);
  return gpus > 0 ? gpus : options.default_nproc_per_node;
}

std::string BashWord(absl::string_view word) {
  if (!word.empty() && std::all_of(word.begin(), word.end(), IsHarmless)) return std::string(word);
  return absl::StrCat("'", absl::StrReplaceAll(word, {{"'", "'\\''"}}), "'");
}

std::vector<std::string> JoinedElements(const std::vector<std::string>& elements) {
  std::vector<std::string> joined;
  for (const std::string& element : elements) {
    if (joined.empty() || absl::StartsWith(element, "-")) {
      joined.push_back(element);
    } else {
      absl::StrAppend(&joined.back(), ",", element);
    }
  }
  return joined;
}

RequeueSignal SignalOf(absl::string_view text) {
  RequeueSignal signal;
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(text, absl::MaxSplits('@', 1));
  signal.name = std::string(parts.first);
  if (!absl::SimpleAtoi(parts.second, &signal.seconds)) signal.seconds = -1;
  return signal;
}

std::string BatchScript(const ScriptOptions& options) {
  const SlurmOptions slurm = SlurmOptionsOf(options.launch);
  std::string text = absl::StrCat(HeaderOf(options), "\n", kForeignVariables);
  for (const auto& [name, value] : options.launch.environment) {
    absl::StrAppend(&text, "export ", name, "=", BashWord(value), "\n");
  }
  absl::StrAppend(&text, "\n", SelectJob(options));
  absl::StrAppend(&text,
                  "ddp_cluster=", slurm.clusters.empty() ? "" : BashWord(";" + slurm.clusters),
                  "\n", Start(slurm), kRank, kBegin, Traps(slurm));
  if (slurm.requeue) text += RequeueLimit(slurm);
  if (!slurm.setup.empty()) {
    absl::StrAppend(&text, "\n", absl::StrJoin(slurm.setup, "\n"), "\n", kAfterSetup, Traps(slurm),
                    Start(slurm));
  }
  absl::StrAppend(&text, kRun, slurm.requeue ? kRequeue : "", kEnd);
  return text;
}

}  // namespace ddp::launchers::slurm
