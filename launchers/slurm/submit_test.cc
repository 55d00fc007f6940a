// Launcher slurm with shell scripts in place of sbatch and squeue; tests/e2e/sbatch.sh has the real
// ones.
#include "launchers/slurm/submit.h"

#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/option_error.h"
#include "gtest/gtest.h"
#include "launchers/launcher.h"
#include "launchers/queue.h"
#include "launchers/slurm/fake_commands.h"
#include "launchers/slurm/options.h"

namespace ddp::launchers::slurm {
namespace {

namespace fs = std::filesystem;

class SubmitTest : public testing::Test {
 protected:
  SubmitTest() {
    commands_.Write("program", "echo ran \"$@\"");
    commands_.Write("sbatch", "echo 41 | tee $HERE/submitted");
    options_.argv = {absl::StrCat(commands_.folder(), "/program"), "--x=a b"};
    slurm().stage_dir = absl::StrCat(commands_.folder(), "/stage");
  }

  SlurmOptions& slurm() { return options_.implementations.Mutable<SlurmOptions>("slurm"); }

  std::vector<std::string> JobFolders() const {
    return ListDirectory(absl::StrCat(commands_.folder(), "/stage/jobs"))
        .value_or(std::vector<std::string>());
  }

  // Path of the only job's file.
  std::string File(absl::string_view name) const {
    const std::vector<std::string> folders = JobFolders();
    EXPECT_EQ(folders.size(), 1u);
    return absl::StrCat(commands_.folder(), "/stage/jobs/", folders.at(0), "/", name);
  }

  absl::StatusOr<LaunchResult> Run() {
    testing::internal::CaptureStdout();
    absl::StatusOr<LaunchResult> result = (*CreateLauncher("slurm"))->Launch(options_);
    out_ = testing::internal::GetCapturedStdout();
    return result;
  }

  // Expects an error about an option, and that nothing was submitted.
  std::string Refused() {
    const absl::Status status = Run().status();
    EXPECT_TRUE(ProblemOf(status).has_value()) << status;
    EXPECT_EQ(commands_.Contents("submitted"), "none");
    EXPECT_TRUE(JobFolders().empty());
    return std::string(status.message());
  }

  FakeCommands commands_{"submit"};
  LaunchOptions options_ = {.name = "slurm", .nnodes = 2};
  std::string out_;
};

TEST_F(SubmitTest, LaunchSubmitsThisCommand) {
  const absl::StatusOr<LaunchResult> result = Run();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->exit_code, 0);
  EXPECT_EQ(*ReadFile(File("job_id")), "41\n");
  EXPECT_EQ(out_, absl::StrCat("job 41: submitted\n  script: ", File("job.sh"),
                               "\n  log:    ", File("job.log"), "\n"));
  const std::string script = *ReadFile(File("job.sh"));
  EXPECT_TRUE(absl::StrContains(script, "#SBATCH --nodes=2\n")) << script;
  EXPECT_TRUE(absl::StrContains(script, "/stage/builds/")) << script;
  EXPECT_TRUE(absl::StrContains(script, "/program '--x=a b')\n")) << script;
  EXPECT_FALSE(fs::exists(File("exit_code")));
}

TEST_F(SubmitTest, WaitsForTheJob) {
  slurm().wait = true;
  commands_.Write("srun", "shift 3; \"$@\"; exit 5");
  commands_.Write("squeue",
                  "if [[ $* == *RestartCnt* ]]; then echo 0 N/A None; else echo 41 R; fi");
  commands_.Write("sbatch", R"(bash "$2" >"$(dirname "$2")/job.log" 2>&1; echo 41)");
  const absl::StatusOr<LaunchResult> result = Run();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->exit_code, 5);
  EXPECT_TRUE(absl::EndsWith(out_, "ran --x=a b\n")) << out_;
}

