#include "backends/rendezvous.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "backends/common/join.h"
#include "base/exit_code.h"
#include "base/host_name.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"

namespace ddp::backends {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// This key is not among those of common/join.h: the caller may use that with the store that Join
// returns.
std::string JoinedKey(int rank) { return absl::StrCat("rendezvous/", rank); }

std::string Where(const launchers::Rank& rank) {
  const bool is_ipv6 = absl::StrContains(rank.master_addr, ':');
  return is_ipv6 ? absl::StrCat("[", rank.master_addr, "]:", rank.master_port)
                 : absl::StrCat(rank.master_addr, ":", rank.master_port);
}

// How long a name may fail to resolve before that is reported.
constexpr absl::Duration kQuiet = absl::Seconds(2);
// The wait for one address, so that one that does not answer leaves time for the others.
constexpr absl::Duration kOneAddress = absl::Seconds(5);
constexpr absl::Duration kLongestPause = absl::Milliseconds(500);

// The errno of a connection attempt; 0 if there is a connection. It is closed at once.
int TryConnect(const addrinfo& address, absl::Duration timeout) {
  const UniqueFd fd(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.ok()) return errno;
  if (::connect(fd.get(), address.ai_addr, address.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  const absl::Time deadline = absl::Now() + timeout;
  pollfd connected = {.fd = fd.get(), .events = POLLOUT, .revents = 0};
  while (true) {
    const absl::Duration left = std::max(absl::ZeroDuration(), deadline - absl::Now());
    const int ready = ::poll(&connected, 1, static_cast<int>(absl::ToInt64Milliseconds(left)) + 1);
    if (ready == 0) return ETIMEDOUT;
    if (ready < 0 && errno != EINTR) return errno;
    if (ready > 0) break;
  }
  int error = 0;
  socklen_t size = sizeof(error);
  return ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) == 0 ? error : errno;
}

// The search for an address of a host at which a port accepts connections. A thread of its own
// searches, since a look-up cannot be interrupted; it may outlive whoever waits. Thread-safe.
class ServerSearch {
 public:
  struct Findings {
    std::string address;  // numeric; empty: not found yet
    // Why not: of getaddrinfo, or with 0 there an errno.
    int lookup_error = EAI_AGAIN;
    int connect_error = ETIMEDOUT;
  };

  ServerSearch(std::string host, int port) : host_(std::move(host)), port_(absl::StrCat(port)) {}

  static std::shared_ptr<ServerSearch> Start(const std::string& host, int port) {
    auto search = std::make_shared<ServerSearch>(host, port);
    std::thread([search] { search->Run(); }).detach();
    return search;
  }

  // The findings after `timeout`, or when an address has been found.
  Findings Await(absl::Duration timeout) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, absl::ToChronoNanoseconds(timeout),
                      [&] { return !findings_.address.empty(); });
    return findings_;
  }

  // Ends the search, after the look-up or connection that it waits for.
  void Abandon() {
    const std::lock_guard lock(mutex_);
    abandoned_ = true;
    changed_.notify_all();
  }

 private:
  void Run() {
    absl::Duration pause = absl::Milliseconds(10);
    while (true) {
      Attempt();
      std::unique_lock lock(mutex_);
      changed_.notify_all();
      if (!findings_.address.empty() || abandoned_) return;
      changed_.wait_for(lock, absl::ToChronoNanoseconds(pause), [&] { return abandoned_; });
      pause = std::min(2 * pause, kLongestPause);
    }
  }

  void Attempt() {
    addrinfo hints = {};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICSERV;
    addrinfo* found = nullptr;
    const int lookup_error = ::getaddrinfo(host_.c_str(), port_.c_str(), &hints, &found);
    {
      const std::lock_guard lock(mutex_);
      findings_.lookup_error = lookup_error;
    }
    if (lookup_error != 0) return;
    const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> addresses(found, &::freeaddrinfo);
    for (const addrinfo* address = found; address != nullptr; address = address->ai_next) {
      const int connect_error = TryConnect(*address, kOneAddress);
      char text[NI_MAXHOST] = {};
      ::getnameinfo(address->ai_addr, address->ai_addrlen, text, sizeof(text), nullptr, 0,
                    NI_NUMERICHOST);
      const std::lock_guard lock(mutex_);
      findings_.connect_error = connect_error;
      if (connect_error != 0) continue;
      findings_.address = text;
      return;
    }
  }

  const std::string host_;
  const std::string port_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  Findings findings_;
  bool abandoned_ = false;
};

