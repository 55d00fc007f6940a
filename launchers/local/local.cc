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
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "base/cgroup.h"
#include "base/cores.h"
#include "base/cpu_topology.h"
#include "base/environment.h"
#include "base/file.h"
#include "base/option_error.h"
#include "base/pinned_program.h"
#include "base/process.h"
#include "base/progress_board.h"
#include "base/signal_pipe.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "launchers/detect.h"
#include "launchers/launcher.h"
#include "launchers/local/core_binding.h"
#include "launchers/local/options.h"
#include "launchers/local/output.h"
#include "launchers/local/restart_policy.h"
#include "launchers/local/supervisor.h"
#include "launchers/queue.h"
#include "launchers/threads.h"
#include "launchers/variables.h"

namespace ddp::launchers {
namespace {

// Distinguishes our children from torchrun's, which have the same variables.
constexpr char kMarker[] = "DDP_LAUNCHER";
constexpr char kName[] = "local";

// torchrun's default.
constexpr int kDefaultPort = 29500;

// Variables by which torchrun's options are given, as Kubernetes' TrainJob does.
constexpr char kPetNnodes[] = "PET_NNODES";
constexpr char kPetNproc[] = "PET_NPROC_PER_NODE";
constexpr char kPetNodeRank[] = "PET_NODE_RANK";
constexpr char kPetAddress[] = "PET_MASTER_ADDR";
constexpr char kPetPort[] = "PET_MASTER_PORT";

absl::Status PetError(const Environment& env, const char* name, absl::string_view problem) {
  return absl::InvalidArgumentError(
      absl::StrCat(name, "=", env.Get(name).value_or(""), " ", problem));
}

// PET_NNODES: "2" or "2:2". 0: it is not set.
absl::StatusOr<int> PetNnodes(const Environment& env) {
  const std::optional<std::string> text = env.Get(kPetNnodes);
  if (!text) return 0;
  const std::pair<std::string, std::string> range = absl::StrSplit(*text, absl::MaxSplits(':', 1));
  int least = 0, most = 0;
  if (!absl::SimpleAtoi(range.first, &least) || least < 1 ||
      (!range.second.empty() && !absl::SimpleAtoi(range.second, &most))) {
    return PetError(env, kPetNnodes, "is no number of nodes");
  }
  if (most != 0 && most != least) {
    return PetError(env, kPetNnodes,
                    "asks for an elastic job, which torchrun starts and launcher 'local' does not: "
                    "torchrun --no-python PROGRAM [ARGUMENT…]");
  }
  return least;
}

// The options in effect: those that are not given are PET_…'s.
absl::StatusOr<LaunchOptions> WithPetVariables(LaunchOptions options, const Environment& env) {
  auto& local = options.implementations.Mutable<LocalOptions>(kName);
  DDP_ASSIGN_OR_RETURN(const int nnodes, PetNnodes(env));
  if (!options.nnodes && nnodes > 0) options.nnodes = nnodes;
  if (options.nproc_per_node.kind() == Nproc::Kind::kUnset && env.Has(kPetNproc)) {
    const absl::Status parsed = ParseOption(*env.Get(kPetNproc), options.nproc_per_node);
    if (!parsed.ok()) return PetError(env, kPetNproc, parsed.message());
    const bool is_gpu = options.nproc_per_node.kind() == Nproc::Kind::kGpu;
    if (is_gpu && options.default_nproc_here.value_or(0) == 0) {
      return PetError(env, kPetNproc, "finds no GPU that the ranks could use on this machine");
    }
  }
  if (options.Nnodes() > 1) {
    if (!local.node_rank) {
      DDP_ASSIGN_OR_RETURN(local.node_rank, FirstInt(env, {kPetNodeRank}));
    }
    if (local.master_addr.empty()) local.master_addr = env.Get(kPetAddress).value_or("");
    if (local.master_port == 0) {
      DDP_ASSIGN_OR_RETURN(const std::optional<int> port, FirstInt(env, {kPetPort}, 65535));
      local.master_port = port.value_or(kDefaultPort);
    }
  } else if (local.master_addr.empty()) {
    local.master_addr = "127.0.0.1";
  }
  return options;
}

absl::Status CheckNodes(const LaunchOptions& options, const LocalOptions& local) {
  const std::string nnodes = absl::StrCat(options.Nnodes());
  if (local.node_rank.value_or(0) >= options.Nnodes()) {
    return OptionError("local.node_rank", absl::StrCat(*local.node_rank),
                       absl::StrCat("must be below nnodes=", nnodes));
  }
  if (options.Nnodes() == 1) return absl::OkStatus();
  if (!local.node_rank || local.master_addr.empty()) {
    return OptionError("nnodes", nnodes,
                       "with launcher 'local' is for machines that each run this command, and "
                       "needs node_rank=0 (1, …) and master_addr=ADDRESS of node 0, the same on "
                       "all; or start the ranks by torchrun, srun or mpirun");
  }
  if (options.max_restarts > 0) {
    return OptionError("max_restarts", absl::StrCat(options.max_restarts),
                       absl::StrCat("is for one machine, not for nnodes=", nnodes,
                                    ": these launchers do not know of each other's ranks. Use "
                                    "torchrun, or what starts them again together, such as a "
                                    "queue, and resume=auto"));
  }
  return absl::OkStatus();
}

absl::Status Check(const LaunchOptions& options) {
  if (options.argv.empty()) return absl::InvalidArgumentError("no program to launch");
  DDP_RETURN_IF_ERROR(ValidateOptions(options));
  const auto local = options.implementations.Get<LocalOptions>(kName);
  DDP_RETURN_IF_ERROR(CheckNodes(options, local));
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
  const int off = 0;  // that of all addresses takes IPv4's connections, too
  if (address.ai_family == AF_INET6) {
    setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  }
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
// address of this machine, and on no other address. With `for_other_nodes` it listens on all, of
// IPv4 and IPv6 where the machine has both, since the name by which others find this machine may be
// none of its own (a service of Kubernetes). Port
// 0 means any free port. AlreadyExists if the port is in use; an OptionError, NotFound, if `host`
// does not resolve or is another machine's; Unavailable otherwise. Messages name host and port.
absl::StatusOr<Listener> Listen(const std::string& host, int port, bool for_other_nodes) {
  const std::string where = absl::StrCat("rendezvous at ", host, ":", port);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = for_other_nodes ? AI_PASSIVE : 0;
  addrinfo* found = nullptr;
  if (int error = getaddrinfo(for_other_nodes ? nullptr : host.c_str(), absl::StrCat(port).c_str(),
                              &hints, &found)) {
    return OptionError("local.master_addr", host,
                       absl::StrCat("does not resolve: ", gai_strerror(error)),
                       absl::StatusCode::kNotFound);
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, &freeaddrinfo);
  std::vector<const addrinfo*> order;
  for (const addrinfo* address = addresses.get(); address; address = address->ai_next) {
    const bool is_first = for_other_nodes && address->ai_family == AF_INET6;
    order.insert(is_first ? order.begin() : order.end(), address);
  }
  int error = 0;
  for (const addrinfo* const address : order) {
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
  if (error == EADDRNOTAVAIL) {
    return OptionError(
        "local.master_addr", host,
        "is no address of this machine, where rank 0 runs; give one, or leave it out",
        absl::StatusCode::kNotFound);
  }
  return absl::UnavailableError(absl::StrCat(where, ": ", strerror(error)));
}

absl::StatusOr<std::pair<UniqueFd, UniqueFd>> MakePipe() {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) return absl::ErrnoToStatus(errno, "cannot create a pipe");
  return std::make_pair(UniqueFd(fds[0]), UniqueFd(fds[1]));
}

// Opened for appending: a later run into the same folder keeps what an earlier one has written.
absl::StatusOr<UniqueFd> OpenLog(const std::string& path) {
  DDP_RETURN_IF_ERROR(MakeDirectories(DirectoryOf(path)));
  UniqueFd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  if (!fd.ok()) return FileError(errno, "opening", path);
  return fd;
}

// What StartRank needs beside the rank.
struct Attempt {
  const LaunchOptions& launch;
  OutputPlan plan;
  std::map<std::string, std::string> environment;
  pid_t group = 0;
  UniqueFd null_in;
  UniqueFd null_out;
  const ProgressBoard* board = nullptr;  // null: nobody will read it
};

// Where a rank writes one of its streams to, as a descriptor of ours. Rank 0 has our own stdout and
// stderr, if they need not go through us.
absl::StatusOr<int> MakeOutput(const Attempt& attempt, const Rank& rank, int stream,
                               RankOutput& output, UniqueFd& theirs) {
  const OutputPlan::Way way = attempt.plan.Of(rank.local_rank, stream);
  UniqueFd file;
  if (way.to_file) {
    const std::string path = attempt.plan.FileOf(rank.restart_count, rank.rank, stream);
    absl::StatusOr<UniqueFd> opened = OpenLog(path);
    if (!opened.ok()) {
      return OptionError("local.log_dir", attempt.plan.folder(),
                         absl::StrCat("cannot be written: ", opened.status().message()),
                         opened.status().code());
    }
    file = *std::move(opened);
  }
  if (!way.to_terminal) {
    if (!file.ok()) return attempt.null_out.get();
    theirs = std::move(file);
    return theirs.get();
  }
  if (rank.rank == 0 && !file.ok()) {
    return stream == OutputPlan::kStdout ? STDOUT_FILENO : STDERR_FILENO;
  }
  DDP_ASSIGN_OR_RETURN(auto pipe, MakePipe());
  output.pipe = std::move(pipe.first);
  output.file = std::move(file);
  theirs = std::move(pipe.second);
  return theirs.get();
}

// The cores of each rank; empty: they are not bound.
std::vector<CoreShare> SharesOf(const LocalOptions& local, int ranks) {
  if (local.numa_binding != "exclusive") return {};
  std::string cgroup;
  for (const Cgroup& found : FindCgroups("cpuset")) {
    if (found.version == 2 && !found.folders.empty()) cgroup = found.folders[0];
  }
  return ShareCores(ranks, AllowedCpus(), "/sys", cgroup, CpuQuota());
}

absl::StatusOr<RankProcess> StartRank(const Attempt& attempt, const Rank& rank) {
  ProcessOptions options;
  options.argv = attempt.launch.argv;
  options.environment = attempt.environment;
  for (auto& [name, value] : VariablesFromRank(rank)) options.environment[name] = value;
  options.group = attempt.group;
  options.stdin_fd = attempt.null_in.get();
  if (rank.master_listen_fd) options.inherited_fds.push_back(*rank.master_listen_fd);
  if (rank.rank == 0 && attempt.board != nullptr) {
    options.environment[ProgressBoard::kVariable] = absl::StrCat(attempt.board->fd());
    options.inherited_fds.push_back(attempt.board->fd());
  }
  RankProcess process;
  process.rank = rank.rank;
  if (rank.rank != 0) process.prefix = absl::StrCat("[rank ", rank.rank, "] ");
  UniqueFd out, err;  // until the process has its own
  DDP_ASSIGN_OR_RETURN(options.stdout_fd,
                       MakeOutput(attempt, rank, OutputPlan::kStdout, process.out, out));
  DDP_ASSIGN_OR_RETURN(options.stderr_fd,
                       MakeOutput(attempt, rank, OutputPlan::kStderr, process.err, err));
  DDP_ASSIGN_OR_RETURN(process.pid, StartProcess(options));
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
    // An error is one that Launch returns, too.
    const absl::StatusOr<LaunchOptions> own = WithPetVariables(options, Environment::FromProcess());
    if (!own.ok()) return false;
    const auto local = own->implementations.Get<LocalOptions>(kName);
    // This process already has its environment, and writes by itself.
    return own->Nnodes() == 1 && own->NprocHere() == 1 && own->max_restarts == 0 &&
           own->environment.empty() && local.log_dir.empty() && local.redirects.empty() &&
           local.tee.empty() && local.local_ranks_filter.empty();
  }

  absl::StatusOr<LaunchResult> Launch(const LaunchOptions& given) override {
    const absl::StatusOr<LaunchOptions> with_variables =
        WithPetVariables(given, Environment::FromProcess());
    DDP_RETURN_IF_ERROR(with_variables.status());
    LaunchOptions options = *with_variables;
    DDP_RETURN_IF_ERROR(Check(options));
    const auto local = options.implementations.Get<LocalOptions>(kName);
    Rank rank;
    rank.local_world_size = options.NprocHere();
    rank.world_size = rank.local_world_size * options.Nnodes();
    rank.node_rank = options.Nnodes() > 1 ? *local.node_rank : 0;
    // The same on all nodes, whose launchers do not meet.
    rank.run_id = options.Nnodes() > 1
                      ? absl::StrCat("local-", local.master_addr, "-", local.master_port)
                      : absl::StrCat("local-", getpid(), "-", absl::ToUnixMillis(absl::Now()));
    std::optional<ProgressBoard> board;
    if (options.max_restarts > 0) {
      DDP_ASSIGN_OR_RETURN(ProgressBoard created, ProgressBoard::Create());
      board.emplace(std::move(created));
    }
    // Later attempts run the program of the first one, also if it is built meanwhile. One that is
    // found in PATH, or cannot be opened, is started by its name.
    const absl::StatusOr<PinnedProgram> program = PinnedProgram::Open(options.argv[0]);
    RestartPolicy policy(options.max_restarts);
    DDP_ASSIGN_OR_RETURN(const int lives_before, RequeuesOfJob(Environment::FromProcess()));
    while (true) {
      if (program.ok()) options.argv[0] = program->Path();
      rank.restart_count = lives_before + policy.restarts();
      DDP_ASSIGN_OR_RETURN(LaunchResult result,
                           LaunchOnce(options, rank, board ? &*board : nullptr));
      // failed_rank is -1 after success, or if a signal has ended the job.
      if (result.failed_rank < 0) return result;
      const RestartPolicy::Decision next =
          policy.AfterFailure(result.exit_code, board ? board->Read() : std::nullopt);
      if (!next.restart) {
        if (!next.why.empty()) absl::StrAppend(&result.description, "; ", next.why);
        return result;
      }
      ABSL_LOG(WARNING) << result.description << "; restart " << policy.restarts() << " of "
                        << options.max_restarts
                        << (next.wait > absl::ZeroDuration()
                                ? absl::StrCat(" in ", absl::FormatDuration(next.wait))
                                : "");
      absl::SleepFor(next.wait);  // without ranks, so a signal may end this process as it likes
      if (const auto attempts = Environment::FromProcess().Get(kAttemptsVariable)) {
        NoteAttempt(*attempts, absl::StrCat("restart ", policy.restarts()));
      }
      if (board) board->Clear();
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
  static absl::StatusOr<LaunchResult> LaunchOnce(const LaunchOptions& options, Rank rank,
                                                 const ProgressBoard* board) {
    const auto local = options.implementations.Get<LocalOptions>(kName);
    const bool several_nodes = options.Nnodes() > 1;
    DDP_ASSIGN_OR_RETURN(OutputPlan plan, OutputPlan::From(local, rank.local_world_size));
    Listener listener;
    listener.port = local.master_port;
    if (rank.node_rank == 0) {
      DDP_ASSIGN_OR_RETURN(listener, Listen(local.master_addr, local.master_port, several_nodes));
    }
    DDP_ASSIGN_OR_RETURN(SignalPipe signals, SignalPipe::Install({SIGUSR1, SIGUSR2}));
    DDP_ASSIGN_OR_RETURN(PosixProcessGroup group, PosixProcessGroup::Create());
    Attempt attempt{options, std::move(plan), {}, group.id(), {}, {}, board};
    Supervisor supervisor(std::move(group), std::move(signals),
                          {.grace = options.grace, .stop_timeout = local.stop_timeout});

    attempt.environment = Environment::FromProcess().variables();
    for (const auto& [name, value] : options.environment) attempt.environment[name] = value;
    attempt.environment[kMarker] = kName;
    // Of a launcher that has started this one.
    for (const char* name : {kMasterListenFd, ProgressBoard::kVariable, kAttemptsVariable,
                             "TORCHELASTIC_ERROR_FILE"}) {
      attempt.environment.erase(name);
    }
    const int cores = CoresOfTask(Environment::FromProcess());
    attempt.environment.emplace("OMP_NUM_THREADS",
                                absl::StrCat(std::max(1, cores / rank.local_world_size)));
    attempt.null_in = UniqueFd(open("/dev/null", O_RDONLY | O_CLOEXEC));
    attempt.null_out = UniqueFd(open("/dev/null", O_WRONLY | O_CLOEXEC));
    if (!attempt.null_in.ok() || !attempt.null_out.ok()) {
      return absl::ErrnoToStatus(errno, "cannot open /dev/null");
    }

    rank.master_addr = local.master_addr;
    rank.master_port = listener.port;
    const std::vector<CoreShare> shares = SharesOf(local, rank.local_world_size);
    const bool has_threads = Environment::FromProcess().Has("OMP_NUM_THREADS");
    const std::optional<std::vector<int>> all_cpus = AllowedCpus();
    for (int i = 0; i < rank.local_world_size && supervisor.MayAdd(); ++i) {
      rank.local_rank = i;
      rank.rank = rank.node_rank * rank.local_world_size + i;
      rank.master_listen_fd = rank.rank == 0 ? std::optional<int>(listener.fd.get()) : std::nullopt;
      if (!shares.empty()) {
        if (!has_threads) attempt.environment["OMP_NUM_THREADS"] = absl::StrCat(shares[i].threads);
        BindTo(shares[i].cpus);  // which the process inherits
      }
      absl::StatusOr<RankProcess> process = StartRank(attempt, rank);
      if (!shares.empty() && all_cpus) BindTo(*all_cpus);
      if (!process.ok()) return Annotate(process.status(), absl::StrCat("rank ", rank.rank));
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