// Its id would be lost otherwise, and nobody could cancel it.
TEST_F(SubmitTest, SignalDuringSbatchWaitsForTheId) {
  commands_.Write("squeue", "echo 41 R");
  commands_.Write("scancel", "echo \"$@\" >>$HERE/cancelled");
  commands_.Write("sbatch", "kill -TERM $PPID; sleep 0.2; echo 41");
  for (const bool wait : {false, true}) {
    SCOPED_TRACE(wait);
    slurm().wait = wait;
    slurm().on_interrupt = "leave";
    const absl::StatusOr<LaunchResult> left = Run();
    ASSERT_TRUE(left.ok()) << left.status();
    EXPECT_EQ(left->exit_code, 143);
    EXPECT_TRUE(absl::StrContains(left->description, "interrupted: job 41 goes on"))
        << left->description;
    EXPECT_EQ(commands_.Contents("cancelled"), "none");
    slurm().on_interrupt = "cancel";
    const absl::StatusOr<LaunchResult> cancelled = Run();
    ASSERT_TRUE(cancelled.ok()) << cancelled.status();
    EXPECT_EQ(cancelled->exit_code, 143);
    EXPECT_TRUE(absl::StrContains(cancelled->description, "job 41 is cancelled"))
        << cancelled->description;
    EXPECT_EQ(commands_.Contents("cancelled"), "41\n");
    fs::remove(absl::StrCat(commands_.folder(), "/cancelled"));
  }
}

TEST_F(SubmitTest, RefusedJobLeavesNothing) {
  commands_.Write("sbatch", "echo 'sbatch: error: no such partition' >&2; exit 1");
  EXPECT_EQ(Run().status().message(), "sbatch refuses the job: no such partition");
  commands_.Write("sbatch", "echo 'not on this login node'; exit 1");
  EXPECT_EQ(Run().status().message(), "sbatch refuses the job: not on this login node");
  commands_.Write("sbatch", "exit 3");
  EXPECT_EQ(Run().status().message(), "sbatch refuses the job: exit code 3, without a word");
  EXPECT_EQ(out_, "");
  EXPECT_TRUE(JobFolders().empty());
}

TEST_F(SubmitTest, DryRunPrintsTheScriptAndWritesNothing) {
  slurm().dry_run = true;
  ASSERT_TRUE(Run().ok());
  EXPECT_TRUE(absl::StartsWith(out_, "#!/bin/bash\n#SBATCH --job-name=program\n")) << out_;
  EXPECT_FALSE(fs::exists(slurm().stage_dir));
  EXPECT_EQ(commands_.Contents("submitted"), "none");
}

TEST_F(SubmitTest, StageFolderThatCannotBeWritten) {
  ASSERT_TRUE(WriteFileAtomically(slurm().stage_dir, "a file").ok());
  const std::string message = Refused();
  EXPECT_TRUE(absl::StrContains(message, "stage_dir=")) << message;
  EXPECT_TRUE(absl::StrContains(message, "cannot be written: ")) << message;
  EXPECT_TRUE(absl::StrContains(message, "Not a directory")) << message;
}