// What keeps a rank from the store, and what it may mean.
std::string Problem(const ServerSearch::Findings& findings, const launchers::Rank& rank) {
  if (findings.lookup_error != 0) {
    return absl::StrCat("the name ", rank.master_addr, " of MASTER_ADDR does not resolve (",
                        ::gai_strerror(findings.lookup_error),
                        "): it is misspelt, or the name server does not know it yet");
  }
  const std::string error = std::strerror(findings.connect_error);
  if (rank.rank == 0 && !rank.master_is_external) {
    return absl::StrCat(error,
                        ": the address is not this machine's, where rank 0 serves the store");
  }
  const absl::string_view firewall =
      findings.connect_error == ECONNREFUSED ? "" : ", or a firewall is in between";
  return absl::StrCat(error,
                      ": rank 0 never started or has ended, or MASTER_ADDR/MASTER_PORT name the "
                      "wrong machine or port",
                      firewall);
}

// Waits until the store's server accepts connections, and returns its address. c10d would wait
// twice as long, print stack frames, and say nothing of a name that does not resolve.
absl::StatusOr<std::string> FindServer(const launchers::Rank& rank, absl::Duration timeout) {
  DDP_ASSIGN_OR_RETURN(const std::shared_ptr<ServerSearch> search, CatchStatus("", [&] {
                         return ServerSearch::Start(rank.master_addr, rank.master_port);
                       }));
  ServerSearch::Findings findings = search->Await(std::min(kQuiet, timeout));
  if (findings.address.empty() && timeout > kQuiet) {
    // One rank of each machine says it.
    if (findings.lookup_error != 0 && rank.local_rank == 0) {
      const std::string line = absl::StrCat(
          "rank ", rank.rank, ": MASTER_ADDR=", rank.master_addr, " does not resolve yet (",
          ::gai_strerror(findings.lookup_error), "); it is looked up again until ",
          absl::FormatDuration(timeout), " have passed (join_timeout_s)\n");
      std::fputs(line.c_str(), stderr);
    }
    findings = search->Await(timeout - kQuiet);
  }
  if (!findings.address.empty()) return findings.address;
  search->Abandon();
  return absl::UnavailableError(absl::StrCat("Timed out after ", absl::FormatDuration(timeout),
                                             ": rank ", rank.rank,
                                             " could not reach rank 0's rendezvous store at ",
                                             Where(rank), ": ", Problem(findings, rank)));
}

