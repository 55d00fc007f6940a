#include "ddp/config/program.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <memory>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/environment.h"
#include "base/file.h"
#include "base/host_name.h"
#include "base/option_error.h"
#include "base/process.h"
#include "base/status.h"
#include "ddp/config/choices.h"
#include "ddp/config/effective.h"
#include "ddp/config/references.h"
#include "ddp/config/report.h"
#include "ddp/config/run_record.h"
#include "ddp/config/sweep.h"
#include "launchers/launcher.h"
#include "launchers/queue.h"

namespace ddp::config {
namespace {

constexpr int kFailure = 1;
constexpr int kUsageError = 2;

constexpr absl::string_view kAuto = "auto";
constexpr char kOwnProgram[] = "/proc/self/exe";  // also if a build has replaced its file since
constexpr char kRuns[] = "runs";                  // folder of --run_dir=auto

// `bazel run` starts programs in their runfiles, but relative paths are meant from the user's
// folder.
absl::Status EnterCallersFolder() {
  const char* folder = std::getenv("BUILD_WORKING_DIRECTORY");
  if (folder == nullptr || chdir(folder) == 0) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat("BUILD_WORKING_DIRECTORY=", folder,
                                          " cannot be entered: relative paths have no meaning"));
}

// Splits "model@=cnn" into "model@" and "cnn".
std::optional<OptionAssignment> AsGroupFlag(const std::string& argument) {
  const size_t at = argument.find("@=");
  if (at == std::string::npos || at == 0) return std::nullopt;
  const bool is_name = std::all_of(argument.begin(), argument.begin() + at, [](unsigned char c) {
    return absl::ascii_isalnum(c) || c == '_' || c == '/' || c == '.' || c == '-';
  });
  if (!is_name) return std::nullopt;
  const std::string group = argument.substr(0, at + 1);
  return OptionAssignment{group, argument.substr(at + 2), group};
}

bool IsGroupFlag(absl::string_view path) { return absl::EndsWith(path, "@"); }

std::string GroupKey(absl::string_view group, absl::string_view value) {
  return absl::StrCat(group, "=", value);
}

// The name in a path of a file, without folders and extension.
std::string Stem(const std::string& path) { return std::filesystem::path(path).stem().string(); }

// A new folder "runs/DATE-NAME"; with a number behind it if there is one of that second. Without
// `make` only its name.
absl::StatusOr<std::string> NewRunDir(const std::string& name, bool make) {
  const std::string base = absl::StrCat(
      kRuns, "/", absl::FormatTime("%Y-%m-%d_%H-%M-%S", absl::Now(), absl::LocalTimeZone()), "-",
      name);
  if (make) DDP_RETURN_IF_ERROR(MakeDirectories(kRuns));
  for (int i = 1;; ++i) {
    std::string folder = i == 1 ? base : absl::StrCat(base, "-", i);
    if (!make) {
      if (access(folder.c_str(), F_OK) != 0) return folder;
      continue;
    }
    if (mkdir(folder.c_str(), 0777) == 0) return folder;
    if (errno != EEXIST) return FileError(errno, "making folder", folder);
  }
}

// The launcher whose option this is; empty if it is of none.
std::string LauncherOf(const std::string& path) {
  for (const std::string& name : launchers::LauncherRegistry::Names()) {
    if (absl::StrContains(absl::StrCat(".", path), absl::StrCat(".launcher.", name, "."))) {
      return name;
    }
  }
  return "";
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
  // On a full disk a part of the text must not pass for all of it.
  const auto printed = [&](int code) {
    if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
    return fail(FileError(errno, "writing", "standard output"), kFailure);
  };
  absl::Status status = Configure(argc, argv);
  if (!status.ok()) return fail(status, kUsageError);
  if (help_) {
    std::printf("%s\n\n%s", spec_.about.c_str(), all_.Describe("--").c_str());
    return printed(0);
  }
  if (options_.multirun) {
    const absl::StatusOr<int> code = Sweep(ExecutablePath(argv[0]));
    if (code.ok()) return printed(*code);
    return fail(code.status(),
                absl::IsInvalidArgument(code.status()) || absl::IsNotFound(code.status())
                    ? kUsageError
                    : kFailure);
  }
  if (options_.print_config) {
    std::printf("%s", ToYaml(list_).c_str());
    return printed(0);
  }
  return std::nullopt;
}

std::string Program::Configuration() const {
  const auto values = list_.Table();
  const auto set = [&](const auto& to) {
    for (size_t i = 0; i < values.size(); ++i) {
      const auto& own = spec_.process_options;
      const bool is_own = std::find(own.begin(), own.end(), values[i].first) != own.end();
      if (!is_own && values[i].first != recorded_size_) continue;
      list_.options()[i].set(to[i].second).IgnoreError();
    }
  };
  set(defaults_);
  std::string text = ToYaml(list_);
  set(values);
  return text;
}

std::string Program::RunRecord(int world_size, int nnodes) const {
  RunRecordOptions record = {.world_size = world_size,
                             .nnodes = nnodes,
                             .program = ExecutableOrigin(),
                             .build = BuildOf(kOwnProgram),
                             .host = HostName()};
  return ToYaml(ListOptions(record));
}

absl::Status Program::Configure(int argc, char** argv) {
  DDP_ASSIGN_OR_RETURN(const CommandLine line, CommandLine::Read(argc, argv, all_));
  help_ = line.help;
  if (help_) return absl::OkStatus();
  DDP_RETURN_IF_ERROR(ReadGroupFlags(line.positional));
  DDP_RETURN_IF_ERROR(EnterCallersFolder());
  DDP_RETURN_IF_ERROR(Read(line));
  own_setter_ = setter_;
  run_dir_ = options_.run_dir;
  arguments_.assign(argv, argv + argc);
  if (!options_.multirun) {
    DDP_RETURN_IF_ERROR(SetAll({}));
    DDP_RETURN_IF_ERROR(Validate());
    DDP_RETURN_IF_ERROR(CheckLaunchersOptions());
    DDP_RETURN_IF_ERROR(UseRecordedSize());
    DDP_RETURN_IF_ERROR(ChooseRunDir(argv[0]));
    if (!references_.empty()) {
      DDP_RETURN_IF_ERROR(Settle());
      DDP_RETURN_IF_ERROR(Validate());
    }
    Freeze(argv[0]);
  }
  for (std::string& argument : arguments_) argv_.push_back(argument.data());
  argv_.push_back(nullptr);
  return absl::OkStatus();
}

absl::Status Program::ReadGroupFlags(const std::vector<std::string>& positional) {
  for (const std::string& argument : positional) {
    if (std::optional<OptionAssignment> group = AsGroupFlag(argument)) {
      group_flags_.push_back(*std::move(group));
      continue;
    }
    const bool is_name = all_.Find(argument).ok();
    return absl::InvalidArgumentError(
        is_name ? absl::StrCat("'", argument, "' has no value: ", argument, "=…")
                : absl::StrCat("'", argument, "' is no option with its value, as in epochs=2"));
  }
  return absl::OkStatus();
}

absl::Status Program::Read(const CommandLine& line) {
  command_line_ = line.assignments;
  DDP_RETURN_IF_ERROR(SetOwnOptions());
  DDP_RETURN_IF_ERROR(ReadFiles());
  DDP_RETURN_IF_ERROR(CheckOwnOptions());
  if (options_.multirun) {
    choices_.insert(choices_.end(), std::make_move_iterator(file_.sweep.begin()),
                    std::make_move_iterator(file_.sweep.end()));
  }
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
  for (OptionAssignment assignment : command_line_) {
    if (!IsOwn(assignment)) continue;
    const std::string given = std::exchange(assignment.value, Unquoted(assignment.value));
    if (HasReferences(given) && assignment.value == given) {
      return absl::InvalidArgumentError(
          absl::StrCat(assignment.written, "=", given,
                       " has a reference, and they are replaced in values of the run's options "
                       "only; in quotes it is text"));
    }
    DDP_RETURN_IF_ERROR(setter_.Set(assignment, own_));
    const bool is_file = assignment.path == "config" || assignment.path == "config_name";
    if (is_file && assignment.value.empty()) {
      return OptionError(assignment.path, "", "names no file: is a variable of the shell not set?");
    }
    if (assignment.path == "config") files_.push_back(options_.config);
  }
  if (!files_.empty() && !options_.config_name.empty()) {
    return OptionError("config_name", options_.config_name, "and config are given; give one");
  }
  if (!options_.config_path.empty() && options_.config_name.empty() && group_flags_.empty()) {
    return OptionError("config_path", options_.config_path, "needs a file: add config_name");
  }
  if (!options_.config_name.empty()) {
    files_.push_back(options_.config_path.empty()
                         ? options_.config_name
                         : absl::StrCat(options_.config_path, "/", options_.config_name));
  }
  return absl::OkStatus();
}

// Once files, which may set some of them, have been read.
absl::Status Program::CheckOwnOptions() const {
  DDP_RETURN_IF_ERROR(own_.Validate());
  if (const auto metric = ParseSweepMetric(options_.sweep_metric); !metric.ok()) {
    return OptionError("sweep_metric", options_.sweep_metric, metric.status().message());
  }
  for (const OptionAssignment& assignment : command_line_) {
    const bool of_sweeps = IsOwn(assignment) && absl::StartsWith(assignment.path, "sweep_");
    if (options_.multirun || !of_sweeps) continue;
    return absl::InvalidArgumentError(absl::StrCat(assignment.written, "=", assignment.value,
                                                   " is for sweeps only; add multirun=true"));
  }
  return absl::OkStatus();
}

// The file of one group: "conf/model/cnn" of model@=cnn.
absl::StatusOr<std::string> Program::GroupFile(const OptionAssignment& group) const {
  std::string folder = options_.config_path;
  if (folder.empty() && !files_.empty()) folder = DirectoryOf(files_[0]);
  if (folder.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(GroupKey(group.path, group.value),
                     " is a file in a folder of configurations; name that by config_path"));
  }
  return absl::StrCat(folder, "/", absl::StripSuffix(group.path, "@"), "/", group.value);
}