TEST_F(SubmitTest, OptionsThatCannotBe) {
  slurm().extra = {"--exclusive\nrm"};
  EXPECT_TRUE(absl::StrContains(Refused(), "slurm.extra="));
  slurm().extra = {"exclusive"};
  EXPECT_TRUE(absl::StrContains(Refused(), "slurm.extra=exclusive must be options of sbatch"));
  for (const char* extra : {"--clusters=west", "-M west"}) {
    slurm().extra = {extra};
    EXPECT_TRUE(absl::StrContains(Refused(), " must not name the cluster: slurm.clusters does"));
  }
  slurm().extra = {};
  slurm().partition = "a\nb";
  EXPECT_TRUE(absl::StrContains(Refused(), "slurm.partition="));
  slurm().partition = "";
  slurm().srun_args = {"cores"};
  EXPECT_TRUE(absl::StrContains(Refused(), "slurm.srun_args=cores must be options of srun"));
  slurm().srun_args = {};
  for (const char* signal : {"TERM@60", "USR2", "USR2@0", "USR2@99999", "USR2@1m", ""}) {
    slurm().signal = signal;
    EXPECT_TRUE(absl::StrContains(Refused(), absl::StrCat("slurm.signal=", signal, " must be")));
  }
  slurm().signal = "USR1@60";
  slurm().requeue = true;
  for (const char* time : {"2", "1:59", "0:02:00", "0-0:2"}) {
    slurm().time = time;
    EXPECT_TRUE(absl::StrContains(
        Refused(), absl::StrCat("slurm.signal=USR1@60 leaves no time to run: it comes up to 120 "
                                "seconds before the time limit, slurm.time=",
                                time)));
  }
  slurm().requeue = false;
  slurm().clusters = "a,b";
  EXPECT_TRUE(absl::StrContains(Refused(), "slurm.clusters=a,b must be the name of one cluster"));
  slurm().clusters = "";
  options_.max_restarts = 1;
  EXPECT_TRUE(absl::StrContains(Refused(), "max_restarts=1 is not for launcher 'slurm'"));
}

TEST_F(SubmitTest, RequeuedJobHasTimeToRun) {
  slurm().requeue = true;
  slurm().dry_run = true;
  for (const char* time : {"", "4", "3:01", "1:00:00", "1-0", "1-0:00:01", "0", "INFINITE", "x"}) {
    slurm().time = time;
    EXPECT_TRUE(Run().ok()) << time;
  }
}

TEST_F(SubmitTest, NotFromWithinAJob) {
  setenv("SLURM_JOB_ID", "9", 1);
  const std::string message = Refused();
  const absl::Status submit = (*CreateLauncher("slurm"))->Submit({{}}, 0, {}).status();
  unsetenv("SLURM_JOB_ID");
  EXPECT_TRUE(absl::StrContains(message, "from within SLURM job 9")) << message;
  EXPECT_TRUE(absl::StrContains(message, "srun --nodes=")) << message;
  EXPECT_EQ(submit.message(), message);
}

// Jobs of several combinations of options.
class SubmitJobsTest : public SubmitTest {
 protected:
  SubmitJobsTest() {
    // Ids from 41 on; remembers the header of each script in sbatch.N.
    commands_.Write("sbatch", R"(
n=$(($(cat $HERE/n 2>/dev/null) + 1)); echo $n >$HERE/n
grep ^#SBATCH "$2" >$HERE/sbatch.$n
! grep -q nodes=4 "$2" || { echo 'sbatch: error: too many nodes' >&2; exit 1; }
echo $((40 + n)))");
    commands_.Write("scontrol", "echo 'MaxArraySize = 1001'");
  }

  BatchJob& AddJob(const std::string& name, int nnodes = 2) {
    BatchJob& job = jobs_.emplace_back();
    job = {.name = name,
           .folder = absl::StrCat(commands_.folder(), "/", name),
           .argv = {options_.argv[0], name},
           .launch = options_};
    job.launch.nnodes = nnodes;
    EXPECT_TRUE(MakeDirectories(job.folder).ok());
    return job;
  }

  std::vector<absl::Status> Submitted(int at_once = 0,
                                      const std::vector<std::string>& unfinished = {}) {
    testing::internal::CaptureStderr();
    auto statuses = (*CreateLauncher("slurm"))->Submit(jobs_, at_once, unfinished);
    out_ = testing::internal::GetCapturedStderr();
    EXPECT_TRUE(statuses.ok()) << statuses.status();
    return statuses.ok() ? *std::move(statuses) : std::vector<absl::Status>(jobs_.size());
  }

  // Line `option` of the script of the n-th array; "none" if there is none.
  std::string Line(int n, absl::string_view option) {
    const std::string header = commands_.Contents(absl::StrCat("sbatch.", n));
    const std::string begin = absl::StrCat("#SBATCH --", option, "=");
    const size_t found = header.find(begin);
    if (found == std::string::npos) return "none";
    const size_t from = found + begin.size();
    return header.substr(from, header.find('\n', from) - from);
  }