// A socket that listens on `port` of all of this machine's addresses.
absl::StatusOr<UniqueFd> ListenOn(int port) {
  int error = 0;
  for (const int family : {AF_INET6, AF_INET}) {
    UniqueFd fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int on = 1, off = 0;
    ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (family == AF_INET6) ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    sockaddr_in6 six = {};
    six.sin6_family = AF_INET6;
    six.sin6_port = htons(static_cast<uint16_t>(port));
    sockaddr_in four = {};
    four.sin_family = AF_INET;
    four.sin_port = htons(static_cast<uint16_t>(port));
    const bool is_six = family == AF_INET6;
    const auto* address =
        is_six ? reinterpret_cast<const sockaddr*>(&six) : reinterpret_cast<const sockaddr*>(&four);
    const socklen_t size = is_six ? sizeof(six) : sizeof(four);
    if (fd.ok() && ::bind(fd.get(), address, size) == 0 && ::listen(fd.get(), SOMAXCONN) == 0) {
      return fd;
    }
    error = errno;
    if (error == EADDRINUSE || error == EACCES) break;  // IPv4 would tell the same, or less
  }
  return absl::UnavailableError(error == EADDRINUSE
                                    ? "the port is taken"
                                    : absl::StrCat("listening: ", std::strerror(error)));
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

// c10d waits without end for an answer of what accepts connections and is no store. The thread that
// does so then stays until the process ends.
absl::StatusOr<StorePtr> MakeStore(const std::string& address,
                                   const c10d::TCPStoreOptions& options) {
  constexpr std::chrono::seconds kFirst(1);  // an error of c10d's own says more
  auto made = std::make_shared<std::promise<absl::StatusOr<StorePtr>>>();
  std::future<absl::StatusOr<StorePtr>> store = made->get_future();
  DDP_RETURN_IF_ERROR(CatchStatus("", [&] {
    std::thread([made, address, options] {
      made->set_value(CatchStatus(
          "", [&]() -> StorePtr { return c10::make_intrusive<c10d::TCPStore>(address, options); }));
    }).detach();
  }));
  if (store.wait_for(options.timeout + kFirst) != std::future_status::ready) {
    return absl::DeadlineExceededError("it does not answer");
  }
  return store.get();
}

absl::StatusOr<StorePtr> Connect(const launchers::Rank& rank, absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  const std::string where = Where(rank);
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(rank.master_port);
  options.isServer = rank.rank == 0 && !rank.master_is_external;
  options.waitWorkers = false;  // Join waits itself: its error names the missing ranks

  UniqueFd listener;  // the server's, unless its launcher has made it
  const auto connect = [&]() -> absl::StatusOr<StorePtr> {
    DDP_ASSIGN_OR_RETURN(const std::string address, FindServer(rank, timeout));
    const absl::Duration left = std::max(absl::Seconds(1), deadline - absl::Now());
    options.timeout = absl::ToChronoMilliseconds(left);
    listener.Release();  // the store owns it
    absl::StatusOr<StorePtr> store = MakeStore(address, options);
    if (store.ok()) return store;
    return absl::UnavailableError(absl::StrCat(
        "rank ", rank.rank, " has reached ", where,
        ", but not rank 0's rendezvous store: MASTER_ADDR/MASTER_PORT may name another program (",
        store.status().message(), ")"));
  };
  absl::StatusOr<StorePtr> store;
  if (options.isServer) {
    ProcessState& state = ThisProcess();
    const std::lock_guard<std::mutex> lock(state.mutex);
    StorePtr& served = state.served[where];
    if (served) {
      store = CatchStatus("", [&]() -> StorePtr { return served->clone(); });
    } else {
      // It listens before the search for it: the kernel accepts connections.
      if (!rank.master_listen_fd) {
        absl::StatusOr<UniqueFd> made = ListenOn(rank.master_port);
        if (!made.ok()) {
          return absl::UnavailableError(
              absl::StrCat("rank 0 could not serve the rendezvous store at ", where, ": ",
                           made.status().message(), "; choose another MASTER_PORT"));
        }
        listener = *std::move(made);
      }
      options.masterListenFd = rank.master_listen_fd ? *rank.master_listen_fd : listener.get();
      store = connect();
      if (store.ok()) served = *store;
    }
  } else {
    store = connect();
  }
  if (store.ok()) (*store)->setTimeout(absl::ToChronoMilliseconds(timeout));
  return store;
}

std::string NameOf(const launchers::Rank& rank) {
  return absl::StrCat("rank ", rank.rank, " of ", rank.world_size, " (pid ", ::getpid(),
                      " on host ", HostName(), ")");
}

std::vector<std::string> KeysOfAll(int world_size) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < world_size; ++rank) keys.push_back(JoinedKey(rank));
  return keys;
}

// Where the n-th group of a world meets. A world is what its ranks must have in common.
StorePtr Place(const StorePtr& store, absl::string_view world, int n) {
  return c10::make_intrusive<c10d::PrefixStore>(absl::StrCat(world, "/", n), store);
}

// Key of the error that all ranks get if ranks of different world sizes or jobs have met in one
// store.
constexpr char kContradiction[] = "ddp/contradiction";

// The first rank of each world says that there is one. If another one waits for its first group,
// all of both worlds are told and wait no longer. Throws what the store throws.
void EnterWorld(const StorePtr& store, const launchers::Rank& rank, const std::string& world) {
  constexpr char kWorlds[] = "ddp/worlds";
  if (store->add(absl::StrCat(kWorlds, "/", world), 1) > 1) return;
  const auto end_wait = [&](absl::string_view of, int size) {
    const StorePtr place = Place(store, of, 0);
    for (const std::string& key : KeysOfAll(size)) place->set(key, std::vector<uint8_t>());
  };
  if (store->check({kContradiction})) return end_wait(world, rank.world_size);
  const std::string me = NameOf(rank);
  const std::string line = absl::StrCat(world, "\t", rank.world_size, "\t", me, "\n");
  store->append(kWorlds, std::vector<uint8_t>(line.begin(), line.end()));
  const std::vector<uint8_t> bytes = store->get(kWorlds);
  for (absl::string_view other : absl::StrSplit(std::string(bytes.begin(), bytes.end()), '\n')) {
    const std::vector<std::string> fields = absl::StrSplit(other, '\t');
    int size = 0;
    if (fields.size() != 3 || fields[0] == world || !absl::SimpleAtoi(fields[1], &size)) continue;
    if (MissingKeys(*Place(store, fields[0], 0), KeysOfAll(size)).empty()) continue;  // it has met
    const std::string problem = absl::StrCat(
        me, " and ", fields[2],
        " wait in different worlds: all ranks need the same WORLD_SIZE, or nnodes, nproc_per_node "
        "and master_addr, from which it comes");
    store->set(kContradiction, std::vector<uint8_t>(problem.begin(), problem.end()));
    end_wait(world, rank.world_size);
    end_wait(fields[0], size);
    return;
  }
}