absl::Status Program::ReadFiles() {
  for (const std::string& path : files_) {
    DDP_ASSIGN_OR_RETURN(ConfigFile file, ReadConfigFile(path, list_, own_));
    Append(file_, std::move(file));
  }
  // Whether there are choices depends on a file that may say multirun.
  for (const OptionAssignment& assignment : file_.own) {
    const bool of_runs = absl::StartsWith(assignment.path, "sweep_") ||
                         assignment.path == "multirun" || assignment.path == "run_dir";
    if (!of_runs || assignment.path == "sweep_report") {
      return absl::InvalidArgumentError(
          absl::StrCat(assignment.written, " is for the command line, not for a file"));
    }
    const bool overridden =
        std::any_of(command_line_.begin(), command_line_.end(),
                    [&](const OptionAssignment& a) { return a.path == assignment.path; });
    if (!overridden) DDP_RETURN_IF_ERROR(setter_.Set(assignment, own_));
  }
  for (const OptionAssignment& group : group_flags_) {
    std::vector<std::string> values = {Unquoted(group.value)};
    const bool choices = LooksLikeChoices(group.value, OptionKind::kText);
    if (choices && options_.multirun) {
      absl::StatusOr<std::vector<std::string>> parsed = ParseChoices(group.value);
      if (!parsed.ok()) {
        return absl::InvalidArgumentError(
            absl::StrCat(GroupKey(group.path, group.value), " ", parsed.status().message()));
      }
      values = *std::move(parsed);
      choices_.push_back({group.path, values, group.path});
    }
    for (const std::string& value : values) {
      DDP_ASSIGN_OR_RETURN(const std::string path, GroupFile({group.path, value, group.path}));
      absl::StatusOr<ConfigFile> file = ReadConfigFile(path, list_);
      if (!file.ok()) return WithHint(file.status(), "", group.value);
      if (values.size() == 1) {
        Append(file_, *std::move(file));
      } else if (!file->sweep.empty()) {
        return absl::InvalidArgumentError(absl::StrCat(file->sweep[0].written,
                                                       ": a file that is itself a choice of ",
                                                       group.path, " has no sweep"));
      } else {
        groups_[GroupKey(group.path, value)] = *std::move(file);
      }
    }
  }
  return absl::OkStatus();
}

