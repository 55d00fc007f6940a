#include "launchers/slurm/script.h"

#include <cstdlib>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/command.h"
#include "base/file.h"
#include "gtest/gtest.h"

namespace ddp::launchers::slurm {
namespace {

ScriptOptions Smallest() {
  return {.name = "train",
          .program = "/stage/builds/0a/train",
          .chdir = "/home/me",
          .folder = "/stage/jobs/a",
          .jobs = {{.name = "train", .folder = "/stage/jobs/a", .argv = {"/bin/train", "--x=1"}}}};
}

SlurmOptions& SlurmOf(ScriptOptions& options) {
  return options.launch.implementations.Mutable<SlurmOptions>("slurm");
}

constexpr char kUnset[] = R"(
unset RUNFILES_DIR RUNFILES_MANIFEST_FILE RUNFILES_MANIFEST_ONLY JAVA_RUNFILES TEST_SRCDIR
unset BUILD_WORKING_DIRECTORY BUILD_WORKSPACE_DIRECTORY
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT
unset GROUP_WORLD_SIZE ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE "${!PET_@}" "${!TORCHELASTIC_@}"
unset DDP_ATTEMPTS_FILE DDP_LAUNCHER DDP_MASTER_LISTEN_FD DDP_PROGRESS_FD
unset OMPI_APP_CTX_NUM_PROCS OMPI_ARGV OMPI_COMMAND OMPI_FILE_LOCATION OMPI_FIRST_RANKS
unset OMPI_NUM_APP_CTX OMPI_UNIVERSE_SIZE "${!OMPI_COMM_WORLD_@}"
unset OMPI_MCA_initial_wdir OMPI_MCA_pmix "${!OMPI_MCA_ess@}" "${!OMPI_MCA_orte_@}"
unset PMIX_BFROP_BUFFER_TYPE PMIX_GDS_MODULE PMIX_HOSTNAME PMIX_ID PMIX_NAMESPACE PMIX_RANK
unset PMIX_SECURITY_MODE PMIX_SERVER_TMPDIR PMIX_SYSTEM_TMPDIR PMIX_VERSION
unset "${!PMIX_DSTORE_@}" "${!PMIX_SERVER_URI@}"
unset PMI_APPNUM PMI_FD PMI_ID PMI_JOBID PMI_LOCAL_RANK PMI_LOCAL_SIZE PMI_PORT PMI_RANK
unset PMI_SIZE PMI_SPAWNED MPI_LOCALRANKID MPI_LOCALNRANKS
unset SLURM_STEP_ID SLURM_STEPID
unset SRUN_ERROR SRUN_INPUT SRUN_OUTPUT SLURM_STDERRMODE SLURM_STDINMODE SLURM_STDOUTMODE
)";

constexpr char kStartMore[] = R"sh(
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
  ddp_start+=("--cpus-per-task=$SLURM_CPUS_PER_TASK")
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}
fi
)sh";

constexpr char kRank[] = R"sh(
ddp_rank='trap : INT TERM USR1 USR2
[ "$SLURM_PROCID" != 0 ] || (: >"$0.begun") 2>/dev/null
"$@"
ddp_code=$?
[ $ddp_code = 0 ] || (set -C; echo "$ddp_code $SLURM_PROCID $SLURMD_NODENAME" >"$0") 2>/dev/null
exit $ddp_code'
)sh";

constexpr char kBegin[] = R"sh(
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
trap 'ddp_terminated=yes; ddp_pass_on TERM' TERM
trap 'ddp_end $?' EXIT
)sh";

constexpr char kRun[] = R"sh(
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

constexpr char kRequeue[] = R"sh(
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

constexpr char kEnd[] = R"sh(
ddp_names=([4]="Illegal instruction" [6]=Aborted [7]="Bus error" [8]="Floating point exception"
  [9]=Killed [11]="Segmentation fault")
ddp_name=${ddp_names[ddp_code > 128 ? ddp_code - 128 : 0]:-}
if [[ -n $ddp_failed && -z $ddp_terminated && -n $ddp_name ]]; then
  echo "error: rank $ddp_failed on $ddp_node was killed by signal" \
    "$((ddp_code - 128)) ($ddp_name)" >&2
fi
ddp_end "$ddp_code"
)sh";

