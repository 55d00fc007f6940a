#include "launchers/slurm/submit.h"

#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/option_error.h"
#include "base/options.h"
#include "base/status.h"
#include "launchers/queue.h"
#include "launchers/slurm/follow.h"
#include "launchers/slurm/options.h"
#include "launchers/slurm/queue.h"
#include "launchers/slurm/script.h"
#include "launchers/slurm/stage.h"

namespace ddp::launchers::slurm {
namespace {

namespace fs = std::filesystem;

constexpr char kScript[] = "job.sh";

bool HasControlCharacter(absl::string_view text) {
  return std::any_of(text.begin(), text.end(),
                     [](unsigned char c) { return absl::ascii_iscntrl(c); });
}

// A line of a script must not become two.
absl::Status CheckLines(const SlurmOptions& slurm) {
  const std::pair<absl::string_view, const std::string&> lines[] = {
      {"partition", slurm.partition}, {"mem", slurm.mem}, {"time", slurm.time},
      {"account", slurm.account},     {"qos", slurm.qos}, {"constraint", slurm.constraint},
      {"stage_dir", slurm.stage_dir}};
  for (const auto& [name, value] : lines) {
    if (!HasControlCharacter(value)) continue;
    return OptionError(absl::StrCat("slurm.", name), value, "must not have control characters");
  }
  for (const std::string& extra : ExtraLines(slurm)) {
    if (absl::StartsWith(extra, "-") && !HasControlCharacter(extra)) continue;
    return OptionError("slurm.extra", extra,
                       "must be options of sbatch, each a line like --comment=x");
  }
  // sbatch replaces nothing in a pattern with a backslash.
  if (slurm.stage_dir.empty() || absl::StrContains(slurm.stage_dir, "\\")) {
    return OptionError("slurm.stage_dir", slurm.stage_dir,
                       "must be a folder's name without backslashes");
  }
  return absl::OkStatus();
}

absl::Status Check(const LaunchOptions& options, const std::vector<BatchJob>& jobs) {
  DDP_RETURN_IF_ERROR(ValidateOptions(options));
  DDP_RETURN_IF_ERROR(CheckLines(SlurmOptionsOf(options)));
  if (options.max_restarts != 0) {
    return OptionError("max_restarts", absl::StrCat(options.max_restarts),
                       "is not for launcher 'slurm': SLURM itself requeues jobs");
  }
  if (jobs.empty()) return absl::InvalidArgumentError("no job to submit");
  for (const BatchJob& job : jobs) {
    if (job.argv.empty()) return absl::InvalidArgumentError("no program to submit");
    if (job.argv[0] != jobs[0].argv[0]) {
      return absl::InvalidArgumentError(absl::StrCat("jobs of one array run one program, not ",
                                                     jobs[0].argv[0], " and ", job.argv[0]));
    }
    if (HasControlCharacter(job.folder) || HasControlCharacter(job.name)) {
      return absl::InvalidArgumentError(
          absl::StrCat("a job's name and folder must not have control characters: ", job.folder));
    }
  }
  return absl::OkStatus();
}

std::string ProgramName(const std::string& program) {
  return fs::path(program).filename().string();
}

std::string StageFolder(const SlurmOptions& slurm) {
  std::string folder = fs::absolute(slurm.stage_dir).lexically_normal().string();
  while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
  return folder;
}

absl::Status StageDirError(const SlurmOptions& slurm, const absl::Status& status) {
  return OptionError("slurm.stage_dir", slurm.stage_dir,
                     absl::StrCat("cannot be written: ", status.message()), status.code());
}

// The name of a folder for a job of `program`, not made yet.
std::string JobFolder(const std::string& stage, const std::string& program) {
  const std::string time = absl::FormatTime("%Y%m%d-%H%M%S", absl::Now(), absl::UTCTimeZone());
  return absl::StrCat(stage, "/jobs/", time, "-", ProgramName(program), "-", getpid());
}

// A new folder, by this name or with a number appended.
absl::StatusOr<std::string> MakeJobFolder(const std::string& name) {
  DDP_RETURN_IF_ERROR(MakeDirectories(DirectoryOf(name)));
  for (int i = 1;; ++i) {
    std::string folder = i == 1 ? name : absl::StrCat(name, "-", i);
    if (FileSystem::Default()->Mkdir(folder.c_str(), 0777) == 0) return folder;
    if (errno != EEXIST) return FileError(errno, "making folder", folder);
  }
}

absl::StatusOr<std::string> Script(const LaunchOptions& options, const std::vector<BatchJob>& jobs,
                                   int at_once, const StagedProgram& program,
                                   const std::string& folder) {
  std::error_code error;
  const fs::path here = fs::current_path(error);
  if (error) return FileError(error.value(), "finding", "the working folder");
  const bool same_name = std::all_of(jobs.begin(), jobs.end(),
                                     [&](const BatchJob& job) { return job.name == jobs[0].name; });
  return BatchScript({.launch = options,
                      .name = same_name ? jobs[0].name : ProgramName(jobs[0].argv[0]),
                      .program = program.path,
                      .chdir = here.string(),
                      .folder = folder,
                      .jobs = jobs,
                      .at_once = at_once});
}

// Links named 0, 1, … to the jobs' folders.
absl::Status LinkFolders(const std::vector<BatchJob>& jobs, const std::string& folder) {
  for (size_t i = 0; i < jobs.size(); ++i) {
    const std::string link = absl::StrCat(folder, "/", i);
    std::error_code error;
    fs::create_symlink(jobs[i].folder, link, error);
    if (error) return FileError(error.value(), "making link", link);
  }
  return absl::OkStatus();
}

absl::Status WriteIds(const std::vector<BatchJob>& jobs, const std::string& id) {
  for (size_t i = 0; i < jobs.size(); ++i) {
    const std::string own = jobs.size() == 1 ? id : absl::StrCat(id, "_", i);
    const absl::Status written = WriteFileAtomically(
        absl::StrCat(jobs[i].folder, "/", BatchJob::kId), absl::StrCat(own, "\n"));
    if (!written.ok()) return Annotate(written, absl::StrCat("job ", own, " is queued, but"));
  }
  return absl::OkStatus();
}

void PrintJob(const std::vector<BatchJob>& jobs, const std::string& id, const std::string& folder,
              std::FILE* notes) {
  const bool array = jobs.size() > 1;
  std::fprintf(notes, "job %s: submitted%s\n  script: %s/%s\n  log:    %s/%s\n", id.c_str(),
               array ? absl::StrCat(", an array of ", jobs.size(), " jobs").c_str() : "",
               folder.c_str(), kScript,
               array ? absl::StrCat(folder, "/INDEX").c_str() : folder.c_str(), BatchJob::kLog);
  std::fflush(notes);
}

}  // namespace

absl::StatusOr<std::string> Submit(const LaunchOptions& options, const std::vector<BatchJob>& jobs,
                                   int at_once, std::FILE* notes) {
  DDP_RETURN_IF_ERROR(Check(options, jobs));
  const SlurmOptions slurm = SlurmOptionsOf(options);
  const std::string stage = StageFolder(slurm);
  const std::string builds = absl::StrCat(stage, "/builds");
  const std::string& program = jobs[0].argv[0];
  const bool array = jobs.size() > 1;
  std::string folder = array ? JobFolder(stage, program) : jobs[0].folder;
  if (slurm.dry_run) {
    DDP_ASSIGN_OR_RETURN(const StagedProgram staged, FindStaged(program, builds));
    DDP_ASSIGN_OR_RETURN(const std::string script, Script(options, jobs, at_once, staged, folder));
    std::fputs(script.c_str(), stdout);
    std::fflush(stdout);
    return "";
  }

  absl::Status writable = MakeDirectories(builds);
  if (writable.ok()) writable = ProveWritable(builds);
  if (!writable.ok()) return StageDirError(slurm, writable);
  DDP_ASSIGN_OR_RETURN(const StagedProgram staged, StageProgram(program, builds));
  if (array) {
    DDP_ASSIGN_OR_RETURN(folder, MakeJobFolder(folder));
  }
  const std::string script_path = absl::StrCat(folder, "/", kScript);
  absl::Cleanup remove = [&] { RemoveTree(array ? folder : script_path).IgnoreError(); };
  if (array) {
    DDP_RETURN_IF_ERROR(LinkFolders(jobs, folder));
  }
  DDP_ASSIGN_OR_RETURN(const std::string script, Script(options, jobs, at_once, staged, folder));
  DDP_RETURN_IF_ERROR(WriteFileAtomically(script_path, script));
  // Removes an earlier submission's exit code and id, and renames its log. The script removes the
  // exit code, too, but only when it runs.
  for (const BatchJob& job : jobs) DDP_RETURN_IF_ERROR(ForgetJob(job.folder));
  DDP_ASSIGN_OR_RETURN(std::string id, SubmitScript(script_path));
  std::move(remove).Cancel();
  PrintJob(jobs, id, folder, notes);
  DDP_RETURN_IF_ERROR(WriteIds(jobs, id));
  return id;
}

absl::StatusOr<LaunchResult> Launch(const LaunchOptions& options) {
  if (options.argv.empty()) return absl::InvalidArgumentError("no program to submit");
  const SlurmOptions slurm = SlurmOptionsOf(options);
  DDP_RETURN_IF_ERROR(CheckLines(slurm));
  BatchJob job = {.name = ProgramName(options.argv[0]),
                  .folder = JobFolder(StageFolder(slurm), options.argv[0]),
                  .argv = options.argv};
  if (slurm.dry_run) {
    DDP_RETURN_IF_ERROR(Submit(options, {job}, 0, stdout).status());
    return LaunchResult();
  }
  absl::StatusOr<std::string> folder = MakeJobFolder(job.folder);
  if (!folder.ok()) return StageDirError(slurm, folder.status());
  job.folder = *std::move(folder);
  absl::StatusOr<std::string> id = Submit(options, {job}, 0, stdout);
  if (!id.ok()) {
    rmdir(job.folder.c_str());  // not empty if the job was submitted nevertheless
    return id.status();
  }
  if (!slurm.wait) return LaunchResult();
  return Follow(
      {.id = *id, .folder = job.folder, .cancel_on_interrupt = slurm.on_interrupt == "cancel"});
}

}  // namespace ddp::launchers::slurm