// Replaces the files' value or choices by a value on the command line.
absl::Status Program::Override(OptionAssignment assignment) {
  const auto in_file = std::find_if(choices_.begin(), choices_.end(),
                                    [&](const Choices& c) { return c.path == assignment.path; });
  DDP_ASSIGN_OR_RETURN(const OptionRef* const option, list_.Find(assignment.path));
  const std::string& value = assignment.value;
  const bool is_quoted = Unquoted(value) != value;
  if (options_.multirun && !is_quoted) {
    const auto wrong = [&](absl::string_view problem) {
      return absl::InvalidArgumentError(absl::StrCat(assignment.written, "=", value, " ", problem));
    };
    const absl::string_view unknown = UnknownSweepFunction(value);
    if (!unknown.empty()) return wrong(NoSuchSweepFunction(unknown));
    if (LooksLikeChoices(value, option->kind)) {
      if (HasReferences(value)) return wrong("has a reference, which choices cannot have");
      // Folders of sweeps have commas in their names.
      if (std::error_code error; std::filesystem::exists(value, error)) {
        return wrong(
            "is the path of a file, and its commas separate choices: for the file put the "
            "value in quotes, for choices give choice(…)");
      }
      absl::StatusOr<std::vector<std::string>> values = ParseChoices(value);
      if (!values.ok()) return wrong(values.status().message());
      Choices choices = {assignment.path, *std::move(values), assignment.written};
      // They take the place of the file's choices, so that the order of the jobs does not change.
      if (in_file == choices_.end()) {
        choices_.push_back(std::move(choices));
      } else {
        *in_file = std::move(choices);
      }
      return absl::OkStatus();
    }
  }
  if (in_file != choices_.end()) choices_.erase(in_file);
  assignment.value = Unquoted(value);
  const bool has_references = !is_quoted && HasReferences(assignment.value);
  overrides_.push_back({std::move(assignment), has_references});
  return absl::OkStatus();
}

