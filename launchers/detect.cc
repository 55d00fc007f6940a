#include "launchers/detect.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/error_file.h"
#include "base/status.h"

namespace ddp::launchers {
namespace {

// Of RFC 1123, in bytes.
constexpr size_t kLongestName = 253;
constexpr size_t kLongestLabel = 63;

// `address` has a colon.
std::string Ipv6Problem(absl::string_view address) {
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(address, absl::MaxSplits('%', 1));
  in6_addr six = {};
  if (inet_pton(AF_INET6, std::string(parts.first).c_str(), &six) != 1) {
    return std::count(address.begin(), address.end(), ':') == 1
               ? "has a port: leave it out, it is MASTER_PORT's"
               : "is no IPv6 address";
  }
  if (!IN6_IS_ADDR_LINKLOCAL(&six)) {
    return absl::StrContains(address, "%") ? "has an interface, which only fe80::… may have" : "";
  }
  if (parts.second.empty()) return "lacks its interface, as in fe80::1%eth0";
  uint32_t index = 0;
  char name[IF_NAMESIZE];
  const bool exists = absl::SimpleAtoi(parts.second, &index)
                          ? if_indextoname(index, name) != nullptr
                          : if_nametoindex(std::string(parts.second).c_str()) != 0;
  return exists ? "" : absl::StrCat("names interface ", parts.second, ", which this machine lacks");
}

// Of an address that the resolver reads as numbers, as its last one says. `given` may have a dot
// more at its end than `labels` tell.
std::string Ipv4Problem(const std::string& given, const std::vector<absl::string_view>& labels) {
  if (labels.size() == 1) return "is a number";
  if (absl::EndsWith(given, ".")) return "has a dot behind its last number: leave it out";
  in_addr four = {};
  if (inet_aton(given.c_str(), &four) == 0) return "is no IPv4 address";
  for (absl::string_view label : labels) {
    if (label.size() > 1 && label.front() == '0') {
      return "has a number that begins with 0, which is read as an octal one: leave the 0 out";
    }
  }
  // 127.1 is this machine, however it is meant.
  if (labels.size() == 4 || labels.front() == "127") return "";
  char full[INET_ADDRSTRLEN] = {};
  inet_ntop(AF_INET, &four, full, sizeof(full));
  return absl::StrCat("has fewer than four numbers, and is read as ", full, ": give all four");
}

std::string NameProblem(absl::string_view given) {
  // Of a name that is complete.
  const absl::string_view name = absl::StripSuffix(given, ".");
  if (name.size() > kLongestName) return "is too long for a host name";
  const std::vector<absl::string_view> labels = absl::StrSplit(name, '.');
  for (absl::string_view label : labels) {
    if (label.empty()) return "has a part without characters between dots";
    if (label.size() > kLongestLabel) return "has a part too long for a host name";
    if (label.front() == '-' || label.back() == '-') return "has a part that begins or ends with -";
  }
  const auto is_digit = [](unsigned char c) { return absl::ascii_isdigit(c); };
  const bool is_name = !std::all_of(labels.back().begin(), labels.back().end(), is_digit);
  return is_name ? "" : Ipv4Problem(std::string(given), labels);
}

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
  if (rank.world_size > 1 && !rank.master_addr.empty()) {
    const std::string problem = AddressProblem(rank.master_addr);
    if (!problem.empty()) {
      return absl::StrCat("MASTER_ADDR='", absl::Utf8SafeCHexEscape(rank.master_addr), "' ",
                          problem);
    }
  }
  return "";
}

// The number of the SLURM job that this process is a part of.
std::optional<std::string> SlurmJob(const Environment& env) {
  const std::optional<std::string> job = env.Get("SLURM_JOB_ID");
  return job ? job : env.Get("SLURM_JOBID");
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

absl::StatusOr<int> RequeuesOfJob(const Environment& env) {
  if (!SlurmJob(env)) return 0;
  const absl::StatusOr<std::optional<int>> requeues = FirstInt(env, {"SLURM_RESTART_COUNT"});
  if (requeues.ok()) return requeues->value_or(0);
  return absl::InvalidArgumentError(
      absl::StrCat(requeues.status().message(), "; leave it as SLURM sets it"));
}

bool IsInSlurmJob(const Environment& env) { return SlurmJob(env).has_value(); }

std::string JobOf(const Environment& env, const std::string& run_id) {
  if (const std::optional<std::string> job = SlurmJob(env)) return absl::StrCat("slurm-", *job);
  const std::string folder = run_id == "none" ? RunFolderOf(env) : "";
  return folder.empty() ? run_id : absl::StrCat("torchrun-", folder);
}

std::string AddressProblem(absl::string_view address) {
  if (address.empty()) return "is empty";
  const auto is = [&](auto predicate) {
    return std::any_of(address.begin(), address.end(),
                       [&](unsigned char c) { return predicate(c); });
  };
  if (is(absl::ascii_isspace)) return "has white space";
  if (absl::StrContains(address, "://")) {
    return "has a scheme, which is for URLs: give the host alone";
  }
  if (absl::StrContains(address, "[") || absl::StrContains(address, "]")) {
    return "has brackets, which are for URLs: leave them out, and a port behind them, which is "
           "MASTER_PORT's";
  }
  if (absl::StrContains(address, ":")) return Ipv6Problem(address);
  const auto is_of_no_name = [](unsigned char c) {
    return !absl::ascii_isalnum(c) && c != '-' && c != '_' && c != '.';
  };
  if (is(is_of_no_name)) return "has characters that no host name has";
  return NameProblem(address);
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
