// torchrun's variables, by which every launcher that starts processes tells them who they are.
//
//   for (const auto& [name, value] : VariablesFromRank(rank)) setenv(name, value, 1);  // parent
//   DDP_ASSIGN_OR_RETURN(std::optional<Rank> rank, RankFromVariables(env));             // child
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/environment.h"
#include "launchers/rank.h"

namespace ddp::launchers {

// Ours beside torchrun's: number of the listening socket that rank 0 inherits.
inline constexpr char kMasterListenFd[] = "DDP_MASTER_LISTEN_FD";

// The names that RankFromVariables reads, torchrun's own.
std::vector<std::string> TorchrunVariables();

// nullopt if neither rank, world size nor node is there: MASTER_ADDR and MASTER_PORT alone say
// nothing, people export them for any launcher. Without all of LOCAL_RANK, LOCAL_WORLD_SIZE and
// GROUP_RANK (Kubernetes' PyTorchJob), each rank is a node of its own. InvalidArgument, with the
// values of `shown` and `remedy`, if half set or contradicting; also if DDP_MASTER_LISTEN_FD is no
// listening socket of this process. Marks that socket close-on-exec.
absl::StatusOr<std::optional<Rank>> RankFromVariables(
    const Environment& env, const std::vector<std::string>& shown = TorchrunVariables(),
    absl::string_view remedy =
        "start with torchrun, which sets all of them, or unset those that are left over; "
        "--launcher=NAME with another launcher ignores them");

// The reverse, all names that apply. The socket keeps its number; its flags are the caller's job.
std::map<std::string, std::string> VariablesFromRank(const Rank& rank);

}  // namespace ddp::launchers