absl::Status Program::SetAll(const std::vector<OptionAssignment>& picked) {
  // Those of a single run have their defaults still, and none of them is set.
  if (options_.multirun) {
    setter_ = own_setter_;
    for (size_t i = 0; i < defaults_.size(); ++i) {
      DDP_RETURN_IF_ERROR(list_.options()[i].set(defaults_[i].second));
    }
  }
  std::vector<FileAssignment> all = file_.assignments;
  for (const OptionAssignment& choice : picked) {
    if (!IsGroupFlag(choice.path)) continue;
    const ConfigFile& file = groups_.at(GroupKey(choice.path, choice.value));
    all.insert(all.end(), file.assignments.begin(), file.assignments.end());
  }
  all.insert(all.end(), overrides_.begin(), overrides_.end());
  for (const OptionAssignment& choice : picked) {
    if (!IsGroupFlag(choice.path)) all.push_back({choice});
  }
  return Apply(all);
}

absl::Status Program::Apply(const std::vector<FileAssignment>& assignments) {
  references_.clear();
  for (const FileAssignment& assignment : assignments) {
    references_.erase(assignment.path);
    if (assignment.has_references) {
      references_[assignment.path] = assignment;
    } else {
      DDP_RETURN_IF_ERROR(
          WithHint(setter_.Set(assignment, list_), assignment.path, assignment.value));
    }
  }
  return Settle();
}

// What is referred to may be implied, or a folder of run_dir, which depend on other options in
// turn, and these on references. So all are set until nothing changes.
absl::Status Program::Settle() {
  constexpr int kMostRounds = 8;
  for (int round = 0; round < kMostRounds; ++round) {
    const auto before = list_.Table();
    DDP_RETURN_IF_ERROR(SetReferences(references_, list_, setter_));
    DDP_RETURN_IF_ERROR(Imply());
    if (!options_.multirun) DDP_RETURN_IF_ERROR(UseRunDir());
    if (references_.empty() || list_.Table() == before) return absl::OkStatus();
  }
  const OptionAssignment& one = references_.begin()->second;
  return absl::InvalidArgumentError(
      absl::StrCat(one.written, "=", one.value,
                   " refers to what depends on it: no value stays; give it without references"));
}

absl::Status Program::Imply() {
  if (spec_.implied == nullptr) return absl::OkStatus();
  // What was implied by other values than those that options have now is implied no more.
  for (size_t i = 0; i < defaults_.size(); ++i) {
    const auto& [path, value] = defaults_[i];
    if (implied_.erase(path) == 0 || setter_.Written(path)) continue;
    DDP_RETURN_IF_ERROR(list_.options()[i].set(value));
  }
  std::set<std::string> other_groups;  // the user has chosen another name
  for (const auto& [path, value] : spec_.implied()) {
    const size_t dot = path.rfind('.');
    const std::string group = dot == std::string::npos ? "" : path.substr(0, dot);
    if (other_groups.contains(group)) continue;
    DDP_ASSIGN_OR_RETURN(const OptionRef* const option, all_.Find(path));
    if (!setter_.Written(path)) {
      DDP_RETURN_IF_ERROR(option->set(value));
      implied_.insert(option->path);
    } else if (path == absl::StrCat(group, ".name") && option->get() != value) {
      other_groups.insert(group);
    }
  }
  return absl::OkStatus();
}

absl::Status Program::Validate() {
  absl::Status status = list_.Validate();
  if (status.ok()) status = spec_.validate();
  const std::optional<OptionProblem> problem = ProblemOf(status);
  if (!problem) return status;
  // Explain comes first, for the names that the user wrote: it would drop the hint.
  return WithHint(absl::Status(status.code(), setter_.Explain(status, list_)), problem->path,
                  problem->value);
}

// What commas in the value are, or would be. `path` is empty for a group of files.
absl::Status Program::WithHint(const absl::Status& status, const std::string& path,
                               const std::string& value) const {
  if (status.ok()) return status;
  const absl::StatusOr<const OptionRef*> option = list_.Find(path);
  const OptionKind kind = option.ok() ? (*option)->kind : OptionKind::kText;
  std::string hint;
  if (options_.multirun && CommasAreOfTheValue(value, kind)) {
    hint = absl::StrCat("; its commas are no choices, but belong to one ",
                        kind == OptionKind::kList ? "list" : "device map",
                        "; for choices give choice(…)");
  } else if (!options_.multirun && LooksLikeChoices(value, kind) && ParseChoices(value).ok()) {
    hint = "; to run each of the choices add multirun=true";
  }
  return absl::Status(status.code(), absl::StrCat(status.message(), hint));
}

// The launcher that this is an option of, if it is not the one that the configuration names; else
// empty. auto, which starts no queue, may be any other.
std::string Program::UnusedLauncherOf(const std::string& path) const {
  const std::string name = LauncherOf(path);
  if (name == spec_.launch->name) return "";
  return spec_.launch->name != kAuto || launchers::FindQueue(name) ? name : "";
}

