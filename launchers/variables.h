// torchrun's environment variables: how launchers that start processes pass them their rank.
//
//   std::map<std::string, std::string> variables = VariablesFromRank(rank);            // parent
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

// Our addition to torchrun's variables: file descriptor of the listening socket that rank 0
// inherits.
inline constexpr char kMasterListenFd[] = "DDP_MASTER_LISTEN_FD";

// The names of torchrun's variables that RankFromVariables reads.
std::vector<std::string> TorchrunVariables();

// nullopt if none of RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK is set.
// (MASTER_ADDR and MASTER_PORT alone are not enough: users export them for any launcher.) If none
// of the last three is set, as in Kubernetes' PyTorchJob, each rank counts as a node. With
// LOCAL_RANK alone of these, as PyTorch's env:// is used by hand, the local world size is not known
// (Rank::local_world_size_is_known). InvalidArgument, with the values of the variables `shown` and
// `remedy`, if variables are missing or contradict each other, or if DDP_MASTER_LISTEN_FD of rank 0
// is not a listening socket of this process. Makes that socket close-on-exec. Thread-safe.
absl::StatusOr<std::optional<Rank>> RankFromVariables(
    const Environment& env, const std::vector<std::string>& shown = TorchrunVariables(),
    absl::string_view remedy =
        "start with torchrun, which sets all of them, or unset those that are left over; "
        "launcher=local ignores them and starts ranks here");

// The reverse of RankFromVariables. The caller must keep master_listen_fd open, under its number,
// across exec. Thread-safe.
std::map<std::string, std::string> VariablesFromRank(const Rank& rank);

}  // namespace ddp::launchers
