#include "launchers/slurm/script.h"

#include <algorithm>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"

namespace ddp::launchers::slurm {
namespace {

// Variables that sbatch would hand to the job, but that describe the process which submits it.
constexpr absl::string_view kForeignVariables =
    // Bazel sets these variables; the staged program has runfiles of its own.
    "unset RUNFILES_DIR RUNFILES_MANIFEST_FILE RUNFILES_MANIFEST_ONLY JAVA_RUNFILES TEST_SRCDIR\n"
    "unset BUILD_WORKING_DIRECTORY BUILD_WORKSPACE_DIRECTORY\n"
    // torchrun, launcher local and mpirun set these variables for a rank.
    "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT\n"
    "unset TORCHELASTIC_RESTART_COUNT TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE\n"
    "unset DDP_LAUNCHER DDP_MASTER_LISTEN_FD\n"
    "unset OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_MCA_ess_base_jobid\n"
    "unset OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE OMPI_COMM_WORLD_NODE_RANK\n"
    "unset PMI_RANK PMI_SIZE PMI_JOBID PMI_LOCAL_RANK PMI_LOCAL_SIZE PMIX_RANK PMIX_NAMESPACE\n"
    "unset MPI_LOCALRANKID MPI_LOCALNRANKS\n"
    // These may be of another job's step.
    "unset SLURM_STEP_ID SLURM_STEPID\n";

// srun is in the background, since bash runs a trap only between commands and during `wait`.
// Its exit code is the highest of the ranks'. Once a rank has failed, srun ends the others with
// SIGTERM, and their 143 hides the code of the failure. squeue tells this from a job that is
// cancelled: that job is no longer RUNNING before its ranks get a signal.
constexpr absl::string_view kRun = R"(
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

std::string HeaderOf(const ScriptOptions& options) {
  const SlurmOptions slurm = SlurmOptionsOf(options.launch);
  Header header;
  header.Add("job-name", SbatchWord(options.name));
  header.Add("nodes", options.launch.nnodes);
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
  for (const std::string& extra : ExtraLines(slurm)) header.AddLine(extra);
  return header.text();
}

// The variables `folder` and `command` of one job.
std::string Assignments(const ScriptOptions& options, const BatchJob& job,
                        absl::string_view indent) {
  std::vector<std::string> words = {BashWord(options.program)};
  for (size_t i = 1; i < job.argv.size(); ++i) words.push_back(BashWord(job.argv[i]));
  return absl::StrCat(indent, "folder=", BashWord(job.folder), "\n", indent, "command=(",
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
// cores of a task (since SLURM 22.05). It gets --export, since sbatch --export=NONE would hold for
// srun, too.
std::string Start(const ScriptOptions& options) {
  const std::optional<int> cpus_per_task = SlurmOptionsOf(options.launch).cpus_per_task;
  const std::string cpus =
      cpus_per_task ? absl::StrCat(" --cpus-per-task=", *cpus_per_task) : std::string();
  return absl::StrCat("start=(srun --kill-on-bad-exit=1 --export=ALL", cpus, ")\n");
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

std::vector<std::string> ExtraLines(const SlurmOptions& slurm) {
  std::vector<std::string> lines;
  for (const std::string& extra : slurm.extra) {
    if (lines.empty() || absl::StartsWith(extra, "-")) {
      lines.push_back(extra);
    } else {
      absl::StrAppend(&lines.back(), ",", extra);
    }
  }
  return lines;
}

std::string BatchScript(const ScriptOptions& options) {
  std::string text = absl::StrCat(HeaderOf(options), "\n", kForeignVariables);
  for (const auto& [name, value] : options.launch.environment) {
    absl::StrAppend(&text, "export ", name, "=", BashWord(value), "\n");
  }
  absl::StrAppend(&text, "\n", SelectJob(options), Start(options), kRun);
  return text;
}

}  // namespace ddp::launchers::slurm