// An option of a launcher that is not used would be ignored in silence.
absl::Status Program::CheckLaunchersOptions() const {
  DDP_RETURN_IF_ERROR(CheckGpus());
  for (const OptionAssignment& given : command_line_) {
    const std::string name = LauncherOf(given.path);
    if (name.empty() || name == spec_.launch->name) continue;
    const absl::StatusOr<launchers::Choice> choice =
        launchers::Choose(*spec_.launch, Environment::FromProcess());
    // Without a choice there is a worse error, which comes later.
    if (!choice.ok()) return absl::OkStatus();
    if (choice->launcher->name() == name) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(given.written, "=", given.value, " is for launcher ", name,
                     ", but the launcher is ", choice->launcher->name(),
                     choice->detected ? "; leave it out: ranks are started already"
                                      : absl::StrCat("; add launcher=", name)));
  }
  return absl::OkStatus();
}

// GPUs that a queue is asked for, and that the ranks are told not to use.
absl::Status Program::CheckGpus() const {
  const absl::StatusOr<const OptionRef*> device = list_.Find("device");
  if (!device.ok() || (*device)->get() != "cpu" || !launchers::FindQueue(spec_.launch->name)) {
    return absl::OkStatus();
  }
  for (const OptionRef& option : list_.options()) {
    const std::string value = option.get();
    const bool is_of_queue = absl::StrContains(
        absl::StrCat(".", option.path), absl::StrCat(".", spec_.launch->name, ".gpus_per_node"));
    if (!is_of_queue || value == kAuto || value == "0") continue;
    return OptionError(option.path, value,
                       "asks for GPUs that nothing would use: the option device is cpu");
  }
  return absl::OkStatus();
}

// The number of ranks that the run had whose config.yaml is used again. In a sweep: for the job
// that the options are of.
absl::Status Program::UseRecordedSize() {
  constexpr absl::string_view kSize = "nproc_per_node";
  const absl::StatusOr<const OptionRef*> option = list_.Find(kSize);
  if (files_.empty() || !option.ok() || spec_.gives_size()) return absl::OkStatus();
  for (const auto& [path, unset] : defaults_) {
    if (path == (*option)->path && (*option)->get() != unset) return absl::OkStatus();
  }
  const Environment env = Environment::FromProcess();
  // By which launcher local is told the size, as torchrun is, where options do not give it.
  if (env.Has("PET_NPROC_PER_NODE")) return absl::OkStatus();
  if (!spec_.launch->nnodes && env.Has("PET_NNODES")) return absl::OkStatus();
  std::optional<RunRecordOptions> record;
  std::string path;
  for (auto file = files_.rbegin(); file != files_.rend() && !record; ++file) {
    const std::string name = file->substr(file->rfind('/') + 1);
    const bool is_of_run = name == "config.yaml" || name == "config" ||  // it may be left out
                           absl::StartsWith(name, "config_step_");
    if (!is_of_run) continue;
    path = absl::StrCat(DirectoryOf(*file), "/", kRunRecordFile);
    DDP_ASSIGN_OR_RETURN(record, ReadRunRecord(path));
  }
  const int nnodes = spec_.launch->Nnodes();
  if (!record || record->world_size % nnodes != 0) return absl::OkStatus();
  const absl::StatusOr<launchers::Choice> choice = launchers::Choose(*spec_.launch, env);
  if (!choice.ok() || choice->detected) return absl::OkStatus();
  spec_.launch->nproc_per_node = record->world_size / nnodes;
  recorded_size_ = (*option)->path;
  if (!options_.print_config && !std::exchange(has_said_size_, true)) {
    std::fprintf(stderr, "world size %d, as %s says\n", record->world_size, path.c_str());
  }
  return absl::OkStatus();
}

// Whether the folder of run_dir=auto is more than a name in what is printed or tried out.
bool Program::MakesRunDir() const {
  if (options_.print_config || spec_.leaves_nothing()) return false;
  const std::unique_ptr<launchers::Launcher> queue = launchers::FindQueue(spec_.launch->name);
  return queue == nullptr || !queue->Mode(*spec_.launch).dry_run;
}

// Chooses the folder of run_dir=auto, which the options that are valid get in its place. Makes it,
// but for a sweep, whose jobs are to be checked before.
absl::Status Program::ChooseRunDir(const std::string& program) {
  const bool counts = !from_here_.empty();  // for an option that names no folder of its own
  if (options_.run_dir != kAuto || !counts) return absl::OkStatus();
  const Environment env = Environment::FromProcess();
  const std::string nodes = env.Get("PET_NNODES").value_or("1");
  const bool of_one_node =
      spec_.launch->nnodes ? *spec_.launch->nnodes == 1 : nodes == "1" || nodes == "1:1";
  if (!of_one_node && launchers::FindQueue(spec_.launch->name) == nullptr) {
    return OptionError("run_dir", kAuto,
                       "is chosen on each node, whose launchers do not meet; give a folder");
  }
  if (options_.sweep_report) {
    return OptionError("run_dir", kAuto, "is a new folder; give that of the sweep to report of");
  }
  if (spec_.resume.needs_own() && from_here_.count(spec_.resume.folder) > 0) {
    return OptionError(
        "run_dir", kAuto,
        absl::StrCat("is a new folder, and the run needs a checkpoint in its folder; "
                     "give the run_dir of the run that has saved it, or ",
                     list_.ShortNames().at(spec_.resume.folder), ", or in ",
                     list_.ShortNames().at(spec_.resume.path), " the path of a checkpoint"));
  }
  const absl::StatusOr<launchers::Choice> choice = launchers::Choose(*spec_.launch, env);
  if (choice.ok() && choice->detected && choice->rank->world_size > 1) {
    return OptionError("run_dir", kAuto,
                       "is chosen by the process that starts the ranks, but these are started "
                       "already; give a folder");
  }
  DDP_ASSIGN_OR_RETURN(run_dir_, NewRunDir(Stem(files_.empty() ? program : files_.back()),
                                           MakesRunDir() && !options_.multirun));
  return UseRunDir();
}