TEST(ScriptTest, OfTheFewestOptions) {
  EXPECT_EQ(BatchScript(Smallest()), absl::StrCat(R"(#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --output=/stage/jobs/a/job.log
#SBATCH --open-mode=append
#SBATCH --chdir=/home/me
)",
                                                  kUnset, R"(
ddp_folder=/stage/jobs/a
ddp_command=(/stage/builds/0a/train --x=1)
ddp_cluster=
ddp_step_wait=${ddp_step_wait:-120}
ddp_start=(srun --kill-on-bad-exit=1 --export=ALL "--immediate=$ddp_step_wait"))",
                                                  kStartMore, kRank, kBegin, kRun, kEnd));
}

TEST(ScriptTest, OfAllOptions) {
  ScriptOptions options = Smallest();
  options.launch.nnodes = 2;
  options.launch.nproc_per_node = 8;
  options.launch.environment = {{"A", "1"}, {"B", "it's"}};
  SlurmOf(options) = {.partition = "main",
                      .gpus_per_node = 8,
                      .cpus_per_task = 4,
                      .mem = "16G",
                      .time = "1-12:00:00",
                      .account = "a b",
                      .qos = "a\\b\"c",
                      .constraint = "[x*2&y]",
                      .dependency = "afterok:7",
                      .clusters = "west",
                      .job_name = "mine",
                      .setup = {"module load cuda", "echo \"$HOSTNAME\""},
                      .srun_args = {"--cpu-bind=cores", "--exclude=n1", "n2", "--comment=a b"},
                      .label = true,
                      .requeue = true,
                      .max_requeues = 3,
                      .signal = "USR1@90",
                      .extra = {"--exclusive", "--comment=\"as it is\"", "--exclude=n1", "n2"}};
  options.after = "6";
  EXPECT_EQ(BatchScript(options), absl::StrCat(R"(#!/bin/bash
#SBATCH --job-name=mine
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --output=/stage/jobs/a/job.log
#SBATCH --open-mode=append
#SBATCH --chdir=/home/me
#SBATCH --partition=main
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G
#SBATCH --time=1-12:00:00
#SBATCH --account="a b"
#SBATCH --qos="a\\b\"c"
#SBATCH --constraint="[x*2&y]"
#SBATCH --clusters=west
#SBATCH --dependency=afterany:6,afterok:7
#SBATCH --requeue
#SBATCH --signal=B:USR1@90
#SBATCH --exclusive
#SBATCH --comment="as it is"
#SBATCH --exclude=n1,n2
)",
                                               kUnset, R"(export A=1
export B='it'\''s'

ddp_folder=/stage/jobs/a
ddp_command=(/stage/builds/0a/train --x=1)
ddp_cluster=';west'
ddp_step_wait=${ddp_step_wait:-120}
ddp_start=(srun --kill-on-bad-exit=1 --export=ALL "--immediate=$ddp_step_wait" --label --cpu-bind=cores --exclude=n1,n2 '--comment=a b'))",
                                               kStartMore, kRank, kBegin,
                                               R"(trap 'ddp_asked=USR1; ddp_pass_on USR1' USR1
ddp_max_requeues=3 ddp_stopped=$((128 + $(kill -l USR1)))
if ((ddp_restarts > ddp_max_requeues)); then
  echo "error: the job was queued again $ddp_restarts times," \
    "slurm.max_requeues=$ddp_max_requeues" >&2
  ddp_end 1
fi

module load cuda
echo "$HOSTNAME"

# Settings of the shell by these lines do not change what follows.
set +aefmuC +o pipefail
IFS=$' \t\n'
trap 'ddp_terminated=yes; ddp_pass_on TERM' TERM
trap 'ddp_end $?' EXIT
trap 'ddp_asked=USR1; ddp_pass_on USR1' USR1
ddp_step_wait=${ddp_step_wait:-120}
ddp_start=(srun --kill-on-bad-exit=1 --export=ALL "--immediate=$ddp_step_wait" --label --cpu-bind=cores --exclude=n1,n2 '--comment=a b'))",
                                               kStartMore, kRun, kRequeue, kEnd));
}

