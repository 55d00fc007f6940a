#include "backends/rendezvous.h"

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "backends/common/join.h"
#include "base/status.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"

namespace ddp::backends {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// This key is not among those of common/join.h: the caller may use that with the store that Join
// returns.
std::string JoinedKey(int rank) { return absl::StrCat("rendezvous/", rank); }

std::string Where(const launchers::Rank& rank) {
  return absl::StrCat(rank.master_addr, ":", rank.master_port);
}

// State of this process about its groups, kept until it ends.
struct ProcessState {
  std::mutex mutex;
  // The stores that it serves. Ranks may join a new group before this rank has released the old
  // one.
  std::map<std::string, StorePtr> served;
  // Number of groups it has joined, by address, job, size and rank.
  std::map<std::string, int> joined;
};

ProcessState& ThisProcess() {
  static ProcessState& state = *new ProcessState;
  return state;
}

absl::StatusOr<StorePtr> Connect(const launchers::Rank& rank, absl::Duration timeout) {
  const std::string where = Where(rank);
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(rank.master_port);
  options.isServer = rank.rank == 0 && !rank.master_is_external;
  options.waitWorkers = false;  // Join waits itself: its error names the missing ranks
  options.timeout = absl::ToChronoMilliseconds(timeout);
  if (options.isServer && rank.master_listen_fd) options.masterListenFd = *rank.master_listen_fd;

  const absl::StatusOr<StorePtr> store = CatchStatus("", [&]() -> StorePtr {
    const auto connect = [&] {
      return c10::make_intrusive<c10d::TCPStore>(rank.master_addr, options);
    };
    if (!options.isServer) return connect();
    ProcessState& state = ThisProcess();
    const std::lock_guard<std::mutex> lock(state.mutex);
    StorePtr& served = state.served[where];
    if (served) return served->clone();
    return served = connect();
  });
  if (store.ok()) {
    (*store)->setTimeout(options.timeout);
    return store;
  }
  if (options.isServer) {
    return absl::UnavailableError(absl::StrCat(
        "rank 0 could not serve the rendezvous store at ", where,
        ": the port is taken or the address is not this machine's; choose another MASTER_PORT (",
        store.status().message(), ")"));
  }
  // It may also fail at once, such as where something else answers at that address.
  const std::string timed_out =
      absl::IsDeadlineExceeded(store.status())
          ? absl::StrCat("Timed out after ", absl::FormatDuration(timeout), ": ")
          : "";
  return absl::UnavailableError(absl::StrCat(
      timed_out, "rank ", rank.rank, " could not reach rank 0's rendezvous store at ", where,
      ": rank 0 never started, or MASTER_ADDR/MASTER_PORT name the wrong machine, or a firewall is "
      "in between (",
      store.status().message(), ")"));
}

}  // namespace

absl::StatusOr<StorePtr> Join(const launchers::Rank& rank, const RendezvousOptions& options) {
  if (rank.master_addr.empty()) {
    return absl::InvalidArgumentError(
        "the job spans several nodes, and its launcher does not say where rank 0 is: add `-x "
        "MASTER_ADDR=HOST` (Open MPI) or `-genv MASTER_ADDR HOST` (MPICH, Intel MPI) with the host "
        "that rank 0 runs on, or use backend=mpi, which finds it");
  }
  const absl::Time deadline = absl::Now() + options.timeout;
  DDP_ASSIGN_OR_RETURN(StorePtr store, Connect(rank, options.timeout));
  // A prefix of its own for each restart of a job with an external store, and for each new group,
  // so that old keys are not read.
  const std::string job =
      absl::StrCat("ddp/", rank.run_id, "/", rank.restart_count, "/", rank.world_size);
  int& joined = [&]() -> int& {
    ProcessState& state = ThisProcess();
    const std::lock_guard<std::mutex> lock(state.mutex);
    return state.joined[absl::StrCat(Where(rank), "/", job, "/", rank.rank)];
  }();
  store = c10::make_intrusive<c10d::PrefixStore>(absl::StrCat(job, "/", joined), store);

  std::vector<std::string> everyone;
  for (int peer = 0; peer < rank.world_size; ++peer) everyone.push_back(JoinedKey(peer));
  const absl::Duration left = std::max(absl::Milliseconds(1), deadline - absl::Now());
  absl::Status met = CatchStatus("", [&] {
    store->set(JoinedKey(rank.rank), std::vector<uint8_t>{1});
    store->wait(everyone, absl::ToChronoMilliseconds(left));
  });
  if (met.ok()) {
    ++joined;
    return store;
  }

  std::vector<int> missing;
  absl::Status asked = CatchStatus("", [&] { missing = MissingKeys(*store, everyone); });
  if (!asked.ok() || missing.empty()) {
    return Annotate(
        met, absl::StrCat("rank ", rank.rank, " lost the rendezvous store at ", rank.master_addr,
                          ":", rank.master_port, " while joining (did rank 0 end?)"));
  }
  return absl::DeadlineExceededError(
      absl::StrCat("Timed out after ", absl::FormatDuration(options.timeout), ": rank ", rank.rank,
                   " waited at ", Where(rank), " for a world of ", rank.world_size,
                   "; never joined: rank ", absl::StrJoin(missing, ", ")));
}

}  // namespace ddp::backends
