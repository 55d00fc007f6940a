#include "launchers/detect.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace ddp::launchers {
namespace {

// What contradicts what in `rank`; empty if nothing does.
std::string Contradiction(const Rank& rank) {
  if (rank.world_size < 1) return absl::StrCat("the world size is ", rank.world_size);
  if (rank.local_world_size < 1) {
    return absl::StrCat("the local world size is ", rank.local_world_size);
  }
  if (rank.rank < 0 || rank.rank >= rank.world_size) {
    return absl::StrCat("rank ", rank.rank, " is not below the world size ", rank.world_size);
  }
  if (rank.local_rank < 0 || rank.local_rank >= rank.local_world_size) {
    return absl::StrCat("local rank ", rank.local_rank, " is not below the local world size ",
                        rank.local_world_size);
  }
  if (rank.local_world_size > rank.world_size) {
    return absl::StrCat("the local world size ", rank.local_world_size, " exceeds the world size ",
                        rank.world_size);
  }
  // Each other node has at least one rank.
  const int other_nodes = rank.world_size - rank.local_world_size;
  if (rank.node_rank < 0 || rank.node_rank > other_nodes) {
    return absl::StrCat("node rank ", rank.node_rank, " is impossible with ", rank.local_world_size,
                        " of ", rank.world_size, " ranks on this node");
  }
  if (rank.local_world_size == rank.world_size && rank.local_rank != rank.rank) {
    return absl::StrCat("all ranks are on this node, but local rank ", rank.local_rank,
                        " is not rank ", rank.rank);
  }
  if (rank.world_size > 1 && (rank.master_port < 1 || rank.master_port > 65535)) {
    return absl::StrCat("master port ", rank.master_port, " is not in [1, 65535]");
  }
  return "";
}

}  // namespace

absl::StatusOr<std::optional<int>> FirstInt(const Environment& env,
                                            const std::vector<std::string>& names, int max) {
  for (const std::string& name : names) {
    if (!env.Has(name)) continue;
    DDP_ASSIGN_OR_RETURN(int64_t value, env.GetInt(name, 0, max));
    return static_cast<int>(value);
  }
  return std::nullopt;
}

absl::Status BadEnvironment(absl::string_view problem, const Environment& env,
                            const std::vector<std::string>& variables, absl::string_view remedy) {
  return absl::InvalidArgumentError(
      absl::StrCat(problem, " (set: ", env.Describe(variables), "); ", remedy));
}

absl::Status CheckRank(const Rank& rank, const Environment& env,
                       const std::vector<std::string>& variables, absl::string_view remedy) {
  const std::string problem = Contradiction(rank);
  return problem.empty() ? absl::OkStatus() : BadEnvironment(problem, env, variables, remedy);
}

int PortFromJob(uint64_t job, uint64_t step) {
  // 101 is coprime to kPorts, and 100 steps of a job do not collide with those of the next jobs.
  return kFirstPort + static_cast<int>((job % kPorts * 101 + step % kPorts) % kPorts);
}

int PortFromName(absl::string_view name) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a, 64 bits
  for (unsigned char c : name) hash = (hash ^ c) * 1099511628211u;
  return kFirstPort + static_cast<int>(hash % kPorts);
}

}  // namespace ddp::launchers