// The machine that submits may have no GPU, or others than the nodes.
TEST(ScriptTest, RanksPerNodeDependOnTheNodesAlone) {
  ScriptOptions options = Smallest();
  options.launch.default_nproc_per_node = 2;
  options.launch.default_nproc_here = 5;
  const auto tasks = [&](int n) {
    return absl::StrContains(BatchScript(options),
                             absl::StrCat("#SBATCH --ntasks-per-node=", n, "\n"));
  };
  EXPECT_TRUE(tasks(2));
  SlurmOf(options).gpus_per_node = 0;
  EXPECT_TRUE(tasks(2));
  SlurmOf(options).gpus_per_node = 8;
  EXPECT_TRUE(tasks(8));
  options.launch.nproc_per_node = 3;
  EXPECT_TRUE(tasks(3));
}

TEST(ScriptTest, OfAnArray) {
  ScriptOptions options = Smallest();
  options.folder = "/stage/100%";
  options.jobs.push_back(
      {.name = "other", .folder = "/runs/b b", .argv = {"/bin/train", "--x=2", "", "$HOME"}});
  options.at_once = 4;
  const std::string script = BatchScript(options);
  EXPECT_EQ(script, absl::StrCat(R"(#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --array=0-1%4
#SBATCH --output=/stage/100%%/%a/job.log
#SBATCH --open-mode=append
#SBATCH --chdir=/home/me
)",
                                 kUnset, R"(
case $SLURM_ARRAY_TASK_ID in
  0)
    ddp_folder=/stage/jobs/a
    ddp_command=(/stage/builds/0a/train --x=1)
    ;;
  1)
    ddp_folder='/runs/b b'
    ddp_command=(/stage/builds/0a/train --x=2 '' '$HOME')
    ;;
esac
ddp_cluster=
ddp_step_wait=${ddp_step_wait:-120}
ddp_start=(srun --kill-on-bad-exit=1 --export=ALL "--immediate=$ddp_step_wait"))",
                                 kStartMore, kRank, kBegin, kRun, kEnd));
  options.at_once = 0;
  EXPECT_TRUE(absl::StrContains(BatchScript(options), "#SBATCH --array=0-1\n"));
}

// Lists separate their elements by commas, in which sbatch's own lists have them, too.
TEST(ScriptTest, ListsOfNodesStayWhole) {
  ScriptOptions options = Smallest();
  SlurmOf(options).extra = {"--exclude=node[03-05", "07]", "--nodelist=node[1-2]"};
  EXPECT_TRUE(absl::StrContains(
      BatchScript(options), "#SBATCH --exclude=node[03-05,07]\n#SBATCH --nodelist=node[1-2]\n"));
}

TEST(ScriptTest, SignalAndItsTime) {
  EXPECT_EQ(SignalOf("USR2@120").name, "USR2");
  EXPECT_EQ(SignalOf("USR2@120").seconds, 120);
  EXPECT_EQ(SignalOf("USR2").seconds, -1);
  EXPECT_EQ(SignalOf("USR2@2m").seconds, -1);
}

TEST(ScriptTest, WordsSurviveBash) {
  const std::vector<std::string> words = {
      "plain",   "",     "a b",  "it's",  "\"quoted\"", "$HOME", "`id`", "a\nb\n",   "\\",  "*",
      "#SBATCH", "~",    "!!",   "a;b|c", "ünïcode",    "\t",    "(x)",  "{a,b}",    "'''", "--",
      "-n",      "$'x'", "<&2>", "a=b",   "$(exit 7)",  "%s",    "\r\n", "\x01\x7f", "[x]", "?"};
  std::string command = "printf '%s\\0'";
  std::string expected;
  for (const std::string& word : words) {
    absl::StrAppend(&command, " ", BashWord(word));
    absl::StrAppend(&expected, word, absl::string_view("\0", 1));
  }
  const auto result = RunCommand({"bash", "-c", command});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->out, expected) << result->err;
}

