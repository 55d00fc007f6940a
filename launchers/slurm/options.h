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
  std::vector<std::string> extra = {};  // more of sbatch's options: "--exclusive"
  // A folder that all nodes see: programs, scripts and logs of submitted jobs.
  std::string stage_dir = "slurm_stage";
  bool wait = false;
  std::string on_interrupt = "leave";  // what Ctrl-C does to a job that is waited for
  bool dry_run = false;
};

constexpr auto OptionsOf(const SlurmOptions&) {
  return Options(
      Option("partition", &SlurmOptions::partition, "sbatch --partition").Alias("slurm_partition"),
      Option("gpus_per_node", &SlurmOptions::gpus_per_node, "sbatch --gpus-per-node")
          .Alias("slurm_gpus_per_node")
          .AtLeast(0),
      Option("cpus_per_task", &SlurmOptions::cpus_per_task, "sbatch --cpus-per-task")
          .Alias("slurm_cpus_per_task")
          .AtLeast(1),
      Option("mem", &SlurmOptions::mem, "sbatch --mem, per node").Alias("slurm_mem"),
      Option("time", &SlurmOptions::time, "sbatch --time").Alias("slurm_time"),
      Option("account", &SlurmOptions::account, "sbatch --account").Alias("slurm_account"),
      Option("qos", &SlurmOptions::qos, "sbatch --qos").Alias("slurm_qos"),
      Option("constraint", &SlurmOptions::constraint, "sbatch --constraint")
          .Alias("slurm_constraint"),
      Option("extra", &SlurmOptions::extra, "more of sbatch's options: [--exclusive, --comment=x]")
          .Alias("slurm_extra"),
      Option("stage_dir", &SlurmOptions::stage_dir,
             "folder that all nodes see, for programs, scripts and logs of submitted jobs"),
      Option("wait", &SlurmOptions::wait, "follow the log of the job and end with its exit code")
          .Alias("slurm_wait"),
      Option("on_interrupt", &SlurmOptions::on_interrupt,
             "what Ctrl-C does to a job that is waited for")
          .OneOf("leave", "cancel"),
      Option("dry_run", &SlurmOptions::dry_run, "print the script and submit nothing"));
}

}  // namespace ddp::launchers
