// The ranks in tests of the local launcher: `testing_program MODE [ARGUMENT…]`. In modes after
// `leave` the ranks first connect to the rendezvous port, so that all are running when rank 0
// continues.
//
//   print                  each rank prints its Rank to stdout and stderr
//   replace PATH           as exit 4 until the first restart, and replaces the program at PATH
//   cpus                   each rank prints how many it may run on
//   state                  each rank prints what it reads from stdin, and how it takes signals
//   exit CODE              each rank exits with CODE
//   file PATH              each rank writes PATH, and prints to stdout and stderr meanwhile
//   meet                   after all have met, each rank prints its place
//   stuck FROM TO          rank 0 says that it goes on from a step and comes to another, and fails
//   leave                  each rank exits with 0 and leaves a child that ignores SIGTERM
//   fail RANK CODE         RANK exits with CODE, the others block
//   die RANK SIGNAL        RANK kills itself, the others block
//   stubborn RANK CODE     as fail, and the others ignore SIGTERM
//   fail_deaf RANK CODE    as fail, and the others print "told" on SIGTERM and go on
//   chatter KIB            rank 1 prints that much; then rank 0 prints "ready" to stderr
//   block                  rank 0 prints "ready", all block
//   deaf                   as block, and on SIGTERM and SIGINT each rank prints "told" and goes on
//   connect ADDRESS        exits with 0 if the rendezvous port there can be connected to
//   save MS CODE           as block, and after a stop signal (base/stop_signals.h) each rank takes
//   so
//                          long, and exits with CODE; 0: with 128 + the signal
//   fail_beside RANK CODE  as fail, and the others hold stop signals
//   apart                  as block, and each rank is in a session of its own
//   parents                as block, and each rank has a child that blocks, too
//   launch N MODE …        launches N ranks of the rest, 0: as many as PET_NPROC_PER_NODE says, and
//                          reports on stderr how that ended
#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/log/check.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/environment.h"
#include "base/file.h"
#include "base/process.h"
#include "base/progress_board.h"
#include "base/stop_signals.h"
#include "base/unique_fd.h"
#include "launchers/launcher.h"
#include "launchers/local/options.h"