// Runs scripts with shell scripts in place of SLURM's commands.
class RunTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = absl::StrCat(testing::TempDir(), "/run ",
                           testing::UnitTest::GetInstance()->current_test_info()->name());
    ASSERT_TRUE(RemoveTree(folder_).ok());
    ASSERT_TRUE(MakeDirectories(folder_).ok());
    SqueueSays("exit 1");
    // SLURM ends the processes of the job while scontrol still runs.
    WriteProgram("scontrol",
                 "#!/bin/bash\necho \"$@\" >>\"$(dirname \"$0\")/requeued\"; kill -TERM $$\n");
  }

  // squeue tells how often the job was begun again, when it was preempted, and its reason.
  void SqueueSays(const std::string& body) {
    WriteProgram("squeue",
                 absl::StrCat("#!/bin/bash\n[[ $* == *--jobs=4711* ]] || exit 1\n", body));
  }

  // Exit code of the script, whose pid `srun` sees as $PPID. `srun` has an array, `task`: the words
  // that start a rank.
  int Run(const std::string& srun, const ScriptOptions& options) {
    WriteProgram("srun", absl::StrCat("#!/bin/bash\n", kRankOfSrun, srun));
    WriteProgram("job.sh", BatchScript(options));
    const std::string path = absl::StrCat(folder_, ":", getenv("PATH"));
    std::map<std::string, std::string> environment = {{"PATH", path},
                                                      {"RANK", "3"},
                                                      {"SLURM_JOB_ID", "4711"},
                                                      {"SLURM_ARRAY_TASK_ID", "1"},
                                                      {"SLURM_JOB_NODELIST", "n[1-2]"}};
    for (const auto& [name, value] : environment_) environment[name] = value;
    result_ = *RunCommand({absl::StrCat(folder_, "/job.sh")}, environment);
    return result_.exit_code;
  }

  static constexpr char kRankOfSrun[] = R"(
options=()
while [[ $1 != sh ]]; do options+=("$1"); shift; done
task=("$@")
# rank N COMMAND…: runs rank N, which is COMMAND in place of the program.
rank() { SLURM_PROCID=$1 SLURMD_NODENAME=n$1 "${task[@]:0:4}" "${@:2}"; }
)";

  std::string Contents(const std::string& name) {
    return ReadFile(absl::StrCat(folder_, "/", name)).value_or("none");
  }

  ScriptOptions Options() const {
    ScriptOptions options = Smallest();
    options.jobs[0].folder = folder_;
    return options;
  }

  ScriptOptions Requeued() const {
    ScriptOptions options = Options();
    SlurmOf(options).requeue = true;
    SlurmOf(options).max_requeues = 2;
    return options;
  }

  void WriteProgram(const std::string& name, const std::string& text) {
    const std::string path = absl::StrCat(folder_, "/", name);
    ASSERT_TRUE(RemoveTree(path).ok());
    absl::StatusOr<FileWriter> writer = FileWriter::Create(path, FileSystem::Default(), 0777);
    ASSERT_TRUE(writer.ok()) << writer.status();
    ASSERT_TRUE(writer->Append(text).ok());
    ASSERT_TRUE(writer->Finish().ok());
  }

  std::string folder_;
  std::map<std::string, std::string> environment_;
  CommandResult result_;
};

// The variables and functions that a script has for itself, by its text.
std::set<std::string> NamesIn(const std::string& script) {
  // NAME=, NAME+=, NAME(), "for NAME", "read -r NAME NAME".
  static const std::regex kNames(
      R"re((?:^|[ ;({'])(export )?(\w+)(?:\+?=|\(\) )|(?:^|[ ;])(?:for|read -\w+)((?: \w+)+))re");
  std::set<std::string> names;
  for (const std::string& line : std::vector<std::string>(absl::StrSplit(script, '\n'))) {
    if (absl::StartsWith(absl::StripLeadingAsciiWhitespace(line), "#")) continue;
    for (std::sregex_iterator match(line.begin(), line.end(), kNames), end; match != end; ++match) {
      if ((*match)[1].matched || (*match)[2] == "IFS") continue;  // not for itself
      const std::string several = (*match)[2].matched ? (*match)[2] : (*match)[3];
      for (absl::string_view name : absl::StrSplit(several, ' ', absl::SkipEmpty())) {
        if (name == "in") break;
        names.emplace(name);
      }
    }
  }
  return names;
}

// A rank that gets the signal and then ends as one that has saved.
constexpr char kStops[] = R"(
trap 'rank 0 bash -c "exit 140"; exit 140' USR2
trap 'rank 0 bash -c "exit 143"; exit 143' TERM
)";
// Asks the script to stop, as SLURM does.
constexpr char kAsks[] = "kill -USR2 $PPID; while :; do sleep 0.01; done";