  std::vector<BatchJob> jobs_;
};

TEST_F(SubmitJobsTest, SeveralJobsAreAnArray) {
  AddJob("a");
  AddJob("b c");
  for (const BatchJob& job : jobs_) {
    ASSERT_TRUE(WriteExitCode(job.folder, 1).ok());
    ASSERT_TRUE(WriteFileAtomically(absl::StrCat(job.folder, "/job.log"), "old").ok());
  }
  for (const absl::Status& status : Submitted(1)) EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(absl::StartsWith(out_, "job 41: submitted, an array of 2 jobs\n")) << out_;
  EXPECT_EQ(commands_.Contents("a/job_id"), "41_0\n");
  EXPECT_EQ(commands_.Contents("b c/job_id"), "41_1\n");
  EXPECT_EQ(commands_.Contents("a/exit_code"), "none");
  EXPECT_EQ(commands_.Contents("a/job.log.previous"), "old");
  EXPECT_EQ(fs::read_symlink(File("1")), jobs_[1].folder);
  const std::string script = *ReadFile(File("job.sh"));
  EXPECT_TRUE(absl::StrContains(script, "#SBATCH --array=0-1%1\n")) << script;
  EXPECT_TRUE(absl::StrContains(script, "/%a/job.log\n")) << script;
}

TEST_F(SubmitJobsTest, EarlierIdsAreRemembered) {
  AddJob("a");
  EXPECT_TRUE(Submitted()[0].ok());
  EXPECT_TRUE(Submitted()[0].ok());
  EXPECT_EQ(commands_.Contents("a/job_id"), "41\n42\n");
  EXPECT_EQ(*ReadJobIds(jobs_[0].folder), (std::vector<std::string>{"41", "42"}));
}

// The job writes its id, too, and must write the same; later calls ask this cluster.
TEST_F(SubmitJobsTest, ClusterOfAVariableIsThatOfTheJobs) {
  AddJob("a");
  AddJob("b");
  commands_.Write("sbatch",
                  "cat $HERE/b/job_id >$HERE/seen; cp \"$2\" $HERE/script; echo '41;west'");
  setenv("SBATCH_CLUSTERS", "west", 1);
  EXPECT_TRUE(Submitted()[0].ok());
  setenv("SBATCH_CLUSTERS", "west,east", 1);
  EXPECT_EQ(ProblemOf((*CreateLauncher("slurm"))->Submit(jobs_, 0, {}).status())->path,
            "slurm.clusters");
  EXPECT_EQ(ProblemOf(Run().status())->path, "slurm.clusters");
  unsetenv("SBATCH_CLUSTERS");
  EXPECT_EQ(commands_.Contents("b/job_id"), "41_1;west\n");
  EXPECT_TRUE(absl::StrContains(commands_.Contents("seen"), " 1 west "));
  EXPECT_TRUE(absl::StrContains(commands_.Contents("script"), "\nddp_cluster=';west'\n"));
}

TEST_F(SubmitJobsTest, EachRequestIsAnArrayOfItsOwn) {
  AddJob("one", 1);
  AddJob("two", 2);
  AddJob("one_too", 1);
  AddJob("long", 1).launch.implementations.Mutable<SlurmOptions>("slurm").time = "60";
  for (const absl::Status& status : Submitted()) EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(commands_.Contents("n"), "3\n");
  EXPECT_EQ(Line(1, "nodes"), "1");
  EXPECT_EQ(Line(1, "array"), "0-1");
  EXPECT_EQ(Line(2, "nodes"), "2");
  EXPECT_EQ(Line(2, "array"), "none");
  EXPECT_EQ(Line(3, "time"), "60");
  EXPECT_EQ(commands_.Contents("one/job_id"), "41_0\n");
  EXPECT_EQ(commands_.Contents("one_too/job_id"), "41_1\n");
  EXPECT_EQ(commands_.Contents("two/job_id"), "42\n");
  EXPECT_EQ(commands_.Contents("long/job_id"), "43\n");
  EXPECT_EQ(Line(2, "dependency"), "none");
}

