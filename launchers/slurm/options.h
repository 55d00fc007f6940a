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
  std::string dependency = "";  // "afterok:4711"
  std::string clusters = "";    // where to submit to, of several clusters
  std::string job_name = "";    // of the jobs in the queue; empty: the program's, or a sweep's
  // Lines of bash that run on the job's first node before its ranks: "module load cuda".
  std::vector<std::string> setup = {};
  // More of srun's options, which starts the ranks; elements as in `extra`.
  std::vector<std::string> srun_args = {};
  bool label = false;  // srun --label: each line of output begins with its rank
  // Before the time limit the run is asked to save and stop (`signal`), and the job is queued
  // again; it also is after a preemption, and if a node fails.
  bool requeue = false;
  int max_requeues = 20;
  std::string signal = "USR2@120";  // name, and seconds before the time limit
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
      Option("dependency", &SlurmOptions::dependency, "sbatch --dependency")
          .Alias("slurm_dependency")
          .Incidental(),
      Option("clusters", &SlurmOptions::clusters, "sbatch --clusters: where to submit to")
          .Alias("slurm_clusters")
          .Incidental(),
      Option("job_name", &SlurmOptions::job_name, "sbatch --job-name; empty: the program's name")
          .Alias("slurm_job_name")
          .Incidental(),
      Option("setup", &SlurmOptions::setup,
             "lines of bash before the ranks start: [module load cuda]")
          .Alias("slurm_setup")
          .Incidental(),
      Option("srun_args", &SlurmOptions::srun_args,
             "further options of srun, which starts the ranks: [--cpu-bind=cores]")
          .Alias("slurm_srun_args")
          .Incidental(),
      Option("label", &SlurmOptions::label,
             "begin each line of output with its rank (srun --label)")
          .Alias("slurm_label")
          .Incidental(),
      Option("requeue", &SlurmOptions::requeue,
             "queue the job again before its time limit, and after preemption or a node's failure")
          .Alias("slurm_requeue")
          .Incidental(),
      Option("max_requeues", &SlurmOptions::max_requeues, "how often a job is queued again at most")
          .Alias("slurm_max_requeues")
          .AtLeast(0)
          .AtMost(1e6)
          .Incidental(),
      Option("signal", &SlurmOptions::signal,
             "with requeue: signal that asks the run to save, and seconds before the time limit")
          .Alias("slurm_signal")
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