TEST_F(RunTest, WritesTheCodeAndEndsWithIt) {
  ASSERT_TRUE(WriteFileAtomically(absl::StrCat(folder_, "/exit_code"), "77\n").ok());
  // The stale file is gone before the ranks start.
  EXPECT_EQ(Run("ls \"$(dirname \"$0\")\"; exit 3", Options()), 3);
  EXPECT_FALSE(absl::StrContains(result_.out, "exit_code")) << result_.out;
  EXPECT_EQ(result_.err, "");
  EXPECT_EQ(Contents("exit_code"), "3\n");
  EXPECT_EQ(Run("exit 0", Options()), 0);
  EXPECT_EQ(Contents("exit_code"), "0\n");
  EXPECT_EQ(Run("kill -KILL $$", Options()), 137);
  EXPECT_EQ(Contents("exit_code"), "137\n");
}

TEST_F(RunTest, EachAttemptIsALine) {
  EXPECT_EQ(Run("exit 0", Options()), 0);
  environment_["SLURM_RESTART_COUNT"] = "1";
  EXPECT_EQ(Run("exit 0", Options()), 0);
  const std::string attempts = Contents("attempts");
  EXPECT_TRUE(absl::StartsWith(attempts, "1: job 4711, restart 0, on n[1-2], 20")) << attempts;
  EXPECT_TRUE(absl::StrContains(attempts, "\n2: job 4711, restart 1, on n[1-2], 20")) << attempts;
  EXPECT_TRUE(absl::StartsWith(result_.err, "job 4711: attempt 2, restart 1, on")) << result_.err;
  // Whoever submitted it may have died before it knew the id.
  EXPECT_EQ(Contents("job_id"), "4711\n");
}

TEST_F(RunTest, CodeIsThatOfTheRankThatFailedFirst) {
  // srun ends the other rank, and its own code is the highest.
  constexpr char kSrun[] = R"sh(
failed=$(dirname "$0")/failed
rank 0 bash -c 'until [[ -e $0 ]]; do sleep 0.01; done; exit 143' "$failed" &
rank 1 bash -c "$fails" || touch "$failed"
wait
rm "$failed"
exit 143)sh";
  EXPECT_EQ(Run(absl::StrCat("fails='exit 70'", kSrun), Options()), 70);
  EXPECT_EQ(Contents("exit_code"), "70\n");
  EXPECT_EQ(Run(absl::StrCat("fails='kill -SEGV $$'", kSrun), Options()), 139);
  EXPECT_EQ(Contents("exit_code"), "139\n");
  EXPECT_TRUE(absl::StrContains(
      result_.err, "error: rank 1 on n1 was killed by signal 11 (Segmentation fault)\n"))
      << result_.err;
}

// Here srun gives up after a second. SLURM lets one without --immediate wait for ever.
TEST_F(RunTest, AJobWhoseRanksDidNotBeginIsQueuedAgain) {
  for (const bool requeue : {true, false}) {
    ScriptOptions options = requeue ? Requeued() : Options();
    SlurmOf(options).setup = {"ddp_step_wait=1"};
    EXPECT_EQ(Run("sleep 1.1; exit 1", options), 1);
    EXPECT_TRUE(absl::StrContains(result_.err,
                                  "error: SLURM has begun no rank on the job's nodes within 1 s\n"))
        << result_.err;
    EXPECT_EQ(Contents("requeued"), requeue ? "requeue 4711\n" : "none");
    ASSERT_TRUE(RemoveTree(folder_ + "/requeued").ok());
    EXPECT_EQ(Run("rank 0 sleep 1.1; exit 1", options), 1);
    EXPECT_EQ(Contents("requeued"), "none");
    EXPECT_FALSE(absl::StrContains(result_.err, "begun no rank")) << result_.err;
    EXPECT_EQ(Contents(".failure.2.begun"), "none");
  }
}

// SLURM signals all processes of a task, also the shell around the program.
TEST_F(RunTest, RankGetsItsSignalsAndSaves) {
  EXPECT_EQ(Run(R"sh(
here=$(dirname "$0")
SLURM_PROCID=0 "${task[@]:0:4}" bash -c '
  trap "echo saved; exit 143" TERM
  echo >"$0/ready"
  while :; do sleep 0.01; done' "$here" &
shell=$!
until [[ -e $here/ready ]]; do sleep 0.01; done
kill $shell $(</proc/$shell/task/$shell/children)
wait $shell)sh",
                Options()),
            143);
  EXPECT_EQ(result_.out, "saved\n");
}