// SLURM limits the jobs of one array only.
TEST_F(SubmitJobsTest, LimitHoldsForAllArrays) {
  AddJob("one", 1);
  AddJob("two", 2).launch.implementations.Mutable<SlurmOptions>("slurm").dependency = "afterok:7";
  AddJob("one_too", 1);
  for (const absl::Status& status : Submitted(1)) EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(Line(1, "array"), "0-1%1");
  EXPECT_EQ(Line(1, "dependency"), "none");
  EXPECT_EQ(Line(2, "dependency"), "afterany:41,afterok:7");
  jobs_[1].launch.implementations.Mutable<SlurmOptions>("slurm").dependency = "afterok:7?afterok:8";
  EXPECT_EQ(ProblemOf((*CreateLauncher("slurm"))->Submit(jobs_, 1, {}).status())->path,
            "slurm.dependency");
}

TEST_F(SubmitJobsTest, LimitHoldsWithWhatIsInTheQueueAlready) {
  AddJob("one", 1);
  AddJob("two", 2);
  const std::vector<std::string> unfinished = {"7_0", "7_3", "9", "8;west"};
  for (const absl::Status& status : Submitted(2, unfinished)) EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(Line(1, "dependency"), "afterany:7:9");
  EXPECT_EQ(Line(2, "dependency"), "afterany:41");
  for (const absl::Status& status : Submitted(0, unfinished)) EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(Line(3, "dependency"), "none");
}

TEST_F(SubmitJobsTest, JobWhoseIdCannotBeWrittenIsQueuedAllTheSame) {
  AddJob("a");
  commands_.Write("sbatch", "rm $HERE/a/job_id; mkdir $HERE/a/job_id; echo 41");
  const absl::Status status = Submitted()[0];
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(absl::StartsWith(status.message(), "job 41 is queued, but ")) << status;
}

// By this line a later call finds a job whose submission has had no answer.
TEST_F(SubmitJobsTest, SubmissionIsNotedBeforeItIsMade) {
  AddJob("a");
  AddJob("b");
  commands_.Write("sbatch", R"(
cat $HERE/a/job_id >$HERE/seen_a; cat $HERE/b/job_id >$HERE/seen_b
echo "$2" >$HERE/script; echo 41)");
  for (const absl::Status& status : Submitted()) EXPECT_TRUE(status.ok()) << status;
  const std::string script = commands_.Contents("script");
  for (const auto& [file, task] : {std::pair("seen_a", 0), std::pair("seen_b", 1)}) {
    const std::string line = commands_.Contents(file);
    EXPECT_TRUE(absl::StartsWith(line, kSubmitting)) << line;
    EXPECT_TRUE(absl::EndsWith(line, absl::StrCat(" ", getpid(), " ", task, " - ", script)))
        << line;
  }
  EXPECT_EQ(commands_.Contents("a/job_id"), "41_0\n");
  EXPECT_EQ(commands_.Contents("b/job_id"), "41_1\n");
}