namespace ddp::launchers {
namespace {

void Put(int fd, const std::string& text) {
  CHECK_EQ(write(fd, text.data(), text.size()), static_cast<ssize_t>(text.size()));
}

[[noreturn]] void Block() {
  while (true) pause();
}

void Tell(int) { [[maybe_unused]] const ssize_t written = write(STDOUT_FILENO, "told\n", 5); }

std::string ReadStdin() {
  std::string text;
  char buffer[4096];
  for (ssize_t n; (n = read(STDIN_FILENO, buffer, sizeof(buffer))) > 0;) text.append(buffer, n);
  return text;
}

// Says whether a signal is "default", "ignored" or "handled", and whether it is blocked.
std::string StateOf(int signal) {
  struct sigaction action;
  sigset_t blocked;
  CHECK_EQ(sigaction(signal, nullptr, &action), 0);
  CHECK_EQ(sigprocmask(SIG_BLOCK, nullptr, &blocked), 0);
  const char* how = action.sa_handler == SIG_DFL   ? "default"
                    : action.sa_handler == SIG_IGN ? "ignored"
                                                   : "handled";
  return absl::StrCat(how, sigismember(&blocked, signal) ? ", blocked" : "");
}

// Writes `kib` KiB in pieces of whole lines, each of which a pipe takes at once.
void Chatter(int kib) {
  const std::string line = std::string(63, 'x') + "\n";
  std::string piece;
  while (piece.size() < 1024) piece += line;
  for (int i = 0; i < kib; ++i) Put(STDOUT_FILENO, piece);
}

// A barrier, so that all ranks have their handlers of signals when it returns on any. Rank 0 uses
// its inherited socket, which listens before rank 0 runs: a connection alone says nothing of it.
void Meet(const Rank& rank) {
  // ThreadSanitizer delivers no signal in accept() and read(), and does in poll().
  const auto wait_for = [](int fd) {
    pollfd readable = {.fd = fd, .events = POLLIN, .revents = 0};
    while (poll(&readable, 1, -1) != 1) {
    }
  };
  if (rank.rank == 0) {
    std::vector<UniqueFd> others;
    for (int i = 1; i < rank.world_size; ++i) {
      wait_for(rank.master_listen_fd.value());
      others.emplace_back(accept(rank.master_listen_fd.value(), nullptr, nullptr));
      CHECK(others.back().ok());
    }
    for (const UniqueFd& other : others) (void)send(other.get(), ".", 1, MSG_NOSIGNAL);
    return;
  }
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(rank.master_port);
  CHECK_EQ(inet_pton(AF_INET, rank.master_addr.c_str(), &address.sin_addr), 1);
  // Node 0 may not listen yet; the test's own limit on time applies.
  while (true) {
    const UniqueFd fd(socket(AF_INET, SOCK_STREAM, 0));
    if (connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) {
      wait_for(fd.get());
      return;
    }
    usleep(1'000);
  }
}

bool Connects(const std::string& host, int port) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST;
  addrinfo* found = nullptr;
  CHECK_EQ(getaddrinfo(host.c_str(), absl::StrCat(port).c_str(), &hints, &found), 0);
  const UniqueFd fd(socket(found->ai_family, SOCK_STREAM, 0));
  const bool connects = connect(fd.get(), found->ai_addr, found->ai_addrlen) == 0;
  freeaddrinfo(found);
  return connects;
}

int RunRank(const std::vector<std::string>& args) {
  // ThreadSanitizer makes a thread's record of pending signals in its first blocking call, and
  // loses a signal that comes meanwhile.
  usleep(1);
  const Rank rank = (*CreateLauncher("local"))->Detect(Environment::FromProcess()).value().value();
  const std::string& mode = args.at(0);
  auto number = [&](size_t i) { return atoi(args.at(i).c_str()); };
  if (mode == "exit") return number(1);
  // Fails until the restart of that number.
  if (mode == "fail_until") {
    Put(STDERR_FILENO, absl::StrCat("restart ", rank.restart_count, " of ", rank.rank, "\n"));
    return rank.restart_count < number(1) && rank.rank == 1 ? 4 : 0;
  }
  if (mode == "replace") {
    Put(STDERR_FILENO, absl::StrCat("attempt ", rank.restart_count, "\n"));
    CHECK_OK(WriteFileAtomically(args.at(1), "#!/bin/sh\necho another program >&2\n"));
    CHECK_EQ(chmod(args.at(1).c_str(), 0755), 0);
    return rank.restart_count == 0 ? 4 : 0;
  }
  if (mode == "print") {
    const char* threads = getenv("OMP_NUM_THREADS");
    Put(STDOUT_FILENO, absl::StrCat("out ", rank.rank, "/", rank.world_size, " threads ", threads,
                                    "\nno newline"));
    Put(STDERR_FILENO, absl::StrCat("err ", rank.rank, "\n"));
    return 0;
  }
  if (mode == "cpus") {
    cpu_set_t set;
    CHECK_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
    Put(STDOUT_FILENO, absl::StrCat("rank ", rank.rank, " has ", CPU_COUNT(&set), " of them, ",
                                    getenv("OMP_NUM_THREADS"), " threads\n"));
    return 0;
  }
  if (mode == "state") {
    Put(STDOUT_FILENO, absl::StrCat("stdin '", ReadStdin(), "' SIGINT ", StateOf(SIGINT),
                                    " SIGPIPE ", StateOf(SIGPIPE), "\n"));
    return 0;
  }
  if (mode == "file") {
    const int fd = open(args.at(1).c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_APPEND, 0666);
    Put(fd, "contents\n");
    for (int standard : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
      [[maybe_unused]] const ssize_t written = write(standard, "printed\n", 8);
    }
    return 0;
  }
  if (mode == "stuck") {
    std::optional<ProgressBoard> board = ProgressBoard::FromEnvironment(Environment::FromProcess());
    if (rank.rank != 0) Block();
    Put(STDERR_FILENO, absl::StrCat("attempt ", rank.restart_count, "\n"));
    board.value().Begin(number(1), "earlier.pt");
    board->Reached(number(2));
    return 4;
  }
  if (mode == "connect") return Connects(args.at(1), rank.master_port) ? 0 : 1;
  if (mode == "meet") {
    Meet(rank);
    Put(STDOUT_FILENO,
        absl::StrCat("rank ", rank.rank, "/", rank.world_size, " local ", rank.local_rank, "/",
                     rank.local_world_size, " node ", rank.node_rank, " run ", rank.run_id, "\n"));
    return 0;
  }
  if (mode == "leave") {
    if (fork() != 0) return 0;
    signal(SIGTERM, SIG_IGN);
    Block();
  }
  if (mode == "stubborn") signal(SIGTERM, SIG_IGN);
  if (mode == "parents" && fork() == 0) Block();
  if (mode == "apart") CHECK_GT(setsid(), 0);
  if (mode == "deaf" || mode == "fail_deaf") {
    signal(SIGTERM, Tell);
    signal(SIGINT, Tell);
  }
  const StopSignals stop(mode == "save" || mode == "fail_beside"
                             ? std::vector<int>{SIGTERM, SIGINT, SIGUSR1, SIGUSR2}
                             : std::vector<int>{});
  if (mode == "chatter" && rank.rank == 1) Chatter(number(1));
  Meet(rank);
  if (mode == "chatter") {
    if (rank.rank == 0) Put(STDERR_FILENO, "ready\n");
    return 0;
  }
  if (mode == "save") {
    if (rank.rank == 0) Put(STDOUT_FILENO, "ready\n");
    while (stop.received() == 0) usleep(1'000);
    if (rank.rank == 0) Put(STDOUT_FILENO, "told\n");
    for (int ms = 0; ms < number(1); ++ms) usleep(1'000);
    return number(2) != 0 ? number(2) : 128 + stop.received();
  }
  if (mode == "block" || mode == "parents" || mode == "apart" || mode == "deaf") {
    if (rank.rank == 0) Put(STDOUT_FILENO, "ready\n");
    Block();
  }
  if (rank.rank != number(1)) Block();
  if (mode == "die") raise(number(2));
  return number(2);
}

int LaunchRanks(std::vector<std::string> args) {
  LaunchOptions request;
  const int nproc = atoi(args.at(1).c_str());
  if (getenv("TEST_NPROC_IS_DEFAULT") != nullptr) {
    request.default_nproc_here = nproc;
  } else if (nproc > 0) {
    request.nproc_per_node = nproc;
  }
  args.erase(args.begin(), args.begin() + 2);
  args.insert(args.begin(), ddp::ExecutablePath());
  request.argv = std::move(args);
  const char* grace_ms = getenv("TEST_GRACE_MS");
  request.grace = absl::Milliseconds(grace_ms != nullptr ? atoi(grace_ms) : 200);
  const char* timeout_ms = getenv("TEST_STOP_TIMEOUT_MS");
  request.implementations.Mutable<LocalOptions>("local").stop_timeout =
      absl::Milliseconds(timeout_ms != nullptr ? atoi(timeout_ms) : 0);
  auto& local = request.implementations.Mutable<LocalOptions>("local");
  for (const auto& [name, option] :
       {std::pair("TEST_LOG_DIR", &local.log_dir), std::pair("TEST_REDIRECTS", &local.redirects),
        std::pair("TEST_BINDING", &local.numa_binding),
        std::pair("TEST_FILTER", &local.local_ranks_filter)}) {
    if (const char* value = getenv(name)) *option = value;
  }
  if (const char* restarts = getenv("TEST_MAX_RESTARTS")) request.max_restarts = atoi(restarts);
  absl::StatusOr<LaunchResult> result = (*CreateLauncher("local"))->Launch(request);
  CHECK(result.ok()) << result.status();
  Put(STDERR_FILENO, absl::StrCat("result: ", result->description, "\n"));
  return result->exit_code;
}

}  // namespace
}  // namespace ddp::launchers

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  return args.at(0) == "launch" ? ddp::launchers::LaunchRanks(args) : ddp::launchers::RunRank(args);
}
