// Helpers for Launcher::Detect: integer variables, uniform errors, a sanity check, and a rendezvous
// port that every rank derives from the job's id, without communication. Thread-safe.
//
//   DDP_ASSIGN_OR_RETURN(std::optional<int> rank, FirstInt(env, {"PMI_RANK"}));
//   if (!rank) return BadEnvironment("PMI_RANK is missing", env, Variables(), "start with mpirun");
//   result.master_port = PortFromJob(/*job=*/4711, /*step=*/0);
//   DDP_RETURN_IF_ERROR(CheckRank(result, env, Variables(), "start with mpirun"));
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/environment.h"
#include "launchers/rank.h"

namespace ddp::launchers {

// The value of the first of `names` that is set; nullopt if none is. InvalidArgument, naming
// variable and value, if the value is not an integer in [0, max].
absl::StatusOr<std::optional<int>> FirstInt(const Environment& env,
                                            const std::vector<std::string>& names,
                                            int max = 1 << 20);

// Returns how often SLURM has requeued the job that this process is a part of, whatever has started
// it there: SLURM_RESTART_COUNT; 0 outside of a job. InvalidArgument, naming the variable, if its
// value is no such number.
absl::StatusOr<int> RequeuesOfJob(const Environment& env);

// Whether this process is part of a job of SLURM, whatever has started it there.
bool IsInSlurmJob(const Environment& env);

// Rank::job of a process with this run_id: SLURM's job, if it is part of one, whatever has started
// it there, since most launchers in a job have another run_id once it is requeued. Elsewhere
// run_id; torchrun's is "none" unless the user gives one, and then it is the name of torchrun's
// folder of logs (RunFolderOf, base/error_file.h). Runs in one SLURM job are one job.
std::string JobOf(const Environment& env, const std::string& run_id);

// InvalidArgument with the problem, the values of those `variables` that are set, and the remedy.
absl::Status BadEnvironment(absl::string_view problem, const Environment& env,
                            const std::vector<std::string>& variables, absl::string_view remedy);

// Says what is wrong with `address`, which should be a host name, an IPv4 address, or an IPv6
// address without brackets: "has a scheme: …"; empty if nothing is. Does not resolve names; whether
// the interface of a link-local address exists is looked up.
std::string AddressProblem(absl::string_view address);

// BadEnvironment if the fields of `rank` contradict each other, such as rank >= world_size, or if
// its master_addr has an AddressProblem or its port is none while others must find it.
absl::Status CheckRank(const Rank& rank, const Environment& env,
                       const std::vector<std::string>& variables, absl::string_view remedy);

// Ports that are derived from a job's id are in [kFirstPort, kFirstPort + kPorts): unprivileged,
// below Linux's ephemeral range (32768-60999, used for outgoing connections) and below Kubernetes'
// node ports (30000-32767).
inline constexpr int kFirstPort = 20000;
inline constexpr int kPorts = 10000;

// Deterministic. Jobs and steps with nearby numbers, which may share a machine, get different
// ports.
int PortFromJob(uint64_t job, uint64_t step);

// Derives the port from a hash, for job ids that are not numbers. Two names collide with
// probability 1 / kPorts.
int PortFromName(absl::string_view name);

}  // namespace ddp::launchers
