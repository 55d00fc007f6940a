// Launcher `local`: starts the ranks as child processes on this machine.
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/log/absl_log.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/cores.h"
#include "base/option_error.h"
#include "base/process.h"
#include "base/signal_pipe.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "launchers/detect.h"
#include "launchers/launcher.h"
#include "launchers/local/options.h"
#include "launchers/local/supervisor.h"
#include "launchers/variables.h"

namespace ddp::launchers {
namespace {

// Distinguishes our children from torchrun's, which have the same variables.
constexpr char kMarker[] = "DDP_LAUNCHER";
constexpr char kName[] = "local";

absl::Status Check(const LaunchOptions& options) {
  if (options.argv.empty()) return absl::InvalidArgumentError("no program to launch");
  DDP_RETURN_IF_ERROR(ValidateOptions(options));
  if (options.nnodes != 1) {
    return OptionError("nnodes", absl::StrCat(options.nnodes),
                       "is not for launcher 'local', which starts ranks on this machine alone; "
                       "several nodes need torchrun, srun or mpirun");
  }
  const auto local = options.implementations.Get<LocalOptions>(kName);
  const std::string problem = AddressProblem(local.master_addr);
  if (!problem.empty()) return OptionError("local.master_addr", local.master_addr, problem);
  return absl::OkStatus();
}

// The errno of the first call that failed; 0 if the socket listens.
int TryListen(const addrinfo& address, UniqueFd& fd) {
  fd = UniqueFd(socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC, 0));
  if (!fd.ok()) return errno;
  // Allows a port in TIME_WAIT; a port that another socket listens on is still refused.
  const int on = 1;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(fd.get(), address.ai_addr, address.ai_addrlen) != 0) return errno;
  if (listen(fd.get(), SOMAXCONN) != 0) return errno;
  return 0;
}

int PortOf(int fd) {
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

struct Listener {
  UniqueFd fd;  // a listening TCP socket, close-on-exec
  int port = 0;
};

// Binds the rendezvous port before any rank is started: listens on `port` of `host`, a name or
// address of this machine, and on no other address. Port 0 means any free port. AlreadyExists if
// the port is in use; an OptionError, NotFound, if `host` does not resolve; Unavailable otherwise.
// Messages name host and port.
absl::StatusOr<Listener> Listen(const std::string& host, int port) {
  const std::string where = absl::StrCat("rendezvous at ", host, ":", port);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (int error = getaddrinfo(host.c_str(), absl::StrCat(port).c_str(), &hints, &found)) {
    return OptionError("local.master_addr", host,
                       absl::StrCat("does not resolve: ", gai_strerror(error)),
                       absl::StatusCode::kNotFound);
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, &freeaddrinfo);
  int error = 0;
  for (const addrinfo* address = addresses.get(); address; address = address->ai_next) {
    Listener listener;
    error = TryListen(*address, listener.fd);
    if (error == 0) {
      listener.port = PortOf(listener.fd.get());
      return listener;
    }
    if (error == EADDRINUSE) break;
  }
  if (error == EADDRINUSE) {
    return absl::AlreadyExistsError(absl::StrCat(
        where, ": port ", port, " is taken by another process; choose another, or 0 for any free"));
  }
  return absl::UnavailableError(absl::StrCat(where, ": ", strerror(error)));
}

absl::StatusOr<std::pair<UniqueFd, UniqueFd>> MakePipe() {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) return absl::ErrnoToStatus(errno, "cannot create a pipe");
  return std::make_pair(UniqueFd(fds[0]), UniqueFd(fds[1]));
}

// Starts one rank. Rank 0 keeps our own stdout and stderr, all others get pipes.
absl::StatusOr<RankProcess> StartRank(const LaunchOptions& launch, const Rank& rank,
                                      std::map<std::string, std::string> environment, pid_t group,
                                      int null_fd) {
  ProcessOptions options;
  for (auto& [name, value] : VariablesFromRank(rank)) environment[name] = value;
  options.argv = launch.argv;
  options.environment = std::move(environment);
  options.group = group;
  options.stdin_fd = null_fd;
  options.inherited_fd = rank.master_listen_fd;
  RankProcess process;
  process.rank = rank.rank;
  if (rank.rank == 0) {
    DDP_ASSIGN_OR_RETURN(process.pid, StartProcess(options));
    return process;
  }
  DDP_ASSIGN_OR_RETURN(auto out, MakePipe());
  DDP_ASSIGN_OR_RETURN(auto err, MakePipe());
  options.stdout_fd = out.second.get();
  options.stderr_fd = err.second.get();
  DDP_ASSIGN_OR_RETURN(process.pid, StartProcess(options));
  process.stdout_pipe = std::move(out.first);
  process.stderr_pipe = std::move(err.first);
  return process;
}

