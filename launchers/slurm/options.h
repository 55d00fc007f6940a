// Options of launcher slurm for submitting jobs: launcher.slurm.…
//
// Names and values are sbatch's; unset ones are left to the cluster's defaults.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/options.h"

namespace ddp::launchers {

struct SlurmOptions {
  std::string partition = "";
  std::optional<int> gpus_per_node = std::nullopt;
  std::optional<int> cpus_per_task = std::nullopt;
  std::string mem = "";   // per node: "16G"
  std::string time = "";  // "30", minutes; "1-12:00:00"
  std::string account = "";
  std::string qos = "";
  std::string constraint = "";
  // More of sbatch's options: "--exclusive". What does not start with "-" belongs to the option
  // before it: {"--mail-type=END", "FAIL"}, since commas separate the elements of lists.
  std::vector<std::string> extra = {};
  // A folder that all nodes see: programs, scripts and logs of submitted jobs.
  std::string stage_dir = "slurm_stage";
  bool wait = false;
  std::string on_interrupt = "leave";  // what Ctrl-C does to a job that is waited for
  bool dry_run = false;
};

constexpr auto OptionsOf(const SlurmOptions&) {
  return Options(
      Option("partition", &SlurmOptions::partition, "sbatch --partition")
          .Alias("slurm_partition")
          .Incidental(),
      Option("gpus_per_node", &SlurmOptions::gpus_per_node, "sbatch --gpus-per-node")
          .Alias("slurm_gpus_per_node")
          .AtLeast(0)
          .Incidental(),
      Option("cpus_per_task", &SlurmOptions::cpus_per_task, "sbatch --cpus-per-task")
          .Alias("slurm_cpus_per_task")
          .AtLeast(1)
          .Incidental(),
      Option("mem", &SlurmOptions::mem, "sbatch --mem, per node").Alias("slurm_mem").Incidental(),
      Option("time", &SlurmOptions::time, "sbatch --time").Alias("slurm_time").Incidental(),
      Option("account", &SlurmOptions::account, "sbatch --account")
          .Alias("slurm_account")
          .Incidental(),
      Option("qos", &SlurmOptions::qos, "sbatch --qos").Alias("slurm_qos").Incidental(),
      Option("constraint", &SlurmOptions::constraint, "sbatch --constraint")
          .Alias("slurm_constraint")
          .Incidental(),
      Option("extra", &SlurmOptions::extra, "further options of sbatch: [--exclusive, --comment=x]")
          .Alias("slurm_extra")
          .Incidental(),
      Option("stage_dir", &SlurmOptions::stage_dir,
             "shared folder for programs, scripts and logs of submitted jobs")
          .Incidental(),
      Option("wait", &SlurmOptions::wait, "follow the log of the job and end with its exit code")
          .Alias("slurm_wait")
          .Incidental(),
      Option("on_interrupt", &SlurmOptions::on_interrupt,
             "effect of Ctrl-C on a job that is waited for: leave it, or cancel it")
          .OneOf("leave", "cancel")
          .Incidental(),
      Option("dry_run", &SlurmOptions::dry_run, "print the sbatch script and do not submit it")
          .Incidental());
}

}  // namespace ddp::launchers