TEST_F(RunTest, RanksGetWordsAndVariables) {
  ScriptOptions options = Options();
  options.launch.environment = {{"A", "a b"}};
  options.jobs.push_back(options.jobs[0]);
  options.jobs[1].argv = {"/bin/train", "--x=a b", "c\nd"};
  SlurmOf(options).srun_args = {"--comment=a b"};
  environment_["SLURM_CPUS_PER_TASK"] = "3";
  EXPECT_EQ(Run("printf '<%s>' \"${options[@]}\" \"${task[@]:4}\" \"$A\" \"${RANK-none}\" "
                "$OMP_NUM_THREADS",
                options),
            0);
  EXPECT_EQ(
      result_.out,
      "<--kill-on-bad-exit=1><--export=ALL><--immediate=120><--comment=a b><--cpus-per-task=3>"
      "</stage/builds/0a/train><--x=a b><c\nd><a b><none><3>");
  environment_["OMP_NUM_THREADS"] = "1";
  EXPECT_EQ(Run("echo $OMP_NUM_THREADS", options), 0);
  EXPECT_EQ(result_.out, "1\n");
}

TEST_F(RunTest, RanksGetNothingOfTheProcessThatSubmits) {
  for (const char* name :
       {"RUNFILES_DIR", "RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "PET_NNODES", "PET_NPROC_PER_NODE",
        "PET_RDZV_BACKEND", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RESTART_COUNT", "DDP_ATTEMPTS_FILE", "DDP_LAUNCHER", "DDP_MASTER_LISTEN_FD",
        "DDP_PROGRESS_FD", "OMPI_UNIVERSE_SIZE", "OMPI_COMM_WORLD_NODE_RANK", "OMPI_MCA_ess",
        "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_orte_local_daemon_uri",
        "OMPI_MCA_pmix", "PMIX_RANK", "PMIX_DSTORE_21_BASE_PATH", "PMIX_SERVER_URI41", "PMI_FD",
        "PMI_SIZE", "MPI_LOCALRANKID", "SLURM_STEP_ID", "SRUN_ERROR", "SLURM_STDOUTMODE",
        // The user's settings.
        "OMPI_MCA_btl", "PMIX_MCA_gds", "PMI_DEBUG", "SLURM_CPU_BIND"}) {
    environment_[name] = "foreign";
  }
  EXPECT_EQ(Run("env | sed -n 's/=foreign$//p' | LC_ALL=C sort", Options()), 0);
  EXPECT_EQ(result_.out, "OMPI_MCA_btl\nPMIX_MCA_gds\nPMI_DEBUG\nSLURM_CPU_BIND\n");
  EXPECT_EQ(result_.err, "");
}

TEST_F(RunTest, WritesACodeWhenItIsTerminated) {
  // Some ranks end at once, others do something before.
  EXPECT_EQ(Run("kill -TERM $PPID; exec sleep 1000", Options()), 143);
  EXPECT_EQ(Contents("exit_code"), "143\n");
  EXPECT_EQ(Run("trap 'echo saved; exit 0' TERM; kill -TERM $PPID; while :; do sleep 0.01; done",
                Options()),
            143);
  EXPECT_EQ(Contents("exit_code"), "143\n");
  EXPECT_EQ(result_.out, "saved\n");
}

TEST_F(RunTest, JobThatSlurmBeginsAgainHasNotEnded) {
  SqueueSays("echo '1   2026-01-01T00:00:00   None'");
  EXPECT_EQ(Run("kill -TERM $PPID; exec sleep 1000", Options()), 143);
  EXPECT_EQ(Contents("exit_code"), "none");
  // As when another node has failed.
  EXPECT_EQ(Run("exit 1", Options()), 1);
  EXPECT_EQ(Contents("exit_code"), "none");
  // It has been begun again before, and ends.
  environment_["SLURM_RESTART_COUNT"] = "1";
  EXPECT_EQ(Run("exit 1", Options()), 1);
  EXPECT_EQ(Contents("exit_code"), "1\n");
}