// Gives options that name folders, and that nobody has given, theirs in run_dir_, if it is not
// empty.
absl::Status Program::UseRunDir() {
  if (run_dir_.empty()) return absl::OkStatus();
  for (const auto& [path, pattern] : spec_.job_options) {
    if (!absl::StrContains(pattern, "{folder}") || absl::StrContains(pattern, "{name}")) continue;
    DDP_ASSIGN_OR_RETURN(const OptionRef* const option, list_.Find(path));
    if (!option->get().empty() && from_here_.count(option->path) == 0) continue;
    DDP_RETURN_IF_ERROR(option->set(absl::StrReplaceAll(pattern, {{"{folder}", run_dir_}})));
    from_here_.insert(option->path);
  }
  return absl::OkStatus();
}

void Program::Freeze(const std::string& program) {
  const auto values = list_.Table();
  std::vector<std::string> frozen = {program};
  const auto add = [&](size_t i) {
    frozen.push_back(absl::StrCat(values[i].first, "=", Quoted(values[i].second)));
  };
  if (launchers::FindQueue(spec_.launch->name)) {
    for (size_t i = 0; i < values.size(); ++i) {
      // What was set to its default would be implied otherwise in the job.
      if (values[i].second != defaults_[i].second || setter_.Written(values[i].first)) add(i);
    }
    arguments_ = std::move(frozen);
    return;
  }
  if (files_.empty() && group_flags_.empty() && from_here_.empty()) return;
  std::set<std::string> paths = from_here_;
  for (const FileAssignment& assignment : file_.assignments) paths.insert(assignment.path);
  for (size_t i = 0; i < values.size(); ++i) {
    const bool is_default = values[i].second == defaults_[i].second && spec_.implied == nullptr;
    // Ranks know how many they are.
    if (values[i].first == recorded_size_) continue;
    if (paths.count(values[i].first) > 0 && !is_default &&
        UnusedLauncherOf(values[i].first).empty()) {
      add(i);
    }
  }
  // As the user wrote them, for messages of the ranks; "--noprogress" has no value.
  for (const OptionAssignment& assignment : command_line_) {
    if (IsOwn(assignment) || from_here_.count(assignment.path) > 0) continue;
    absl::string_view name = assignment.written;
    while (absl::ConsumePrefix(&name, "-")) {
    }
    const auto option = all_.Find(absl::StrReplaceAll(name, {{"-", "_"}}));
    const bool has_value = option.ok() && (*option)->path == assignment.path;
    frozen.push_back(has_value ? absl::StrCat(assignment.written, "=", assignment.value)
                               : assignment.written);
  }
  arguments_ = std::move(frozen);
}

absl::Status Program::NoChoices() const {
  std::string given;
  for (const OptionAssignment& assignment : overrides_) {
    // The folder of the sweep is no option that one would sweep.
    if (assignment.path == spec_.job_options.at(0).first) continue;
    given = absl::StrCat(": ", assignment.written, "=", assignment.value, " is one value");
  }
  return OptionError(
      "multirun", "true",
      absl::StrCat("has no choices", given,
                   "; give some, as in lr=0.1,0.01 'seed=range(0,3)' 'lr=choice(1)', "
                   "or a file with sweep:"));
}

