// Launcher slurm with shell scripts in place of sbatch and squeue; tests/e2e/sbatch.sh has the real
// ones.
#include "launchers/slurm/submit.h"

#include <stdlib.h>

#include <filesystem>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/option_error.h"
#include "gtest/gtest.h"
#include "launchers/launcher.h"
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
  commands_.Write("srun", "shift 2; \"$@\"; exit 5");
  commands_.Write("squeue", "echo 41 R");
  commands_.Write("sbatch", R"(bash "$2" >"$(dirname "$2")/job.log" 2>&1; echo 41)");
  const absl::StatusOr<LaunchResult> result = Run();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->exit_code, 5);
  EXPECT_TRUE(absl::EndsWith(out_, "ran --x=a b\n")) << out_;
}

TEST_F(SubmitTest, RefusedJobLeavesNothing) {
  commands_.Write("sbatch", "echo 'sbatch: error: no such partition' >&2; exit 1");
  EXPECT_EQ(Run().status().message(), "sbatch refuses the job: no such partition");
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
  slurm().extra = {};
  slurm().partition = "a\nb";
  EXPECT_TRUE(absl::StrContains(Refused(), "slurm.partition="));
  slurm().partition = "";
  options_.max_restarts = 1;
  EXPECT_TRUE(absl::StrContains(Refused(), "max_restarts=1 is not for launcher 'slurm'"));
}

TEST_F(SubmitTest, NotFromWithinAJob) {
  setenv("SLURM_JOB_ID", "9", 1);
  const std::string message = Refused();
  const absl::Status submit = (*CreateLauncher("slurm"))->Submit(options_, {{}}, 0);
  unsetenv("SLURM_JOB_ID");
  EXPECT_TRUE(absl::StrContains(message, "from within SLURM job 9")) << message;
  EXPECT_TRUE(absl::StrContains(message, "srun --nodes=")) << message;
  EXPECT_EQ(submit.message(), message);
}

TEST_F(SubmitTest, SeveralJobsAreAnArray) {
  std::vector<BatchJob> jobs;
  for (const char* name : {"a", "b c"}) {
    jobs.push_back({.name = name,
                    .folder = absl::StrCat(commands_.folder(), "/", name),
                    .argv = {options_.argv[0], name}});
    ASSERT_TRUE(MakeDirectories(jobs.back().folder).ok());
    ASSERT_TRUE(WriteFileAtomically(absl::StrCat(jobs.back().folder, "/exit_code"), "1").ok());
  }
  testing::internal::CaptureStderr();
  const absl::Status status = (*CreateLauncher("slurm"))->Submit(options_, jobs, 1);
  out_ = testing::internal::GetCapturedStderr();
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(absl::StartsWith(out_, "job 41: submitted, an array of 2 jobs\n")) << out_;
  EXPECT_EQ(commands_.Contents("a/job_id"), "41_0\n");
  EXPECT_EQ(commands_.Contents("b c/job_id"), "41_1\n");
  EXPECT_EQ(commands_.Contents("a/exit_code"), "none");
  EXPECT_EQ(fs::read_symlink(File("1")), jobs[1].folder);
  const std::string script = *ReadFile(File("job.sh"));
  EXPECT_TRUE(absl::StrContains(script, "#SBATCH --array=0-1%1\n")) << script;
  EXPECT_TRUE(absl::StrContains(script, "/%a/job.log\n")) << script;

  // A refusal leaves the jobs' folders, and nothing in them that looks submitted.
  commands_.Write("sbatch", "echo no >&2; exit 1");
  EXPECT_FALSE(Submit(options_, jobs, 0, stderr).ok());
  EXPECT_EQ(JobFolders().size(), 1u);
  EXPECT_EQ(*ListDirectory(jobs[0].folder), std::vector<std::string>());
}

TEST_F(SubmitTest, ArrayRunsOneProgram) {
  const std::vector<BatchJob> jobs = {{.name = "a", .folder = "/a", .argv = {"/bin/true"}},
                                      {.name = "b", .folder = "/b", .argv = {"/bin/false"}}};
  EXPECT_EQ(Submit(options_, jobs, 0, stderr).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Submit(options_, {}, 0, stderr).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace ddp::launchers::slurm
