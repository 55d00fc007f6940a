#include "launchers/slurm/queue.h"

#include <stdlib.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/option_error.h"
#include "gtest/gtest.h"
#include "launchers/slurm/fake_commands.h"

namespace ddp::launchers::slurm {
namespace {

using StateMap = std::map<std::string, std::string>;

class QueueTest : public testing::Test {
 protected:
  absl::StatusOr<std::string> SubmitText(const std::string& script) {
    const std::string path = absl::StrCat(commands_.folder(), "/job.sh");
    EXPECT_TRUE(WriteFileAtomically(path, script).ok());
    return SubmitScript(path);
  }

  FakeCommands commands_{"queue"};
};

TEST_F(QueueTest, SubmitReturnsTheId) {
  commands_.Write("sbatch",
                  "echo \"$@\" >$HERE/args; echo 'Welcome to the cluster'; echo '12;west'");
  EXPECT_EQ(SubmitText("").value_or("error"), "12;west");
  EXPECT_EQ(commands_.Contents("args"),
            absl::StrCat("--parsable ", commands_.folder(), "/job.sh\n"));
}

TEST_F(QueueTest, RefusalIsInSlurmsWordsOnOneLine) {
  commands_.Write("sbatch",
                  "echo 'sbatch: error: invalid partition specified: x' >&2\n"
                  "echo 'sbatch: error: Batch job submission failed: No' >&2; exit 1");
  const absl::Status status = SubmitText("").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(status.message(),
            "sbatch refuses the job: invalid partition specified: x; Batch job submission failed: "
            "No");
}

TEST_F(QueueTest, SbatchWithoutAnAnswerMayHaveSubmitted) {
  commands_.Write("squeue", "[[ -e $HERE/in_queue ]] && echo \"9 $HERE/job.sh\"");
  const std::string lost =
      "touch $HERE/in_queue; echo \"sbatch: error: Batch job submission failed: $words\" >&2; exit "
      "1";
  for (const char* words :
       {"Socket timed out on send/recv operation", "Zero Bytes were transmitted or received",
        "Unable to contact slurm controller (receive failure)", "Connection reset by peer"}) {
    commands_.Write("sbatch", absl::StrCat("words='", words, "'\n", lost));
    EXPECT_EQ(SubmitText("").value_or("error"), "9") << words;
  }
  commands_.Write("sbatch", "touch $HERE/in_queue; kill -KILL $$");
  EXPECT_EQ(SubmitText("").value_or("error"), "9");
  // There was no connection.
  commands_.Write("sbatch", absl::StrCat("words='Unable to contact slurm controller (connect "
                                         "failure)'\n",
                                         lost));
  EXPECT_EQ(SubmitText("").status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(QueueTest, SomethingElseThanAnIdIsNoRefusal) {
  commands_.Write("squeue", "[[ -e $HERE/in_queue ]] && echo \"9 $HERE/job.sh\"");
  commands_.Write("sbatch", "touch $HERE/in_queue; echo Submitted batch job 12");
  EXPECT_EQ(SubmitText("").value_or("error"), "9");
}

// sbatch's variables count for more than a script's lines.
TEST_F(QueueTest, OptionsOfTheScriptCountForMoreThanVariables) {
  commands_.Write("sbatch",
                  "env | sed -n 's/=set by the user$//p' | sort | xargs >$HERE/seen; echo 1");
  const std::vector<std::string> names = {
      "SBATCH_ACCOUNT",     "SBATCH_ERROR",       "SBATCH_GPUS",         "SBATCH_INPUT",
      "SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU", "SBATCH_MEM_PER_NODE", "SBATCH_NO_REQUEUE",
      "SBATCH_PARTITION",   "SBATCH_RESERVATION", "SBATCH_TIMELIMIT",    "SBATCH_WAIT",
      "SLURM_CLUSTERS"};
  for (const std::string& name : names) setenv(name.c_str(), "set by the user", 1);
  // Which variables sbatch sees with a script of these lines.
  const auto seen = [&](const std::string& lines) {
    EXPECT_TRUE(SubmitText("#!/bin/bash\n" + lines).ok());
    return commands_.Contents("seen");
  };
  EXPECT_EQ(seen(""),
            "SBATCH_ACCOUNT SBATCH_ERROR SBATCH_GPUS SBATCH_MEM_PER_CPU SBATCH_MEM_PER_GPU "
            "SBATCH_MEM_PER_NODE SBATCH_NO_REQUEUE SBATCH_PARTITION SBATCH_RESERVATION "
            "SBATCH_TIMELIMIT SLURM_CLUSTERS\n");
  EXPECT_EQ(seen("#SBATCH --partition=gpu\n#SBATCH --requeue\n#SBATCH --time=1:00\n"),
            "SBATCH_ACCOUNT SBATCH_ERROR SBATCH_GPUS SBATCH_MEM_PER_CPU SBATCH_MEM_PER_GPU "
            "SBATCH_MEM_PER_NODE SBATCH_RESERVATION SLURM_CLUSTERS\n");
  EXPECT_EQ(seen("#SBATCH --output=a/job.log\n#SBATCH --mem=1G\n#SBATCH --gpus-per-node=8\n"
                 "#SBATCH --clusters=west\n"),
            "SBATCH_ACCOUNT SBATCH_NO_REQUEUE SBATCH_PARTITION SBATCH_RESERVATION "
            "SBATCH_TIMELIMIT\n");
  // Lines of slurm.extra, which may have a space in place of "=".
  EXPECT_EQ(seen("#SBATCH --mem-per-cpu 1G\n#SBATCH --reservation=mine\n"),
            "SBATCH_ACCOUNT SBATCH_ERROR SBATCH_GPUS SBATCH_MEM_PER_GPU SBATCH_MEM_PER_NODE "
            "SBATCH_NO_REQUEUE SBATCH_PARTITION SBATCH_TIMELIMIT SLURM_CLUSTERS\n");
  for (const std::string& name : names) unsetenv(name.c_str());
}

TEST_F(QueueTest, MissingCommandsAreNamed) {
  const std::string path = getenv("PATH");
  setenv("PATH", "/nowhere", 1);
  const absl::Status submitted = SubmitText("").status();
  const absl::Status states = States({"1"}).status();
  setenv("PATH", path.c_str(), 1);
  EXPECT_EQ(submitted.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(absl::StrContains(submitted.message(), "finds no sbatch in PATH")) << submitted;
  EXPECT_EQ(ProblemOf(submitted)->path, "launcher");
  EXPECT_TRUE(absl::StrContains(states.message(), "finds no squeue in PATH")) << states;
}

TEST_F(QueueTest, StatesOfJobsAndOfTasksOfArrays) {
  commands_.Write("squeue",
                  "echo \"$@\" >$HERE/args\n"
                  "printf '7 PD\\n8 R\\n9_0 CG\\n9_1 R \\n9_2 PD\\n9_3 CF\\n10 RQ\\n11 S\\n'");
  EXPECT_EQ(*States({"7", "8", "9_0", "9_2", "9_3", "9_4", "10", "11", "12"}),
            StateMap({{"7", "queued"},
                      {"8", "running"},
                      {"9_0", "running"},
                      {"9_2", "queued"},
                      {"9_3", "queued"},
                      {"10", "queued"},
                      {"11", "running"}}));
  EXPECT_EQ(commands_.Contents("args"),
            "--noheader --array --format=%i %t --jobs=10,11,12,7,8,9\n");
}

TEST_F(QueueTest, EachClusterIsAskedForItsJobs) {
  commands_.Write("sbatch", "echo '12;west'");
  EXPECT_EQ(SubmitText("#!/bin/bash\n#SBATCH --clusters=west\n").value_or("error"), "12;west");
  commands_.Write("sbatch", "echo 12");
  EXPECT_EQ(SubmitText("#!/bin/bash\n#SBATCH --clusters=west\n").value_or("error"), "12;west");
  EXPECT_EQ(TaskId("12;west", 3), "12_3;west");
  EXPECT_EQ(TaskId("12", 3), "12_3");
  commands_.Write("squeue",
                  "[[ $*$SLURM_CLUSTERS == *west* ]] && echo CLUSTER: west && echo 12_3 R ||"
                  " echo 12_3 PD");
  // An id without a cluster is not one of the variable's.
  setenv("SLURM_CLUSTERS", "west", 1);
  EXPECT_EQ(*States({"12_3;west", "12_3"}),
            StateMap({{"12_3;west", "running"}, {"12_3", "queued"}}));
  unsetenv("SLURM_CLUSTERS");
}

TEST_F(QueueTest, SbatchThatHangsMayHaveSubmitted) {
  commands_.Write("sbatch", "sleep 100");
  commands_.Write("squeue", "echo \"8 $HERE/other.sh\"; echo \"9 $HERE/job.sh\"");
  const std::string path = absl::StrCat(commands_.folder(), "/job.sh");
  ASSERT_TRUE(WriteFileAtomically(path, "").ok());
  EXPECT_EQ(SubmitScript(path, absl::Milliseconds(100)).value_or("error"), "9");
}

TEST_F(QueueTest, SubmissionWithoutAnAnswerIsLookedForByItsScript) {
  const std::string task = Submitting("/stage/array/job.sh", "", 3);
  const std::string single =
      Submitting(absl::StrCat(commands_.folder(), "/a b/job.sh"), "west", std::nullopt);
  const std::string lost = Submitting("/stage/lost/job.sh", "", 0);
  const std::string old = "submitting 2020-01-01T00:00:00Z login 1 0 - /stage/lost/job.sh";
  // Job 8 is an earlier submission of the same script.
  commands_.Write("squeue", R"(
if [[ $* == *%o*west* ]]; then
  echo CLUSTER: west; echo "8 $HERE/a b/job.sh"; echo "12 $HERE/a b/job.sh"
elif [[ $* == *west* ]]; then echo CLUSTER: west; echo 12 R
elif [[ $* == *%o* ]]; then echo 7 /stage/array/job.sh; echo 9 /other/job.sh
else echo 7_0 R; echo 7_3 PD; fi)");
  EXPECT_EQ(*States({task, single, lost, old}),
            StateMap({{task, "queued"}, {single, "running"}, {lost, "unknown"}}));
  EXPECT_EQ(*KnownIds({"5_1", task, single, lost, old}),
            StateMap({{"5_1", "5_1"}, {task, "7_3"}, {single, "12;west"}}));
  commands_.Write("scancel", "echo \"$@\" >>$HERE/all");
  const Cancellation end = Cancel({task, single, lost});
  EXPECT_EQ(end.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(end.cancelled, (std::vector<std::string>{"7_3", "12;west"}));
  EXPECT_EQ(commands_.Contents("all"), "7_3\n--clusters=west 12\n");
  commands_.Write("squeue", "echo down >&2; exit 1");
  EXPECT_FALSE(States({lost}).ok());
}

TEST_F(QueueTest, SubmissionIsLookedForInHiddenPartitions) {
  commands_.Write("squeue", "[[ $* != *--all* && $* != *--jobs=* ]] || echo 7 /stage/job.sh");
  const std::string line = Submitting("/stage/job.sh", "", std::nullopt);
  EXPECT_EQ(*KnownIds({line}), StateMap({{line, "7"}}));
}

TEST_F(QueueTest, MostTasksOfAnArray) {
  commands_.Write("scontrol",
                  "n=20; [[ $* != *--clusters=west ]] || n=30\n"
                  "echo \"MaxArraySize            = $n\"; echo 'MaxJobCount = 7'");
  EXPECT_EQ(MaxArraySize(""), 20);
  EXPECT_EQ(MaxArraySize("west"), 30);
  commands_.Write("scontrol", "exit 1");
  EXPECT_EQ(MaxArraySize(""), 1001);
}

TEST_F(QueueTest, NoJobsAreNotAskedFor) { EXPECT_EQ(*States({}), StateMap()); }

TEST_F(QueueTest, JobThatSqueueHasForgottenHasEnded) {
  commands_.Write("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1");
  EXPECT_EQ(*States({"7"}), StateMap());
}

TEST_F(QueueTest, FailureIsNotAnEmptyQueue) {
  commands_.Write("squeue", "echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1");
  const absl::Status status = States({"7"}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(absl::StrContains(status.message(), ": Unable to contact slurm controller"))
      << status;
}

TEST_F(QueueTest, ACancelThatFailsStopsNoOthers) {
  commands_.Write("scancel", "echo \"$@\" >>$HERE/all; [[ $1 != *east ]]");
  const Cancellation end = Cancel({"1;west", "2;east"});
  EXPECT_FALSE(end.status.ok());
  EXPECT_EQ(end.cancelled, std::vector<std::string>{"1;west"});
  EXPECT_EQ(commands_.Contents("all"), "--clusters=east 2\n--clusters=west 1\n");
  // Its errors say which it could not cancel.
  commands_.Write(
      "scancel", "echo 'scancel: error: Kill job error on job id 17_1: Access denied' >&2; exit 1");
  EXPECT_EQ(Cancel({"7_1", "17_1", "17_10"}).cancelled, (std::vector<std::string>{"17_10", "7_1"}));
}

TEST_F(QueueTest, Cancels) {
  commands_.Write("scancel", "echo \"$@\" >$HERE/args");
  const Cancellation end = Cancel({"7_1", "8"});
  EXPECT_TRUE(end.status.ok()) << end.status;
  EXPECT_EQ(end.cancelled, (std::vector<std::string>{"7_1", "8"}));
  EXPECT_EQ(commands_.Contents("args"), "7_1 8\n");
  commands_.Write("scancel", "echo 'scancel: error: Kill job error on job id 7: No' >&2; exit 1");
  EXPECT_EQ(Cancel({"7"}).status.message(), "scancel: Kill job error on job id 7: No");
  // The others are cancelled nevertheless.
  commands_.Write("scancel", "echo \"$@\" >>$HERE/all; [[ $1 != *west ]]");
  EXPECT_FALSE(Cancel({"1;west", "2", "3;east"}).status.ok());
  EXPECT_EQ(commands_.Contents("all"), "2\n--clusters=east 3\n--clusters=west 1\n");
}

}  // namespace
}  // namespace ddp::launchers::slurm
