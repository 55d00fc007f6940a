#include "launchers/variables.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status.h"
#include "launchers/detect.h"

namespace ddp::launchers {
namespace {

// Reads local rank, local world size and node rank.
absl::Status ReadNode(const Environment& env, Rank& rank) {
  DDP_ASSIGN_OR_RETURN(std::optional<int> local_rank, FirstInt(env, {"LOCAL_RANK"}));
  DDP_ASSIGN_OR_RETURN(std::optional<int> local_world_size, FirstInt(env, {"LOCAL_WORLD_SIZE"}));
  DDP_ASSIGN_OR_RETURN(std::optional<int> node_rank, FirstInt(env, {"GROUP_RANK"}));
  rank.local_rank = local_rank.value_or(0);
  rank.local_world_size = local_world_size.value_or(1);
  // As PyTorch's env:// is used by hand. torchrun sets all three.
  const bool is_by_hand = local_rank && !local_world_size && !node_rank;
  if (is_by_hand) {
    rank.local_world_size = std::min(rank.local_rank + 1, rank.world_size);
    rank.local_world_size_is_known = rank.local_world_size == rank.world_size;
  } else if (local_rank.has_value() != local_world_size.has_value()) {
    return absl::InvalidArgumentError("only one of LOCAL_RANK and LOCAL_WORLD_SIZE is set");
  }
  // torchrun numbers ranks node by node.
  rank.node_rank =
      node_rank.value_or(rank.rank / (rank.local_world_size > 0 ? rank.local_world_size : 1));
  return absl::OkStatus();
}

absl::Status ReadMaster(const Environment& env, Rank& rank) {
  const bool has_address = env.Has("MASTER_ADDR");
  const bool has_port = env.Has("MASTER_PORT");
  if (has_address != has_port || (!has_address && rank.world_size > 1)) {
    return absl::InvalidArgumentError("MASTER_ADDR and MASTER_PORT must both be set");
  }
  if (!has_address) return absl::OkStatus();
  rank.master_addr = *env.Get("MASTER_ADDR");
  DDP_ASSIGN_OR_RETURN(std::optional<int> port, FirstInt(env, {"MASTER_PORT"}, 65535));
  rank.master_port = *port;
  // PyTorch's own readers compare with Python's str(True).
  rank.master_is_external = env.Get("TORCHELASTIC_USE_AGENT_STORE") == "True";
  return absl::OkStatus();
}

absl::Status ReadListenFd(const Environment& env, Rank& rank) {
  DDP_ASSIGN_OR_RETURN(std::optional<int> fd, FirstInt(env, {kMasterListenFd}));
  if (!fd || rank.rank != 0) return absl::OkStatus();
  int listens = 0;
  socklen_t size = sizeof(listens);
  if (getsockopt(*fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(kMasterListenFd, "=", *fd,
                     " is no listening socket of this process; unset it "
                     "in programs that a rank starts"));
  }
  fcntl(*fd, F_SETFD, FD_CLOEXEC);
  rank.master_listen_fd = *fd;
  return absl::OkStatus();
}

absl::StatusOr<Rank> ReadRank(const Environment& env) {
  Rank rank;
  DDP_ASSIGN_OR_RETURN(std::optional<int> index, FirstInt(env, {"RANK"}));
  DDP_ASSIGN_OR_RETURN(std::optional<int> world_size, FirstInt(env, {"WORLD_SIZE"}));
  if (!index) return absl::InvalidArgumentError("RANK is missing");
  if (!world_size) return absl::InvalidArgumentError("WORLD_SIZE is missing");
  rank.rank = *index;
  rank.world_size = *world_size;
  DDP_RETURN_IF_ERROR(ReadNode(env, rank));
  DDP_RETURN_IF_ERROR(ReadMaster(env, rank));
  DDP_ASSIGN_OR_RETURN(std::optional<int> restarts, FirstInt(env, {"TORCHELASTIC_RESTART_COUNT"}));
  rank.restart_count = restarts.value_or(0);
  rank.run_id = env.Get("TORCHELASTIC_RUN_ID").value_or("none");
  return rank;
}

}  // namespace

std::vector<std::string> TorchrunVariables() {
  return {"RANK",
          "WORLD_SIZE",
          "LOCAL_RANK",
          "LOCAL_WORLD_SIZE",
          "GROUP_RANK",
          "MASTER_ADDR",
          "MASTER_PORT",
          "TORCHELASTIC_RESTART_COUNT",
          "TORCHELASTIC_RUN_ID",
          "TORCHELASTIC_USE_AGENT_STORE"};
}

absl::StatusOr<std::optional<Rank>> RankFromVariables(const Environment& env,
                                                      const std::vector<std::string>& shown,
                                                      absl::string_view remedy) {
  bool any = false;
  for (absl::string_view name :
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"}) {
    any = any || env.Has(name);
  }
  if (!any) return std::nullopt;
  absl::StatusOr<Rank> rank = ReadRank(env);
  if (!rank.ok()) {
    return BadEnvironment(rank.status().message(), env, shown, remedy);
  }
  DDP_RETURN_IF_ERROR(CheckRank(*rank, env, shown, remedy));
  DDP_RETURN_IF_ERROR(ReadListenFd(env, *rank));
  return *std::move(rank);
}

std::map<std::string, std::string> VariablesFromRank(const Rank& rank) {
  std::map<std::string, std::string> variables = {
      {"RANK", absl::StrCat(rank.rank)},
      {"WORLD_SIZE", absl::StrCat(rank.world_size)},
      {"LOCAL_RANK", absl::StrCat(rank.local_rank)},
      {"LOCAL_WORLD_SIZE", absl::StrCat(rank.local_world_size)},
      {"GROUP_RANK", absl::StrCat(rank.node_rank)},
      {"MASTER_ADDR", rank.master_addr},
      {"MASTER_PORT", absl::StrCat(rank.master_port)},
      {"TORCHELASTIC_RESTART_COUNT", absl::StrCat(rank.restart_count)},
      {"TORCHELASTIC_RUN_ID", rank.run_id},
      {"TORCHELASTIC_USE_AGENT_STORE", rank.master_is_external ? "True" : "False"},
  };
  if (rank.master_listen_fd) {
    variables[kMasterListenFd] = absl::StrCat(*rank.master_listen_fd);
  }
  return variables;
}

}  // namespace ddp::launchers
