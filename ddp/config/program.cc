#include "ddp/config/program.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/environment.h"
#include "base/option_error.h"
#include "base/process.h"
#include "base/status.h"
#include "ddp/config/choices.h"
#include "ddp/config/effective.h"
#include "ddp/config/report.h"
#include "ddp/config/sweep.h"
#include "launchers/queue.h"

namespace ddp::config {
namespace {

constexpr int kFailure = 1;
constexpr int kUsageError = 2;

// `bazel run` starts programs in their runfiles, but relative paths are meant from the user's
// folder.
absl::Status EnterCallersFolder() {
  const char* folder = std::getenv("BUILD_WORKING_DIRECTORY");
  if (folder == nullptr || chdir(folder) == 0) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat("BUILD_WORKING_DIRECTORY=", folder,
                                          " cannot be entered: relative paths have no meaning"));
}

}  // namespace

Program::Program(OptionList list, ProgramSpec spec)
    : list_(std::move(list)),
      spec_(std::move(spec)),
      own_(ListOptions(options_)),
      all_(list_),
      defaults_(list_.Table()) {
  options_.sweep_metric = spec_.sweep_metric;
  // These options are a group of their own in the help.
  for (const OptionRef& option : own_.options()) all_.Add(option);
}

std::optional<int> Program::Start(int argc, char** argv) {
  const auto fail = [&](const absl::Status& status, int code) {
    std::fprintf(stderr, "error: %s\n", Explain(status).c_str());
    return code;
  };
  absl::Status status = Configure(argc, argv);
  if (!status.ok()) return fail(status, kUsageError);
  if (help_) {
    std::printf("%s\n\n%s", spec_.about.c_str(), all_.Describe("--").c_str());
    return 0;
  }
  if (options_.multirun) {
    const absl::StatusOr<int> code = Sweep(ExecutablePath(argv[0]));
    if (code.ok()) return *code;
    return fail(code.status(),
                absl::IsInvalidArgument(code.status()) || absl::IsNotFound(code.status())
                    ? kUsageError
                    : kFailure);
  }
  if (options_.print_config) {
    std::printf("%s", Configuration().c_str());
    return 0;
  }
  return std::nullopt;
}

std::string Program::Configuration() const { return ToYaml(list_); }

absl::Status Program::Configure(int argc, char** argv) {
  DDP_ASSIGN_OR_RETURN(const CommandLine line, CommandLine::Read(argc, argv, all_));
  help_ = line.help;
  if (help_) return absl::OkStatus();
  if (!line.positional.empty()) {
    const std::string& argument = line.positional[0];
    const bool is_name = all_.Find(argument).ok();
    return absl::InvalidArgumentError(
        is_name ? absl::StrCat("'", argument, "' has no value: ", argument, "=…")
                : absl::StrCat("'", argument, "' is no option with its value, as in epochs=2"));
  }
  DDP_RETURN_IF_ERROR(EnterCallersFolder());
  DDP_RETURN_IF_ERROR(Read(line));
  if (!options_.multirun) {
    DDP_RETURN_IF_ERROR(Apply(assignments_));
    DDP_RETURN_IF_ERROR(Validate());
    DDP_RETURN_IF_ERROR(CheckLaunchersOptions());
  }
  arguments_.assign(argv, argv + argc);
  FreezeForQueue();
  for (std::string& argument : arguments_) argv_.push_back(argument.data());
  argv_.push_back(nullptr);
  return absl::OkStatus();
}

absl::Status Program::Read(const CommandLine& line) {
  command_line_ = line.assignments;
  DDP_RETURN_IF_ERROR(SetOwnOptions());
  DDP_RETURN_IF_ERROR(ReadFile());
  for (const OptionAssignment& assignment : command_line_) {
    if (!IsOwn(assignment)) DDP_RETURN_IF_ERROR(Override(assignment));
  }
  return absl::OkStatus();
}