// SLURM has lost its node, and has begun the job elsewhere, but its processes are alive there.
TEST_F(RunTest, AFormerLifeDoesNotSayHowTheJobHasEnded) {
  EXPECT_EQ(Run("echo '2: job 4711' >>\"$(dirname \"$0\")/attempts\"; exit 1", Options()), 1);
  EXPECT_EQ(Contents("exit_code"), "none");
  EXPECT_TRUE(absl::StrContains(
      result_.err, "job 4711: a later attempt has begun: the job has not ended with code 1\n"))
      << result_.err;
}

TEST_F(RunTest, SetupRunsBeforeTheRanks) {
  ScriptOptions options = Options();
  SlurmOf(options).setup = {"export A=1", "if true; then", "B=2; export B; fi"};
  EXPECT_EQ(Run("echo $A $B", options), 0);
  EXPECT_EQ(result_.out, "1 2\n");
  SlurmOf(options).setup = {"exit 7"};
  EXPECT_EQ(Run("echo ran", options), 7);
  EXPECT_EQ(result_.out, "");
  EXPECT_EQ(Contents("exit_code"), "7\n");
}

TEST_F(RunTest, SetupMayUseVariablesAndSettingsOfItsOwn) {
  SqueueSays("echo 0 N/A None");
  ScriptOptions options = Requeued();
  // Each name of the script as a user may have it, in the setup and in the environment.
  std::vector<std::string>& setup = SlurmOf(options).setup;
  setup = {"x"};  // the script's lines after a setup, too
  const std::set<std::string> names = NamesIn(BatchScript(options));
  EXPECT_GE(names.size(), 25u) << absl::StrJoin(names, " ");
  setup = {};
  for (absl::string_view name : names) {
    EXPECT_TRUE(absl::ConsumePrefix(&name, "ddp_")) << name;
    setup.push_back(absl::StrCat("unset ", name, "; ", name, "=0; ", name, "() { exit 98; }"));
    environment_[std::string(name)] = "mine";
  }
  for (const char* line : {"set -aefmuC -o pipefail", "IFS=,", "trap '' TERM", "trap - USR2",
                           "trap 'echo mine' EXIT"}) {
    setup.push_back(line);
  }
  EXPECT_EQ(Run(absl::StrCat(kStops, kAsks), options), 140);
  EXPECT_EQ(Contents("requeued"), "requeue 4711\n");
  EXPECT_EQ(Contents("exit_code"), "none");
  EXPECT_EQ(Run("kill -TERM $PPID; exec sleep 1000", options), 143);
  EXPECT_EQ(Contents("exit_code"), "143\n");
  EXPECT_EQ(Run("rank 1 bash -c 'kill -SEGV $$'; exit 143", options), 139);
  EXPECT_EQ(Contents("exit_code"), "139\n");
  EXPECT_TRUE(absl::StrContains(result_.err, "error: rank 1 on n1 was killed by signal 11"))
      << result_.err;
  EXPECT_EQ(Contents("job_id"), "4711\n");
  EXPECT_EQ(Contents("requeued"), "requeue 4711\n");
  // The ranks have the user's variables, not the script's.
  setup = {};
  EXPECT_EQ(Run("env | grep -c '=mine$'", options), 0);
  EXPECT_EQ(result_.out, absl::StrCat(names.size(), "\n"));
}

TEST_F(RunTest, QueuesTheJobAgainWhenTheRanksHaveStopped) {
  SqueueSays("echo 0 N/A None");
  EXPECT_EQ(Run(absl::StrCat(kStops, kAsks), Requeued()), 140);
  EXPECT_EQ(Contents("requeued"), "requeue 4711\n");
  EXPECT_EQ(Contents("exit_code"), "none");
  EXPECT_TRUE(absl::StrContains(result_.err, "job 4711: is queued again, to go on\n"));
  // A task of an array has an id of its own: that of the last one is the whole array's.
  environment_["SLURM_ARRAY_JOB_ID"] = "4711";
  EXPECT_EQ(Run(absl::StrCat(kStops, kAsks), Requeued()), 140);
  EXPECT_EQ(Contents("requeued"), "requeue 4711\nrequeue 4711_1\n");
  EXPECT_EQ(Contents("job_id"), "4711\n4711_1\n");
}

