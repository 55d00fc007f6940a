// What SlurmOptions::requeue needs of the program that the job runs, for the program's own check of
// its options: launchers do not know when it saves.
//
//   DDP_RETURN_IF_ERROR(InGroup(
//       "launcher", slurm::CheckRequeue(options.launcher,
//                                       {.folder_option = "checkpoint.dir",
//                                        .has_folder = !options.checkpoint.directory.empty(),
//                                        .saves_option = "checkpoint.every",
//                                        .saves = options.checkpoint.every > 0,
//                                        .stop_signals = options.stop_signals})));
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "launchers/launcher.h"

namespace ddp::launchers::slurm {

struct RequeuedProgram {
  std::string folder_option = "";  // path of the option that names the folder of its checkpoints
  bool has_folder = false;
  std::string saves_option = "";               // path of the option that says how often it saves
  bool saves = false;                          // into the folder
  std::vector<std::string> stop_signals = {};  // after which it saves and stops: "TERM", "USR2"
};

// OptionErrors, with paths relative to LaunchOptions, if such a job could not go on: each life of
// one without checkpoints would begin anew, and the signal before the time limit would kill ranks
// that do not handle it, with what they have not saved. OK without requeue and for other launchers.
// Thread-safe.
absl::Status CheckRequeue(const LaunchOptions& options, const RequeuedProgram& program);

}  // namespace ddp::launchers::slurm
