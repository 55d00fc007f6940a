// The start of a program that is configured by files and a command line, swept and submitted: what
// happens before the training of one run.
//
//   int main(int argc, char** argv) {
//     MyOptions options;  // has an OptionsOf, and a session::SessionOptions
//     ddp::config::Program program(ddp::ListOptions(options),
//                                  {.about = "Trains my model.", .launch =
//                                  &options.session.launcher});
//     if (const std::optional<int> code = program.Start(argc, argv)) return *code;
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

// How a run is configured. No part of its configuration: only on command lines.
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
                        "print the configuration that is in effect, and do nothing else"),
                 Option("multirun", &ProgramOptions::multirun,
                        "run each combination of the choices: lr=0.1,0.01 'seed=range(0,3)'")
                     .Alias("m"),
                 Option("sweep_jobs", &ProgramOptions::sweep_jobs,
                        "multirun: jobs at the same time; in a queue, if it is above 1")
                     .AtLeast(1)
                     .AtMost(1e5),
                 Option("sweep_metric", &ProgramOptions::sweep_metric,
                        "multirun: what the table at the end is sorted by: NAME:max or NAME:min"));
}

// What a program says of itself.
struct ProgramSpec {
  std::string about;                           // first lines of --help
  launchers::LaunchOptions* launch = nullptr;  // among the program's options; required
  std::function<absl::Status()> validate = [] { return absl::OkStatus(); };  // beyond ranges
  std::string sweep_metric = "";  // default of --sweep_metric
  // Options, by path, that a sweep sets for each job, with "{folder}" for the job's own folder. The
  // first is the program's folder of logs; of a sweep it holds the jobs' folders. "{name}" is the
  // last part of the path that the option has; an option that is empty then stays so.
  std::vector<std::pair<std::string, std::string>> job_options = {{"log_dir", "{folder}"}};
};

// Thread-compatible. `list` and spec.launch must outlive it.
class Program {
 public:
  Program(OptionList list, ProgramSpec spec);

  // Sets the options: from the configuration file, then from the command line, left to right; then
  // validates them. Relative paths are meant from the folder in which the user called `bazel run`.
  // nullopt: go on with the run. Otherwise the exit code: 0 after --help and --print_config; that
  // of the sweep after --multirun (0 if all jobs have finished); 2, with one line on standard
  // error, for what is not valid.
  std::optional<int> Start(int argc, char** argv);

  // The configuration in effect, as YAML that --config takes.
  std::string Configuration() const;

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