class LocalLauncher : public Launcher {
 public:
  absl::string_view name() const override { return kName; }

  absl::StatusOr<std::optional<Rank>> Detect(const Environment& env) const override {
    if (env.Get(kMarker) != kName) return std::nullopt;
    const std::string remedy = absl::StrCat(
        kMarker,
        " is for processes that the local launcher starts, and it sets all of them: unset "
        "those that are left over");
    DDP_ASSIGN_OR_RETURN(std::optional<Rank> rank, RankFromVariables(env, Variables(), remedy));
    if (!rank) return BadEnvironment("RANK is missing", env, Variables(), remedy);
    return rank;
  }

  bool StartsRanks() const override { return true; }
  bool StartsRanksHere() const override { return true; }
  bool RunsInProcess(const LaunchOptions& options) const override {
    // This process already has its environment.
    return options.nnodes == 1 && options.NprocHere() == 1 && options.max_restarts == 0 &&
           options.environment.empty();
  }

  absl::StatusOr<LaunchResult> Launch(const LaunchOptions& options) override {
    DDP_RETURN_IF_ERROR(Check(options));
    Rank rank;
    rank.world_size = rank.local_world_size = options.NprocHere();
    rank.run_id = absl::StrCat("local-", getpid(), "-", absl::ToUnixMillis(absl::Now()));
    for (int& restarts = rank.restart_count;; ++restarts) {
      DDP_ASSIGN_OR_RETURN(LaunchResult result, LaunchOnce(options, rank));
      // failed_rank is -1 after success, or if a signal has ended the job.
      if (result.failed_rank < 0 || restarts >= options.max_restarts) return result;
      ABSL_LOG(WARNING) << result.description << "; restart " << restarts + 1 << " of "
                        << options.max_restarts;
    }
  }

  std::vector<std::string> Variables() const override {
    std::vector<std::string> variables = TorchrunVariables();
    variables.insert(variables.begin(), kMarker);
    variables.push_back(kMasterListenFd);
    return variables;
  }

  std::string HowToStart() const override {
    return "PROGRAM launcher=local nproc_per_node=N [ARGUMENT…]";
  }

 private:
  // `rank` has the fields that are the same for all ranks.
  static absl::StatusOr<LaunchResult> LaunchOnce(const LaunchOptions& options, Rank rank) {
    const auto local = options.implementations.Get<LocalOptions>(kName);
    DDP_ASSIGN_OR_RETURN(Listener listener, Listen(local.master_addr, local.master_port));
    DDP_ASSIGN_OR_RETURN(SignalPipe signals, SignalPipe::Install({SIGUSR1, SIGUSR2}));
    DDP_ASSIGN_OR_RETURN(PosixProcessGroup group, PosixProcessGroup::Create());
    const pid_t group_id = group.id();
    Supervisor supervisor(std::move(group), std::move(signals),
                          {.grace = options.grace, .stop_timeout = local.stop_timeout});

    std::map<std::string, std::string> environment = Environment::FromProcess().variables();
    for (const auto& [name, value] : options.environment) environment[name] = value;
    environment[kMarker] = kName;
    environment.erase(kMasterListenFd);
    environment.emplace("OMP_NUM_THREADS",
                        absl::StrCat(std::max(1, AvailableCores() / rank.world_size)));
    UniqueFd null_fd(open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (!null_fd.ok()) return absl::ErrnoToStatus(errno, "cannot open /dev/null");

    rank.master_addr = local.master_addr;
    rank.master_port = listener.port;
    for (int i = 0; i < rank.world_size; ++i) {
      rank.rank = rank.local_rank = i;
      rank.master_listen_fd = i == 0 ? std::optional<int>(listener.fd.get()) : std::nullopt;
      absl::StatusOr<RankProcess> process =
          StartRank(options, rank, environment, group_id, null_fd.get());
      if (!process.ok()) return Annotate(process.status(), absl::StrCat("rank ", i));
      supervisor.Add(*std::move(process));
    }
    listener.fd.Close();  // rank 0 alone holds it: when it dies, connections are refused
    return supervisor.Run();
  }
};

const Registration<LauncherRegistry> kLocal(kName,
                                            LauncherEntry{
                                                .create = +[]() -> std::unique_ptr<Launcher> {
                                                  return std::make_unique<LocalLauncher>();
                                                },
                                                .options = &AnyOptions::Of<LocalOptions>,
                                                .detect_order = kDetectOwnChildren,
                                                .starts_by_default = true});

}  // namespace
}  // namespace ddp::launchers
