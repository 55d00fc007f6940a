// Start-up of a program: reads configuration files and the command line, and runs sweeps or submits
// jobs.
//
//   int main(int argc, char** argv) {
//     MyOptions options;  // has an OptionsOf, and a session::SessionOptions
//     ddp::config::Program program(
//         ddp::ListOptions(options),
//         {.about = "Trains my model.", .launch = &options.session.launcher});
//     if (const std::optional<int> code = program.Start(argc, argv)) return *code;
//     options.session.program_options = &program.options();
//     return ddp::session::Run(options.session, program.argc(), program.argv(), Train,
//                              program.explain());
//   }
//
// Beside its own options such a program takes those of ProgramOptions. docs/configuration.md,
// docs/sweeps.md.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/option_flags.h"
#include "base/option_list.h"
#include "base/options.h"
#include "ddp/config/yaml_file.h"
#include "launchers/launcher.h"

namespace ddp::config {

// Options of Program itself: on the command line only, not part of a run's configuration.
struct ProgramOptions {
  std::string config = "";
  std::string config_path = "";
  std::string config_name = "";
  bool print_config = false;
  bool multirun = false;
  int sweep_jobs = 1;
  std::string sweep_metric = "";
};

constexpr auto OptionsOf(const ProgramOptions&) {
  return Options(Option("config", &ProgramOptions::config, "configuration file (YAML)"),
                 Option("config_path", &ProgramOptions::config_path, "folder of config_name"),
                 Option("config_name", &ProgramOptions::config_name,
                        "configuration file in config_path; .yaml may be left out"),
                 Option("print_config", &ProgramOptions::print_config,
                        "print the effective configuration, and exit"),
                 Option("multirun", &ProgramOptions::multirun,
                        "run each combination of the choices: lr=0.1,0.01 'seed=range(0,3)'")
                     .Alias("m"),
                 Option("sweep_jobs", &ProgramOptions::sweep_jobs,
                        "multirun: maximum number of jobs at a time; in a queue 1 means no limit")
                     .AtLeast(1)
                     .AtMost(1e5),
                 Option("sweep_metric", &ProgramOptions::sweep_metric,
                        "multirun: metric that sorts the final table: NAME:max or NAME:min"));
}

// Description of the program, from its main().
struct ProgramSpec {
  std::string about;                           // first lines of --help
  launchers::LaunchOptions* launch = nullptr;  // among the program's options; required
  std::function<absl::Status()> validate = [] { return absl::OkStatus(); };  // beyond ranges
  std::string sweep_metric = "";  // default of --sweep_metric
  // Options (by path) that a sweep sets for each job. The first is the log folder: for a sweep it
  // contains the jobs' folders. In the values, "{folder}" is the job's folder and "{name}" the last
  // component of the option's own value; with "{name}", an option whose value is empty stays empty.
  std::vector<std::pair<std::string, std::string>> job_options = {{"log_dir", "{folder}"}};
};

// Thread-compatible. `list` and spec.launch must outlive it.
class Program {
 public:
  Program(OptionList list, ProgramSpec spec);

  // Sets the options: from the configuration file, then from the command line, left to right; then
  // validates them. Relative paths are relative to the folder in which the user called `bazel run`.
  // nullopt: go on with the run. Otherwise the exit code: 0 after --help and --print_config; that
  // of the sweep after --multirun (0 if all jobs have finished); 2, with one line on standard
  // error, for what is not valid, also for an option in `list` that has the name of another or of
  // one of ProgramOptions.
  std::optional<int> Start(int argc, char** argv);

  // The configuration in effect, as YAML that --config takes.
  std::string Configuration() const;

  // The program's options, which the ranks compare: SessionOptions::program_options.
  const OptionList& options() const { return list_; }

  // The command line for ranks: as it was, or for a queue with the configuration in effect, so that
  // a file that changes while a job waits does not change the job.
  int argc() const { return static_cast<int>(argv_.size()) - 1; }
  char** argv() { return argv_.data(); }

  // The message of a status, with options as the user wrote them.
  std::string Explain(const absl::Status& status) const;
  std::function<std::string(const absl::Status&)> explain() const {
    return [this](const absl::Status& status) { return Explain(status); };
  }

 private:
  absl::Status Configure(int argc, char** argv);
  // Fills assignments_ and choices_, and sets the program's own options.
  absl::Status Read(const CommandLine& line);
  bool IsOwn(const OptionAssignment& assignment) const;
  absl::Status SetOwnOptions();
  absl::Status ReadFile();
  absl::Status Override(OptionAssignment assignment);
  absl::Status Apply(const std::vector<OptionAssignment>& assignments);
  absl::Status Validate();
  absl::Status CheckLaunchersOptions() const;
  absl::Status WithHint(const absl::Status& status, const std::string& value) const;
  absl::StatusOr<int> Sweep(const std::string& program_path);
  void FreezeForQueue();

  const OptionList list_;
  const ProgramSpec spec_;
  ProgramOptions options_;
  const OptionList own_;                                       // of options_
  OptionList all_;                                             // list_ and own_
  std::vector<std::pair<std::string, std::string>> defaults_;  // of list_, by path
  OptionSetter setter_;
  bool help_ = false;
  std::vector<OptionAssignment> command_line_;
  std::vector<OptionAssignment> assignments_;  // of list_, files first
  std::vector<Choices> choices_;
  std::vector<std::string> arguments_;
  std::vector<char*> argv_;
};

}  // namespace ddp::config
