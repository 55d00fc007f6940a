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
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/option_flags.h"
#include "base/option_list.h"
#include "base/options.h"
#include "ddp/config/job.h"
#include "ddp/config/yaml_file.h"
#include "launchers/launcher.h"

namespace ddp::config {

// Options of Program itself: not part of a run's configuration. Those of sweeps and run_dir may
// also stand at the root of a configuration file.
struct ProgramOptions {
  std::string config = "";  // may be given several times
  std::string config_path = "";
  std::string config_name = "";
  bool print_config = false;
  std::string run_dir = "";
  bool multirun = false;
  std::optional<int> sweep_jobs = std::nullopt;
  std::string sweep_metric = "";
  std::string sweep_rerun = "failed";
  bool sweep_report = false;
};

constexpr auto OptionsOf(const ProgramOptions&) {
  return Options(
      Option("config", &ProgramOptions::config,
             "configuration file (YAML); of several the later ones count for more"),
      Option("config_path", &ProgramOptions::config_path,
             "folder of config_name, and of the files of GROUP@=NAME")
          .Alias("cp"),
      Option("config_name", &ProgramOptions::config_name,
             "configuration file in config_path; .yaml may be left out")
          .Alias("cn"),
      Option("print_config", &ProgramOptions::print_config,
             "print the effective configuration, and exit"),
      Option(
          "run_dir", &ProgramOptions::run_dir,
          "folder of the run's logs and checkpoints where their own options are not set; auto: a "
          "new one, runs/DATE-NAME"),
      Option("multirun", &ProgramOptions::multirun,
             "run each combination of the choices: lr=0.1,0.01 'seed=range(0,3)'")
          .Alias("m"),
      Option("sweep_jobs", &ProgramOptions::sweep_jobs,
             "multirun: maximum number of jobs at a time; auto: one here, any number in a queue")
          .AtLeast(1)
          .AtMost(1e5),
      Option("sweep_metric", &ProgramOptions::sweep_metric,
             "multirun: metric that sorts the final table: NAME:max or NAME:min"),
      Option("sweep_rerun", &ProgramOptions::sweep_rerun,
             "multirun: jobs to run again: those that failed; changed: also those that another "
             "build of the program has finished")
          .OneOf("failed", "changed"),
      Option("sweep_report", &ProgramOptions::sweep_report,
             "multirun: only show how the jobs do; run and submit none"));
}

// Description of the program, from its main().
struct ProgramSpec {
  std::string about;                           // first lines of --help
  launchers::LaunchOptions* launch = nullptr;  // among the program's options; required
  std::function<absl::Status()> validate = [] { return absl::OkStatus(); };  // beyond ranges
  std::string sweep_metric = "";  // default of --sweep_metric
  // Values, by path, of options that neither a file nor the command line has set, in the place of
  // the defaults; called once these have set the others. The name of a group comes before its other
  // options, which count only if that name does. "sweep_metric" is a path, too. Null: none.
  std::function<std::vector<std::pair<std::string, std::string>>()> implied = nullptr;
  // Options (by path) that a sweep sets for each job. The first is the log folder: for a sweep it
  // contains the jobs' folders. In the values, "{folder}" is the job's folder and "{name}" the last
  // component of the option's own value; with "{name}", an option whose value is empty stays empty.
  // --run_dir sets those without "{name}" that are empty. A sweep's command line may give no others
  // than the job would have, or with "{name}" a bare name; what a file says is for single runs.
  std::vector<std::pair<std::string, std::string>> job_options = {{"log_dir", "{folder}"}};
  ResumeOption resume = {};
  // Options (by path) of this process and not of the run, such as where it stops: Configuration()
  // has their defaults, so that a run that goes on is configured the same.
  std::vector<std::string> process_options = {};
  // Whether the run, as the options are, leaves nothing on disk, as a dry run: run_dir=auto is then
  // a name, of which no folder is made, and a sweep of such runs leaves nothing either (TrySweep).
  std::function<bool()> leaves_nothing = [] { return false; };
  // Whether the options, as they are, give the number of ranks by another one than nproc_per_node:
  // that of a run.yaml does not count then.
  std::function<bool()> gives_size = [] { return false; };
};

// Thread-compatible. `list` and spec.launch must outlive it.
class Program {
 public:
  Program(OptionList list, ProgramSpec spec);

  // Sets the options: from the configuration files, then from the command line, left to right; then
  // validates them. Relative paths are relative to the folder in which the user called `bazel run`.
  // nullopt: go on with the run. Otherwise the exit code: 0 after --help and --print_config; that
  // of the sweep after --multirun (0 if all jobs have finished); 2, with one line on standard
  // error, for what is not valid, also for an option in `list` that has the name of another or of
  // one of ProgramOptions.
  std::optional<int> Start(int argc, char** argv);