// Its controller may have the jobs, though its answer was lost: they are not submitted again.
TEST_F(SubmitJobsTest, SubmissionWithoutAnAnswerStaysNoted) {
  AddJob("a");
  AddJob("b");
  commands_.Write("sbatch", R"(
echo "$2" >$HERE/script
echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2
exit 1)");
  commands_.Write("squeue", "true");
  const std::vector<absl::Status> statuses = Submitted();
  EXPECT_EQ(statuses[0].code(), absl::StatusCode::kDeadlineExceeded) << statuses[0];
  EXPECT_TRUE(absl::StrContains(statuses[0].message(), "sbatch: Batch job submission failed: "))
      << statuses[0];
  EXPECT_EQ(statuses[1], statuses[0]);
  const std::string script = *ReadFile(File("job.sh"));
  EXPECT_TRUE(absl::StrContains(script, "#SBATCH --array=0-1\n")) << script;
  std::vector<std::string> ids;
  for (const BatchJob& job : jobs_) ids.push_back(ReadJobIds(job.folder)->at(0));
  EXPECT_TRUE(IsSubmitting(ids[0])) << ids[0];
  const auto queue = CreateLauncher("slurm");
  using StateMap = std::map<std::string, std::string>;
  EXPECT_EQ(*(*queue)->Unfinished(ids), StateMap({{ids[0], "unknown"}, {ids[1], "unknown"}}));
  commands_.Write("squeue", R"sh(
if [[ $* == *%o* ]]; then echo "7 $(<$HERE/script)"; else echo 7_0 PD; echo 7_1 R; fi)sh");
  EXPECT_EQ(*(*queue)->Unfinished(ids), StateMap({{ids[0], "queued"}, {ids[1], "running"}}));
}

TEST_F(SubmitJobsTest, JobThatCannotBeNotedIsNotSubmitted) {
  AddJob("a");
  ASSERT_TRUE(WriteExitCode(jobs_[0].folder, 5).ok());
  ASSERT_TRUE(MakeDirectories(absl::StrCat(jobs_[0].folder, "/job_id")).ok());
  EXPECT_FALSE(Submitted()[0].ok());
  EXPECT_EQ(commands_.Contents("n"), "none");
  EXPECT_EQ(ReadExitCode(jobs_[0].folder), 5);
}

TEST_F(SubmitJobsTest, RefusalStopsNoOthersAndLeavesFoldersAsTheyWere) {
  AddJob("two", 2);
  AddJob("four", 4);
  AddJob("four_too", 4);
  AddJob("one", 1);
  ASSERT_TRUE(WriteExitCode(jobs_[1].folder, 5).ok());
  ASSERT_TRUE(WriteFileAtomically(absl::StrCat(jobs_[1].folder, "/job.log"), "old").ok());
  const std::vector<absl::Status> statuses = Submitted(1);
  EXPECT_TRUE(statuses[0].ok());
  EXPECT_EQ(statuses[1].message(), "sbatch refuses the job: too many nodes");
  EXPECT_EQ(statuses[2], statuses[1]);
  EXPECT_TRUE(statuses[3].ok());
  EXPECT_EQ(ReadExitCode(jobs_[1].folder), 5);
  EXPECT_EQ(commands_.Contents("four/job.log"), "old");
  EXPECT_EQ(*ListDirectory(jobs_[2].folder), std::vector<std::string>());
  EXPECT_TRUE(JobFolders().empty());  // of arrays
  EXPECT_EQ(commands_.Contents("one/job_id"), "43\n");
  EXPECT_EQ(Line(3, "dependency"), "afterany:41");
}

TEST_F(SubmitJobsTest, ArraysHaveAtMostMaxArraySize) {
  commands_.Write("scontrol", "echo 'MaxArraySize = 2'");
  for (const char* name : {"a", "b", "c", "d", "e"}) AddJob(name);
  for (const absl::Status& status : Submitted()) EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(commands_.Contents("n"), "3\n");
  EXPECT_EQ(Line(2, "array"), "0-1");
  EXPECT_EQ(commands_.Contents("c/job_id"), "42_0\n");
  EXPECT_EQ(commands_.Contents("e/job_id"), "43\n");
}

TEST_F(SubmitJobsTest, ArrayRunsOneProgram) {
  AddJob("a");
  AddJob("b").argv = {"/bin/false"};
  EXPECT_EQ(Submit(jobs_, 0, {}, stderr).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Submit({}, 0, {}, stderr).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace ddp::launchers::slurm