TEST_F(RunTest, FiltersOfTheUsersSqueueDoNotHideTheJob) {
  environment_["SQUEUE_PARTITION"] = "debug";
  ScriptOptions options = Requeued();
  SlurmOf(options).setup = {"export SQUEUE_USERS=nobody"};
  SqueueSays("[[ -n ${SQUEUE_PARTITION-}${SQUEUE_USERS-} ]] || echo 0 N/A TimeLimit");
  EXPECT_EQ(Run("exit 1", options), 1);
  EXPECT_EQ(Contents("requeued"), "requeue 4711\n");
  EXPECT_EQ(Contents("exit_code"), "none");
}

TEST_F(RunTest, SignalBeforeTheRanksStart) {
  SqueueSays("echo 0 N/A None");
  ScriptOptions options = Requeued();
  SlurmOf(options).setup = {"kill -USR2 $$"};
  EXPECT_EQ(Run("echo ran", options), 140);
  EXPECT_EQ(result_.out, "");
  EXPECT_EQ(Contents("requeued"), "requeue 4711\n");
}

TEST_F(RunTest, QueuesTheJobAgainAfterItsTimeLimitAndInATimeOfGrace) {
  SqueueSays("echo 0 N/A TimeLimit");
  EXPECT_EQ(Run("kill -TERM $PPID; exec sleep 1000", Requeued()), 143);
  EXPECT_EQ(Contents("requeued"), "requeue 4711\n");
  SqueueSays("echo 0 2026-01-01T00:00:00 None");
  EXPECT_EQ(Run("rank 0 bash -c 'exit 143'; exit 143", Requeued()), 143);
  EXPECT_EQ(Contents("requeued"), "requeue 4711\nrequeue 4711\n");
  EXPECT_EQ(Contents("exit_code"), "none");
}

TEST_F(RunTest, WhatIsNotQueuedAgain) {
  SqueueSays("echo 0 N/A None");
  // Without the option, the signal is not asked for.
  EXPECT_EQ(Run("rank 0 bash -c 'exit 140'; exit 140", Options()), 140);
  // It has finished before it saw the signal, or failed.
  EXPECT_EQ(Run("trap 'exit 0' USR2\nkill -USR2 $PPID; while :; do sleep 0.01; done", Requeued()),
            0);
  EXPECT_EQ(Contents("exit_code"), "0\n");
  EXPECT_EQ(Run("trap 'exit 1' USR2\nkill -USR2 $PPID; while :; do sleep 0.01; done", Requeued()),
            1);
  EXPECT_EQ(Contents("exit_code"), "1\n");
  // It is cancelled, also after the signal.
  EXPECT_EQ(Run(absl::StrCat(kStops, "kill -TERM $PPID; while :; do sleep 0.01; done"), Requeued()),
            143);
  EXPECT_EQ(
      Run("trap '' USR2; trap 'exit 143' TERM\nkill -USR2 $PPID; sleep 0.1; kill -TERM $PPID; "
          "while :; do sleep 0.01; done",
          Requeued()),
      143);
  EXPECT_EQ(Contents("exit_code"), "143\n");
  // That happened often enough.
  environment_["SLURM_RESTART_COUNT"] = "2";
  SqueueSays("echo 2 N/A None");
  EXPECT_EQ(Run(absl::StrCat(kStops, kAsks), Requeued()), 140);
  EXPECT_EQ(Contents("exit_code"), "140\n");
  EXPECT_TRUE(absl::StrContains(result_.err, "that has happened 2 times, slurm.max_requeues=2\n"))
      << result_.err;
  environment_["SLURM_RESTART_COUNT"] = "3";
  EXPECT_EQ(Run("echo ran", Requeued()), 1);
  EXPECT_EQ(result_.out, "");
  EXPECT_EQ(Contents("exit_code"), "1\n");
  EXPECT_EQ(Contents("requeued"), "none");
}

TEST_F(RunTest, RequeueThatIsRefusedIsSaid) {
  SqueueSays("echo 0 N/A None");
  WriteProgram("scontrol", "#!/bin/bash\necho 'Requeue is disabled'; exit 1\n");
  EXPECT_EQ(Run(absl::StrCat(kStops, kAsks), Requeued()), 140);
  EXPECT_EQ(Contents("exit_code"), "140\n");
  EXPECT_TRUE(
      absl::StrContains(result_.err, "job 4711: cannot be queued again: Requeue is disabled\n"))
      << result_.err;
}

}  // namespace
}  // namespace ddp::launchers::slurm