  // The configuration of the run, as YAML that --config takes: that in effect but for
  // ProgramSpec::process_options and the size that a run.yaml gives. Sets these for a moment.
  std::string Configuration() const;

  // The program's options, which the ranks compare: SessionOptions::program_options.
  const OptionList& options() const { return list_; }

  // Returns the facts about a run besides its configuration, as YAML for the file run.yaml beside
  // config.yaml: `world_size` ranks on `nnodes` nodes, this program and its build, and this host.
  // Where config.yaml is used again, by --config, also for the jobs of a sweep, its size counts if
  // neither the options nor the environment give one.
  std::string RunRecord(int world_size, int nnodes) const;

  // The command line for ranks: as it was, but with the values that files had when this process
  // read them in the place of the files; for a queue with the whole configuration in effect. So a
  // file that changes while a job waits, or before ranks are restarted, does not change it.
  int argc() const { return static_cast<int>(argv_.size()) - 1; }
  char** argv() { return argv_.data(); }

  // The message of a status, with options as the user wrote them.
  std::string Explain(const absl::Status& status) const;
  std::function<std::string(const absl::Status&)> explain() const {
    return [this](const absl::Status& status) { return Explain(status); };
  }

 private:
  absl::Status Configure(int argc, char** argv);
  // Fills file_, groups_, overrides_ and choices_, and sets the program's own options.
  absl::Status Read(const CommandLine& line);
  absl::Status ReadGroupFlags(const std::vector<std::string>& positional);
  bool IsOwn(const OptionAssignment& assignment) const;
  absl::Status SetOwnOptions();
  absl::Status CheckOwnOptions() const;
  absl::Status ReadFiles();
  absl::StatusOr<std::string> GroupFile(const OptionAssignment& group) const;
  absl::Status Override(OptionAssignment assignment);
  // Sets all options, from their defaults, for one combination of the choices; what an earlier one
  // has set is not set.
  absl::Status SetAll(const std::vector<OptionAssignment>& picked);
  absl::Status Apply(const std::vector<FileAssignment>& assignments);
  absl::Status Settle();
  absl::Status Imply();
  absl::Status Validate();
  std::string UnusedLauncherOf(const std::string& path) const;
  absl::Status CheckLaunchersOptions() const;
  absl::Status CheckGpus() const;
  absl::Status WithHint(const absl::Status& status, const std::string& path,
                        const std::string& value) const;
  absl::Status ChooseRunDir(const std::string& program);
  absl::Status UseRunDir();
  bool MakesRunDir() const;
  absl::Status UseRecordedSize();
  absl::Status NoChoices() const;
  absl::Status CheckIsOneFolder(const OptionRef& folder) const;
  absl::Status CheckSweepFolder(const OptionRef& folder) const;
  absl::Status CheckJobOptions(const std::string& sweep_folder) const;
  absl::StatusOr<bool> TriesOut(size_t jobs, size_t leave_nothing) const;
  absl::StatusOr<int> Sweep(const std::string& program_path);
  void Freeze(const std::string& program);

  const OptionList list_;
  const ProgramSpec spec_;
  ProgramOptions options_;
  const OptionList own_;                                       // of options_
  OptionList all_;                                             // list_ and own_
  std::vector<std::pair<std::string, std::string>> defaults_;  // of list_, by path
  OptionSetter setter_;
  OptionSetter own_setter_;  // as it was when only the program's own options were set
  bool help_ = false;
  bool has_said_size_ = false;  // the recorded one, to the user
  std::vector<OptionAssignment> command_line_;
  std::vector<OptionAssignment> group_flags_;  // "model@" and "cnn"
  std::vector<std::string> files_;             // of --config and --config_name
  ConfigFile file_;                            // all of them, and of groups without choices
  std::map<std::string, ConfigFile> groups_;   // that are choices, by "model@=cnn"
  std::vector<FileAssignment> overrides_;      // of list_, from the command line
  std::vector<Choices> choices_;
  std::map<std::string, OptionAssignment> references_;  // the last of each option, if it has some
  std::set<std::string> implied_;                       // paths of options that Imply has set
  std::string run_dir_;                                 // ProgramOptions::run_dir, or its choice
  std::set<std::string> from_here_;  // paths of options that this process has set by itself
  std::string recorded_size_;        // path of the option that a run.yaml has set; empty: none
  std::vector<std::string> arguments_;
  std::vector<char*> argv_;
};

}  // namespace ddp::config
