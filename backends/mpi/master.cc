#include "backends/mpi/master.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "backends/common/interfaces.h"
#include "backends/mpi/address.h"
#include "backends/mpi/collectives.h"
#include "backends/mpi/mpi_group.h"
#include "backends/mpi/runtime.h"
#include "base/environment.h"
#include "base/status.h"

namespace ddp::backends::mpi {
namespace {

// "PORT HOST", or "PORT " and addresses in the form of ToText; the rest is zeros.
constexpr size_t kMessageBytes = 8192;

struct Listener {
  int fd = -1;
  int port = 0;
};

// Listens on all addresses of this machine, IPv6 and IPv4 if it has both.
absl::StatusOr<Listener> Listen() {
  for (const int family : {AF_INET6, AF_INET}) {
    Listener listener{.fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    if (listener.fd < 0) continue;
    sockaddr_storage address = {};
    socklen_t length = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
    address.ss_family = family;
    const int off = 0;
    if (family == AF_INET6) {
      setsockopt(listener.fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    }
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    if (bind(listener.fd, generic, length) == 0 && listen(listener.fd, SOMAXCONN) == 0 &&
        getsockname(listener.fd, generic, &length) == 0) {
      listener.port =
          ntohs(family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                   : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
      return listener;
    }
    close(listener.fd);
  }
  return absl::UnavailableError(
      absl::StrCat("rank 0 cannot listen on any TCP port: ", std::strerror(errno)));
}

absl::Status CheckSameWorld(const Runtime& runtime, const launchers::Rank& rank) {
  if (runtime.world_rank() == rank.rank && runtime.world_size() == rank.world_size) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "the launcher says rank ", rank.rank, " of ", rank.world_size, ", but MPI says rank ",
      runtime.world_rank(), " of ", runtime.world_size(),
      ": was the program started by the mpirun of another MPI than it was built with (",
      LibraryVersion(), ")?"));
}

std::string Announcement(const BackendOptions& options, int port) {
  if (!options.group.hostname.empty()) return absl::StrCat(port, " ", options.group.hostname);
  const std::vector<std::string> chosen =
      ChosenInterfaces(options.group.interface, options.group.hostname, Environment::FromProcess());
  return absl::StrCat(port, " ", ToText(OnInterfaces(LocalAddresses(), chosen)));
}

// Broadcasts the text of rank 0 to all ranks.
absl::StatusOr<std::string> FromRankZero(Runtime& runtime, const std::string& text,
                                         absl::Duration timeout) {
  // Shared with the operation, which may outlive this call.
  auto message = std::make_shared<std::vector<std::byte>>(kMessageBytes);
  std::memcpy(message->data(), text.data(), std::min(text.size(), kMessageBytes - 1));
  auto done = std::make_shared<std::promise<absl::Status>>();
  MpiGroup::World(runtime)->Submit(
      {.body =
           [message](Channel& channel) {
             return Broadcast(channel, {message->data(), message->size()}, /*root=*/0);
           },
       .describe = [] { return std::string("telling the ranks where their store is"); },
       .timeout = timeout,
       .done = [done](const absl::Status& status, int) { done->set_value(status); }});
  DDP_RETURN_IF_ERROR(done->get_future().get());
  return std::string(reinterpret_cast<const char*>(message->data()));
}

}  // namespace

absl::StatusOr<launchers::Rank> FindMaster(const BackendOptions& options) {
  launchers::Rank rank = options.rank;
  DDP_ASSIGN_OR_RETURN(Runtime * runtime, Runtime::Start(options.group.join_timeout));
  runtime->WaitAtExit(options.group.timeout);
  DDP_RETURN_IF_ERROR(CheckSameWorld(*runtime, rank));

  std::string text;
  if (rank.rank == 0) {
    DDP_ASSIGN_OR_RETURN(Listener listener, Listen());
    rank.master_listen_fd = listener.fd;
    text = Announcement(options, listener.port);
  }
  DDP_ASSIGN_OR_RETURN(text, FromRankZero(*runtime, text, options.group.join_timeout));
  const std::pair<std::string, std::string> parts = absl::StrSplit(text, absl::MaxSplits(' ', 1));
  if (!absl::SimpleAtoi(parts.first, &rank.master_port)) {
    return absl::InternalError(absl::StrCat("rank 0 has announced '", text, "'"));
  }
  if (rank.local_world_size == rank.world_size) {
    rank.master_addr = "127.0.0.1";
  } else if (!Environment::FromProcess().Has("MASTER_ADDR")) {  // what launcher mpi has is a guess
    const std::vector<InterfaceAddress> theirs = FromText(parts.second);
    rank.master_addr = ChooseReachable(theirs, LocalAddresses());
    // All of the addresses are also this machine's, so it is the machine of rank 0.
    if (rank.master_addr.empty() && !theirs.empty()) rank.master_addr = "127.0.0.1";
    if (rank.master_addr.empty()) rank.master_addr = parts.second;
    if (rank.master_addr.empty()) {
      return absl::FailedPreconditionError(
          "the job spans several nodes, and rank 0's has no address that another could reach "
          "(see `ip addr` there), or none on the interfaces that are chosen; set the option "
          "interface or GLOO_SOCKET_IFNAME, or MASTER_ADDR");
    }
  }
  return rank;
}

}  // namespace ddp::backends::mpi
