#include "launchers/slurm/requeue.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/option_error.h"
#include "launchers/slurm/options.h"
#include "launchers/slurm/script.h"

namespace ddp::launchers::slurm {

absl::Status CheckRequeue(const LaunchOptions& options, const RequeuedProgram& program) {
  const SlurmOptions slurm = SlurmOptionsOf(options);
  if (options.name != "slurm" || !slurm.requeue) return absl::OkStatus();
  if (!program.has_folder) {
    return OptionError(
        "slurm.requeue", "true",
        absl::StrCat("needs a folder with checkpoints to go on from: ", program.folder_option));
  }
  if (!program.saves) {
    return OptionError("slurm.requeue", "true",
                       absl::StrCat("needs checkpoints to go on from, and the program saves none: ",
                                    program.saves_option));
  }
  const std::vector<std::string>& handled = program.stop_signals;
  const std::string name = SignalOf(slurm.signal).name;
  if (std::find(handled.begin(), handled.end(), name) != handled.end()) return absl::OkStatus();
  return OptionError("slurm.signal", slurm.signal,
                     absl::StrCat("would kill the ranks before they save: ", name,
                                  " is none of stop_signals=", absl::StrJoin(handled, ",")));
}

}  // namespace ddp::launchers::slurm