// The folder of the sweep is one for all jobs: its value refers to no option that the choices set,
// directly or by others.
absl::Status Program::CheckIsOneFolder(const OptionRef& folder) const {
  const auto is_overridden = [&](const std::string& path) {
    return std::any_of(overrides_.begin(), overrides_.end(),
                       [&](const FileAssignment& a) { return a.path == path; });
  };
  std::set<std::string> swept;
  for (const Choices& choices : choices_) swept.insert(choices.path);
  for (const auto& [key, file] : groups_) {
    for (const FileAssignment& assignment : file.assignments) {
      if (is_overridden(assignment.path)) continue;
      swept.insert(assignment.path);
      if (assignment.path != folder.path) continue;
      std::fprintf(stderr, "warning: %s=%s is for single runs; a sweep has one folder\n",
                   assignment.written.c_str(), assignment.value.c_str());
    }
  }
  std::map<std::string, const FileAssignment*> last;  // of each option, as in Apply
  for (const FileAssignment& assignment : file_.assignments) last[assignment.path] = &assignment;
  for (const FileAssignment& assignment : overrides_) last[assignment.path] = &assignment;
  std::vector<std::string> paths = {folder.path};  // what the value depends on
  for (size_t i = 0; i < paths.size(); ++i) {
    if (i > 0 && swept.contains(paths[i])) {
      const FileAssignment& value = *last.at(folder.path);
      return absl::InvalidArgumentError(absl::StrCat(
          value.written, "=", value.value, " depends on ", list_.ShortNames().at(paths[i]),
          ", which the choices set, but it is the folder of the whole sweep; name one without "
          "that reference: each job has its own in there"));
    }
    const auto found = last.find(paths[i]);
    if (found == last.end() || !found->second->has_references) continue;
    const auto note = [&](absl::string_view name) -> absl::StatusOr<std::string> {
      DDP_ASSIGN_OR_RETURN(const OptionRef* const option, list_.Find(name));
      if (std::find(paths.begin(), paths.end(), option->path) == paths.end()) {
        paths.push_back(option->path);
      }
      return option->get();
    };
    DDP_RETURN_IF_ERROR(ReplaceReferences(found->second->value, note).status());
  }
  return absl::OkStatus();
}

// The log folder and run_dir are both the folder of the sweep, but the first counts alone.
absl::Status Program::CheckSweepFolder(const OptionRef& folder) const {
  const std::string value = folder.get();
  const std::string& run_dir = options_.run_dir;
  if (value.empty() || run_dir.empty() || run_dir == value) return absl::OkStatus();
  const bool of_command =
      std::any_of(command_line_.begin(), command_line_.end(),
                  [](const OptionAssignment& a) { return a.path == "run_dir"; });
  if (of_command) {
    return OptionError(
        "run_dir", run_dir,
        absl::StrCat("is no folder of this sweep, which ", list_.ShortNames().at(folder.path), "=",
                     value, " names; give one of the two"));
  }
  std::fprintf(stderr, "warning: run_dir=%s is for single runs; the sweep is in %s\n",
               run_dir.c_str(), value.c_str());
  return absl::OkStatus();
}

// A job has its own files and folders. Others that the user has named must not be passed over in
// silence: an error on the command line, and a warning in a file, which is for single runs, too.
absl::Status Program::CheckJobOptions(const std::string& sweep_folder) const {
  for (size_t i = 1; i < spec_.job_options.size(); ++i) {
    const std::string& path = spec_.job_options[i].first;
    const std::string& pattern = spec_.job_options[i].second;
    DDP_ASSIGN_OR_RETURN(const OptionRef* const option, list_.Find(path));
    const bool by_name = absl::StrContains(pattern, "{name}");
    const auto is_of_this = [&](const auto& assignment) { return assignment.path == option->path; };
    const auto is_lost = [&](const std::string& value) {
      const bool is_name = by_name && !absl::StrContains(value, '/');
      return !value.empty() && !is_name && value != JobValue(pattern, sweep_folder, value);
    };
    const auto problem = [&](const std::string& value) {
      return absl::StrCat("is for a single run: each job of a sweep has its own, ",
                          JobValue(pattern, absl::StrCat(sweep_folder, "/JOB"), value));
    };
    const auto refuse = [&](const std::string& value) {
      const std::string name = value.substr(value.rfind('/') + 1);
      return OptionError(
          option->path, value,
          absl::StrCat(problem(value),
                       by_name ? "; give a name without folders" : "; leave it out, or empty",
                       by_name && !name.empty() ? absl::StrCat(": ", name) : ""));
    };
    const auto choices = std::find_if(choices_.begin(), choices_.end(), is_of_this);
    if (choices != choices_.end()) {
      const auto lost = std::find_if(choices->values.begin(), choices->values.end(), is_lost);
      if (lost != choices->values.end()) return refuse(*lost);
      continue;
    }
    if (std::any_of(overrides_.begin(), overrides_.end(), is_of_this)) {
      if (is_lost(option->get())) return refuse(option->get());
      continue;
    }
    std::vector<FileAssignment> of_files = file_.assignments;
    for (const auto& [key, file] : groups_) {
      of_files.insert(of_files.end(), file.assignments.begin(), file.assignments.end());
    }
    const auto last = std::find_if(of_files.rbegin(), of_files.rend(), is_of_this);
    if (last == of_files.rend()) continue;
    const std::string value = last->has_references ? option->get() : last->value;
    if (!is_lost(value)) continue;
    std::fprintf(stderr, "warning: %s=%s %s\n", last->written.c_str(), value.c_str(),
                 problem(value).c_str());
  }
  return absl::OkStatus();
}

