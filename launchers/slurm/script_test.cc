#include "launchers/slurm/script.h"

#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
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
unset TORCHELASTIC_RESTART_COUNT TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE
unset DDP_LAUNCHER DDP_MASTER_LISTEN_FD
unset OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_MCA_ess_base_jobid
unset OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE OMPI_COMM_WORLD_NODE_RANK
unset PMI_RANK PMI_SIZE PMI_JOBID PMI_LOCAL_RANK PMI_LOCAL_SIZE PMIX_RANK PMIX_NAMESPACE
unset MPI_LOCALRANKID MPI_LOCALNRANKS
unset SLURM_STEP_ID SLURM_STEPID
)";

constexpr char kRun[] = R"(
rm -f "$folder/exit_code"
terminated=
trap 'terminated=yes; [[ -z $! ]] || kill -TERM "$!"' TERM
"${start[@]}" "${command[@]}" &
ranks=$!
[[ -z $terminated ]] || kill -TERM "$ranks"
wait "$ranks"
code=$?
while kill -0 "$ranks" 2>/dev/null; do
  wait "$ranks"
  code=$?
done
if [[ -n $terminated ]]; then
  code=143
elif ((code == 143)); then
  state=$(squeue --noheader --states=all --format=%T --jobs="$SLURM_JOB_ID")
  [[ $state != RUNNING ]] || code=1
fi
echo "$code" >"$folder/.exit_code.new" && mv -f "$folder/.exit_code.new" "$folder/exit_code"
exit "$code"
)";

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
folder=/stage/jobs/a
command=(/stage/builds/0a/train --x=1)
start=(srun --kill-on-bad-exit=1 --export=ALL)
)",
                                                  kRun));
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
                      .extra = {"--exclusive", "--comment=\"as it is\"", "--exclude=n1", "n2"}};
  EXPECT_EQ(BatchScript(options), absl::StrCat(R"(#!/bin/bash
#SBATCH --job-name=train
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
#SBATCH --exclusive
#SBATCH --comment="as it is"
#SBATCH --exclude=n1,n2
)",
                                               kUnset, R"(export A=1
export B='it'\''s'

folder=/stage/jobs/a
command=(/stage/builds/0a/train --x=1)
start=(srun --kill-on-bad-exit=1 --export=ALL --cpus-per-task=4)
)",
                                               kRun));
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
    folder=/stage/jobs/a
    command=(/stage/builds/0a/train --x=1)
    ;;
  1)
    folder='/runs/b b'
    command=(/stage/builds/0a/train --x=2 '' '$HOME')
    ;;
esac
start=(srun --kill-on-bad-exit=1 --export=ALL)
)",
                                 kRun));
  options.at_once = 0;
  EXPECT_TRUE(absl::StrContains(BatchScript(options), "#SBATCH --array=0-1\n"));
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

// Runs scripts with an srun that is `body`.
class RunTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = absl::StrCat(testing::TempDir(), "/run ",
                           testing::UnitTest::GetInstance()->current_test_info()->name());
    ASSERT_TRUE(RemoveTree(folder_).ok());
    ASSERT_TRUE(MakeDirectories(folder_).ok());
  }

  // Exit code of the script, whose pid `srun` sees as $PPID.
  int Run(const std::string& srun, const ScriptOptions& options) {
    WriteProgram("srun", absl::StrCat("#!/bin/bash\n", srun));
    WriteProgram("job.sh", BatchScript(options));
    const std::string path = absl::StrCat(folder_, ":", getenv("PATH"));
    result_ = *RunCommand(
        {absl::StrCat(folder_, "/job.sh")},
        {{"PATH", path}, {"RANK", "3"}, {"SLURM_JOB_ID", "4711"}, {"SLURM_ARRAY_TASK_ID", "1"}});
    return result_.exit_code;
  }

  std::string Contents(const std::string& name) {
    return ReadFile(absl::StrCat(folder_, "/", name)).value_or("none");
  }

  ScriptOptions Options() const {
    ScriptOptions options = Smallest();
    options.jobs[0].folder = folder_;
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
  CommandResult result_;
};

TEST_F(RunTest, WritesTheCodeAndEndsWithIt) {
  ASSERT_TRUE(WriteFileAtomically(absl::StrCat(folder_, "/exit_code"), "77\n").ok());
  // The stale file is gone before the ranks start.
  EXPECT_EQ(Run("ls \"$(dirname \"$0\")\"; exit 3", Options()), 3);
  EXPECT_FALSE(absl::StrContains(result_.out, "exit_code")) << result_.out;
  EXPECT_EQ(Contents("exit_code"), "3\n");
  EXPECT_EQ(Run("exit 0", Options()), 0);
  EXPECT_EQ(Contents("exit_code"), "0\n");
  EXPECT_EQ(result_.err, "");
  EXPECT_EQ(Run("kill -KILL $$", Options()), 137);
  EXPECT_EQ(Contents("exit_code"), "137\n");
}

TEST_F(RunTest, TheOtherRanksSigtermIsNotTheJobsCode) {
  // srun exits in this way once a rank has failed; only the job's state tells it from a cancelled
  // job.
  WriteProgram("squeue", "#!/bin/bash\n[[ $* == *--jobs=4711* ]] && echo RUNNING");
  EXPECT_EQ(Run("exit 143", Options()), 1);
  EXPECT_EQ(Contents("exit_code"), "1\n");
  EXPECT_EQ(Run("exit 137", Options()), 137);
  WriteProgram("squeue", "#!/bin/bash\necho COMPLETING");
  EXPECT_EQ(Run("exit 143", Options()), 143);
  EXPECT_EQ(Contents("exit_code"), "143\n");
  WriteProgram("squeue", "#!/bin/bash\nexit 1");
  EXPECT_EQ(Run("exit 143", Options()), 143);
}

TEST_F(RunTest, RanksGetWordsAndVariables) {
  ScriptOptions options = Options();
  options.launch.environment = {{"A", "a b"}};
  options.jobs.push_back(options.jobs[0]);
  options.jobs[1].argv = {"/bin/train", "--x=a b", "c\nd"};
  EXPECT_EQ(Run("printf '<%s>' \"$@\" \"$A\" \"${RANK-none}\"", options), 0);
  EXPECT_EQ(result_.out,
            "<--kill-on-bad-exit=1><--export=ALL></stage/builds/0a/train><--x=a b><c\nd>"
            "<a b><none>");
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

}  // namespace
}  // namespace ddp::launchers::slurm