// Compares whole paths: "config" must not be taken for a user's option "model.config".
bool Program::IsOwn(const OptionAssignment& assignment) const {
  const auto& own = own_.options();
  return std::any_of(own.begin(), own.end(),
                     [&](const OptionRef& option) { return option.path == assignment.path; });
}

absl::Status Program::SetOwnOptions() {
  for (const OptionAssignment& assignment : command_line_) {
    if (IsOwn(assignment)) DDP_RETURN_IF_ERROR(setter_.Set(assignment, own_));
  }
  DDP_RETURN_IF_ERROR(own_.Validate());
  if (const auto metric = ParseSweepMetric(options_.sweep_metric); !metric.ok()) {
    return OptionError("sweep_metric", options_.sweep_metric, metric.status().message());
  }
  if (!options_.config.empty() && !options_.config_name.empty()) {
    return OptionError("config_name", options_.config_name, "and config are given; give one");
  }
  if (!options_.config_path.empty() && options_.config_name.empty()) {
    return OptionError("config_path", options_.config_path, "needs a file: add config_name");
  }
  for (const OptionAssignment& assignment : command_line_) {
    const bool of_sweeps = IsOwn(assignment) && absl::StartsWith(assignment.path, "sweep_");
    if (options_.multirun || !of_sweeps) continue;
    return absl::InvalidArgumentError(absl::StrCat(assignment.written, "=", assignment.value,
                                                   " is for sweeps only; add multirun=true"));
  }
  return absl::OkStatus();
}

absl::Status Program::ReadFile() {
  std::string path = options_.config;
  if (!options_.config_name.empty()) {
    path = options_.config_path.empty()
               ? options_.config_name
               : absl::StrCat(options_.config_path, "/", options_.config_name);
  }
  if (path.empty()) return absl::OkStatus();
  DDP_ASSIGN_OR_RETURN(ConfigFile file, ReadConfigFile(path, list_));
  assignments_ = std::move(file.assignments);
  if (options_.multirun) choices_ = std::move(file.sweep);
  return absl::OkStatus();
}

// Replaces the file's value or choices by a value on the command line.
absl::Status Program::Override(OptionAssignment assignment) {
  const auto in_file = std::find_if(choices_.begin(), choices_.end(),
                                    [&](const Choices& c) { return c.path == assignment.path; });
  const std::string& value = assignment.value;
  const bool is_quoted = !value.empty() && (value[0] == '\'' || value[0] == '"');
  if (options_.multirun && (LooksLikeChoices(value) || is_quoted)) {
    absl::StatusOr<std::vector<std::string>> values = ParseChoices(value);
    if (!values.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(assignment.written, "=", value, " ", values.status().message()));
    }
    if (values->size() > 1 || !is_quoted) {
      Choices choices = {assignment.path, *std::move(values), assignment.written};
      // They take the place of the file's choices, so that the order of the jobs does not change.
      if (in_file == choices_.end()) {
        choices_.push_back(std::move(choices));
      } else {
        *in_file = std::move(choices);
      }
      return absl::OkStatus();
    }
    assignment.value = values->front();
  }
  if (in_file != choices_.end()) choices_.erase(in_file);
  assignments_.push_back(std::move(assignment));
  return absl::OkStatus();
}

absl::Status Program::Apply(const std::vector<OptionAssignment>& assignments) {
  for (const OptionAssignment& assignment : assignments) {
    DDP_RETURN_IF_ERROR(WithHint(setter_.Set(assignment, list_), assignment.value));
  }
  return absl::OkStatus();
}

absl::Status Program::Validate() {
  absl::Status status = list_.Validate();
  if (status.ok()) status = spec_.validate();
  const std::optional<OptionProblem> problem = ProblemOf(status);
  if (!problem) return status;
  // Explain comes first, for the names that the user wrote: it would drop the hint.
  return WithHint(absl::Status(status.code(), setter_.Explain(status, list_)), problem->value);
}