// Whether a sweep is one of dry runs: of its `jobs` so many leave nothing on disk.
absl::StatusOr<bool> Program::TriesOut(size_t jobs, size_t leave_nothing) const {
  if (leave_nothing == 0) return false;
  if (leave_nothing < jobs) {
    return absl::InvalidArgumentError(
        absl::StrCat(leave_nothing, " of the ", jobs,
                     " jobs leave nothing on disk, as dry runs do, and the others do not; make a "
                     "sweep of each kind"));
  }
  if (options_.sweep_report) {
    return OptionError("sweep_report", "true",
                       "has nothing to show: these jobs leave nothing on disk, as dry runs do; for "
                       "the report leave out what makes them so");
  }
  const std::unique_ptr<launchers::Launcher> queue = launchers::FindQueue(spec_.launch->name);
  if (queue == nullptr) return true;
  if (queue->Mode(*spec_.launch).dry_run) return false;  // it only prints
  return OptionError(
      "multirun", "true",
      absl::StrCat("would queue its jobs with launcher ", queue->name(),
                   ", where they need folders, but they leave nothing on disk, as dry runs do; "
                   "leave the launcher out to try them out here, or see by the launcher's own "
                   "dry_run what would be submitted"));
}

absl::StatusOr<int> Program::Sweep(const std::string& program_path) {
  if (choices_.empty()) return NoChoices();
  DDP_RETURN_IF_ERROR(SetAll({}));
  const std::string& path = spec_.job_options.at(0).first;
  DDP_ASSIGN_OR_RETURN(const OptionRef* const folder, list_.Find(path));
  for (const Choices& choices : choices_) {
    if (choices.path != path) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(choices.written, "=", absl::StrJoin(choices.values, ","),
                     " are choices, but it is the folder of the whole sweep"));
  }
  DDP_RETURN_IF_ERROR(CheckIsOneFolder(*folder));
  DDP_RETURN_IF_ERROR(CheckSweepFolder(*folder));
  std::string sweep_folder = folder->get();
  if (sweep_folder.empty() && !options_.run_dir.empty()) {
    DDP_RETURN_IF_ERROR(UseRunDir());
    DDP_RETURN_IF_ERROR(ChooseRunDir(arguments_[0]));
    sweep_folder = folder->get();
  }
  if (sweep_folder.empty()) {
    return OptionError(folder->path, "", "is needed by multirun: the folder of the sweep");
  }
  DDP_RETURN_IF_ERROR(CheckJobOptions(sweep_folder));
  size_t leave_nothing = 0;  // of the jobs
  SweepSpec spec = {.choices = choices_,
                    .folder = sweep_folder,
                    .job_options = spec_.job_options,
                    .resume = spec_.resume,
                    .launch = spec_.launch,
                    .defaults = defaults_,
                    .set = [this](const std::vector<OptionAssignment>& a) { return SetAll(a); },
                    .validate = [this, &leave_nothing]() -> absl::Status {
                      if (spec_.leaves_nothing()) ++leave_nothing;
                      DDP_RETURN_IF_ERROR(Validate());
                      DDP_RETURN_IF_ERROR(CheckLaunchersOptions());
                      return UseRecordedSize();
                    }};
  DDP_ASSIGN_OR_RETURN(const std::vector<Job> jobs, MakeJobs(list_, spec));
  DDP_ASSIGN_OR_RETURN(const launchers::Choice choice,
                       launchers::Choose(*spec_.launch, Environment::FromProcess()));
  if (choice.detected) {
    return OptionError(
        "multirun", "true",
        absl::StrCat("starts the ranks of each job itself, but this process is one (",
                     choice.reason, "); start the program without a launcher",
                     choice.rank->world_size == 1
                         ? ", or, since this rank is alone, add launcher=local"
                         : ""));
  }
  if (options_.print_config) {
    for (const Job& job : jobs) {
      std::printf("# %s\n%s\n", job.Description().c_str(), job.options.c_str());
    }
    return 0;
  }
  DDP_ASSIGN_OR_RETURN(const SweepMetric metric, ParseSweepMetric(options_.sweep_metric));
  DDP_ASSIGN_OR_RETURN(const bool tries_out, TriesOut(jobs.size(), leave_nothing));
  if (options_.run_dir == kAuto && from_here_.count(folder->path) > 0 && MakesRunDir()) {
    DDP_RETURN_IF_ERROR(MakeDirectories(kRuns));
    // Not that of another sweep, which has begun meanwhile.
    if (mkdir(sweep_folder.c_str(), 0777) != 0) {
      return FileError(errno, "making folder", sweep_folder);
    }
  }
  const RunSweepOptions options = {.program = program_path,
                                   .build = BuildOf(kOwnProgram),
                                   .folder = sweep_folder,
                                   .folder_option = folder->path,
                                   .at_once = options_.sweep_jobs,
                                   .rerun_changed = options_.sweep_rerun == "changed",
                                   .metric = metric,
                                   .launch = *spec_.launch,
                                   .resume = spec_.resume};
  if (tries_out) return TrySweep(jobs, options);
  return options_.sweep_report ? ReportSweep(jobs, options) : RunSweep(jobs, options);
}

std::string Program::Explain(const absl::Status& status) const {
  return setter_.Explain(status, all_);
}

}  // namespace ddp::config