// After all have joined. Throws what the store throws.
absl::Status CheckWorld(const StorePtr& store) {
  if (!store->check({kContradiction})) return absl::OkStatus();
  const std::vector<uint8_t> text = store->get(kContradiction);
  return WithExitCode(absl::InvalidArgumentError(std::string(text.begin(), text.end())),
                      kUsageExitCode);
}

// After all have joined in `place`: an error in all processes of this rank but one, which would
// take part in its collectives. Throws what the store throws.
absl::Status TakeRank(const StorePtr& place, const launchers::Rank& rank) {
  const std::string holder = absl::StrCat("rendezvous/holder/", rank.rank);
  const std::string me = NameOf(rank);
  if (place->add(absl::StrCat("rendezvous/processes/", rank.rank), 1) == 1) {
    place->set(holder, std::vector<uint8_t>(me.begin(), me.end()));
    return absl::OkStatus();
  }
  const std::vector<uint8_t> other = place->get(holder);
  return absl::FailedPreconditionError(
      absl::StrCat(me, " has come second, after ", std::string(other.begin(), other.end()),
                   ": each process needs a RANK, or node_rank, of its own"));
}

}  // namespace

absl::StatusOr<StorePtr> Join(const launchers::Rank& rank, const RendezvousOptions& options,
                              std::vector<std::string>* notes) {
  if (rank.master_addr.empty()) {
    return WithExitCode(
        absl::InvalidArgumentError(
            "the job spans several nodes, and its launcher does not say where rank 0 is: add `-x "
            "MASTER_ADDR=HOST` (Open MPI) or `-genv MASTER_ADDR HOST` (MPICH, Intel MPI) with the "
            "host that rank 0 runs on, or use backend=mpi, which finds it"),
        kUsageExitCode);
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
  const StorePtr whole = store;
  store = Place(whole, job, joined);
  // One that outlives the ranks has keys of dead ones; its agents give the ranks their numbers.
  const bool checks_ranks = !rank.master_is_external;

  const std::vector<std::string> everyone = KeysOfAll(rank.world_size);
  bool have_met = false;
  absl::Status met = CatchStatus("", [&]() -> absl::Status {
    if (checks_ranks) EnterWorld(whole, rank, job);
    store->set(JoinedKey(rank.rank),
               std::vector<uint8_t>(options.note.begin(), options.note.end()));
    const absl::Duration left = std::max(absl::Milliseconds(1), deadline - absl::Now());
    store->wait(everyone, absl::ToChronoMilliseconds(left));
    have_met = true;
    if (checks_ranks) {
      DDP_RETURN_IF_ERROR(CheckWorld(whole));
      DDP_RETURN_IF_ERROR(TakeRank(store, rank));
    }
    if (notes == nullptr) return absl::OkStatus();
    for (const std::vector<uint8_t>& note : store->multiGet(everyone)) {
      notes->emplace_back(note.begin(), note.end());
    }
    return absl::OkStatus();
  });
  if (met.ok()) {
    ++joined;
    return store;
  }
  if (have_met && (absl::IsInvalidArgument(met) || absl::IsFailedPrecondition(met))) {
    // The others are to read why, as long as the store is there.
    if (rank.rank == 0) absl::SleepFor(absl::Seconds(2));
    return met;
  }

  std::vector<int> missing;
  absl::Status asked = CatchStatus("", [&] { missing = MissingKeys(*store, everyone); });
  if (!asked.ok() || missing.empty()) {
    return Annotate(met, absl::StrCat("rank ", rank.rank, " lost the rendezvous store at ",
                                      Where(rank), " while joining (did rank 0 end?)"));
  }
  return absl::DeadlineExceededError(
      absl::StrCat("Timed out after ", absl::FormatDuration(options.timeout), ": rank ", rank.rank,
                   " waited at ", Where(rank), " for a world of ", rank.world_size,
                   "; never joined: rank ", absl::StrJoin(missing, ", ")));
}

}  // namespace ddp::backends