absl::Status Program::WithHint(const absl::Status& status, const std::string& value) const {
  if (status.ok() || options_.multirun || !LooksLikeChoices(value)) return status;
  return absl::Status(
      status.code(),
      absl::StrCat(status.message(), "; to run each of the choices add multirun=true"));
}

// An option of a queue that is not used would be ignored in silence.
absl::Status Program::CheckLaunchersOptions() const {
  for (const std::string& name : launchers::LauncherRegistry::Names()) {
    if (spec_.launch->name == name || !launchers::FindQueue(name)) continue;
    const auto given = std::find_if(
        command_line_.begin(), command_line_.end(), [&](const OptionAssignment& assignment) {
          return absl::StrContains(absl::StrCat(".", assignment.path),
                                   absl::StrCat(".launcher.", name, "."));
        });
    if (given == command_line_.end()) continue;
    const absl::StatusOr<launchers::Choice> choice =
        launchers::Choose(*spec_.launch, Environment::FromProcess());
    // Without a choice there is a worse error, which comes later.
    if (!choice.ok() || choice->launcher->name() == name) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(given->written, "=", given->value, " is for launcher ", name,
                     ", but the launcher is ", choice->launcher->name(), "; add launcher=", name));
  }
  return absl::OkStatus();
}

void Program::FreezeForQueue() {
  if (options_.multirun || !launchers::FindQueue(spec_.launch->name)) return;
  arguments_.resize(1);
  const auto values = list_.Table();
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i].second == defaults_[i].second) continue;
    arguments_.push_back(absl::StrCat(values[i].first, "=", values[i].second));
  }
}

absl::StatusOr<int> Program::Sweep(const std::string& program_path) {
  if (choices_.empty()) {
    return OptionError("multirun", "true",
                       "has no choices: give some, as in lr=0.1,0.01 'seed=range(0,3)', or a file "
                       "with sweep:");
  }
  const auto set_base = [this]() -> absl::Status {
    for (size_t i = 0; i < defaults_.size(); ++i) {
      DDP_RETURN_IF_ERROR(list_.options()[i].set(defaults_[i].second));
    }
    return Apply(assignments_);
  };
  DDP_RETURN_IF_ERROR(set_base());
  DDP_RETURN_IF_ERROR(CheckLaunchersOptions());
  const absl::StatusOr<const OptionRef*> folder = list_.Find(spec_.job_options.at(0).first);
  if (!folder.ok()) return folder.status();
  SweepSpec spec = {.choices = choices_,
                    .folder = (*folder)->get(),
                    .job_options = spec_.job_options,
                    .set_base = set_base,
                    .set = [this](const OptionAssignment& a) { return setter_.Set(a, list_); },
                    .validate = [this] { return Validate(); }};
  if (spec.folder.empty()) {
    return OptionError((*folder)->path, "", "is needed by multirun: the folder of the sweep");
  }
  DDP_ASSIGN_OR_RETURN(const std::vector<Job> jobs, MakeJobs(list_, spec));
  DDP_ASSIGN_OR_RETURN(const launchers::Choice choice,
                       launchers::Choose(*spec_.launch, Environment::FromProcess()));
  if (choice.detected) {
    return OptionError(
        "multirun", "true",
        absl::StrCat("starts the ranks of each job itself, but this process is one (",
                     choice.reason, "); start the program without a launcher"));
  }
  if (options_.print_config) {
    for (const Job& job : jobs) {
      std::printf("# %s\n%s\n", job.Description().c_str(), job.options.c_str());
    }
    return 0;
  }
  DDP_ASSIGN_OR_RETURN(const SweepMetric metric, ParseSweepMetric(options_.sweep_metric));
  return RunSweep(jobs, {.program = program_path,
                         .folder = spec.folder,
                         .at_once = options_.sweep_jobs,
                         .metric = metric,
                         .launch = *spec_.launch});
}

std::string Program::Explain(const absl::Status& status) const {
  return setter_.Explain(status, all_);
}

}  // namespace ddp::config
