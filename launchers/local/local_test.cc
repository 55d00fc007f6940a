// The local launcher with real processes. Processes that a test observes hold the writing end of a
// pipe, which gets end of file when the last of them ends: no guessed process ids, no sleeps.
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/command.h"
#include "base/cores.h"
#include "base/environment.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/loopback_testing.h"
#include "base/option_error.h"
#include "base/process.h"
#include "base/unique_fd.h"
#include "gtest/gtest.h"
#include "launchers/launcher.h"
#include "launchers/local/options.h"

namespace ddp::launchers {
namespace {

// Of ranks that end in time, which those of a busy machine may not.
const std::map<std::string, std::string> kLongGrace = {{"TEST_GRACE_MS", "60000"}};

std::string Program() {
  return absl::StrCat(getenv("TEST_SRCDIR"), "/", getenv("TEST_WORKSPACE"),
                      "/launchers/local/testing_program");
}

struct Pipe {
  Pipe() {
    int fds[2];
    EXPECT_EQ(pipe2(fds, O_CLOEXEC), 0);
    reader = UniqueFd(fds[0]);
    writer = UniqueFd(fds[1]);
  }
  // Reads to the end of the stream, which comes when all writers are gone.
  std::string ReadAll() {
    writer.Close();
    std::string text;
    char buffer[4096];
    for (ssize_t n; (n = read(reader.get(), buffer, sizeof(buffer))) > 0;) text.append(buffer, n);
    return text;
  }
  std::string ReadLine() {
    std::string text;
    for (char c; read(reader.get(), &c, 1) == 1 && c != '\n';) text += c;
    return text;
  }
  UniqueFd reader, writer;
};

// A launcher process of its own, so that it can be killed, with `nproc` ranks below it.
class Job {
 public:
  Job(int nproc, const std::vector<std::string>& mode,
      const std::map<std::string, std::string>& variables = {}) {
    ProcessOptions options;
    options.argv = {Program(), "launch", absl::StrCat(nproc)};
    options.argv.insert(options.argv.end(), mode.begin(), mode.end());
    options.environment = Environment::FromProcess().variables();
    for (const auto& [name, value] : variables) options.environment[name] = value;
    EXPECT_EQ(write(in_.writer.get(), "to the launcher", 15), 15);
    options.stdin_fd = in_.reader.get();
    options.stdout_fd = out_.writer.get();
    options.stderr_fd = err_.writer.get();
    options.inherited_fds = {alive_.writer.get()};
    pid_ = StartProcess(options).value();
    for (Pipe* pipe : {&in_, &out_, &err_, &alive_}) pipe->writer.Close();
    in_.reader.Close();
  }

  void WaitUntilReady() { EXPECT_EQ(out_.ReadLine(), "ready"); }
  std::string ReadLine() { return out_.ReadLine(); }
  std::string ReadErrorLine() { return err_.ReadLine(); }
  void Signal(int signal) { kill(pid_, signal); }
  // Signals the launcher until it ends, which may need several, while nobody reads its output.
  // Returns false, and kills it, if half a minute is not enough.
  bool EndsBySignals(int signal) {
    for (int i = 0; i < 3000; ++i) {
      kill(pid_, signal);
      siginfo_t info = {};
      if (waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
          info.si_pid == pid_) {
        return true;
      }
      usleep(10'000);
    }
    kill(pid_, SIGKILL);
    return false;
  }

  // Waits for the launcher and for whatever it has started, directly or not.
  void Finish() {
    out = out_.ReadAll();
    err = err_.ReadAll();
    struct rusage usage = {};
    ASSERT_EQ(wait4(pid_, &status, 0, &usage), pid_);
    most_kib = usage.ru_maxrss;
    alive_.ReadAll();
  }
  int exit_code() const { return WIFEXITED(status) ? WEXITSTATUS(status) : -1; }

  std::string out, err;
  int status = 0;
  int64_t most_kib = 0;  // memory of the launcher, or of a rank if that is more

 private:
  Pipe in_, out_, err_, alive_;
  pid_t pid_ = 0;
};

// The environment of the only rank of a job.
std::map<std::string, std::string> RankAlone() {
  std::map<std::string, std::string> variables = Environment::FromProcess().variables();
  variables.insert({{"DDP_LAUNCHER", "local"}, {"RANK", "0"}, {"WORLD_SIZE", "1"}});
  return variables;
}

std::vector<std::string> SortedLines(const std::string& text) {
  std::vector<std::string> lines = absl::StrSplit(text, '\n', absl::SkipEmpty());
  std::sort(lines.begin(), lines.end());
  return lines;
}

TEST(LocalTest, MarksTheOutputOfAllButRankZero) {
  Job job(3, {"print"}, {{"OMP_NUM_THREADS", "7"}});
  job.Finish();
  EXPECT_EQ(job.exit_code(), 0) << job.err;
  // Rank 0 writes by itself, and its last line lacks a newline; what follows it on that line is
  // up to chance.
  EXPECT_TRUE(absl::StrContains(job.out, "out 0/3 threads 7\nno newline")) << job.out;
  for (int rank : {1, 2}) {
    const std::string mark = absl::StrCat("[rank ", rank, "] ");
    const std::string first = absl::StrCat(mark, "out ", rank, "/3 threads 7\n");
    const std::string last = absl::StrCat(mark, "no newline\n");
    EXPECT_TRUE(absl::StrContains(job.out, first)) << job.out;
    EXPECT_TRUE(absl::StrContains(job.out, last)) << job.out;
  }
  EXPECT_EQ(SortedLines(job.err),
            (std::vector<std::string>{"[rank 1] err 1", "[rank 2] err 2", "err 0", "result: "}));
}

TEST(LocalTest, StartsAsManyRanksAsTheProgramCountsHere) {
  Job job(3, {"print"}, {{"TEST_NPROC_IS_DEFAULT", "1"}});
  job.Finish();
  EXPECT_EQ(job.exit_code(), 0) << job.err;
  EXPECT_TRUE(absl::StrContains(job.out, "[rank 2] out 2/3 ")) << job.out;
}

TEST(LocalTest, BindsRanksToCoresOfTheirOwn) {
  cpu_set_t set;
  ASSERT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
  unsetenv("OMP_NUM_THREADS");
  const int all = CPU_COUNT(&set);
  if (all < 2 || AvailableCores() < all) GTEST_SKIP() << "one CPU, or a quota";
  Job alone(1, {"cpus"}, {{"TEST_BINDING", "exclusive"}});
  Job two(2, {"cpus"}, {{"TEST_BINDING", "exclusive"}});
  alone.Finish();
  two.Finish();
  const std::string has_all = absl::StrCat("has ", all, " of them");
  EXPECT_TRUE(absl::StrContains(alone.out, has_all)) << alone.out << alone.err;
  EXPECT_FALSE(absl::StrContains(two.out, has_all)) << two.out << two.err;
  EXPECT_EQ(SortedLines(two.out).size(), 2) << two.out;
}

TEST(LocalTest, SharesTheCoresOut) {
  cpu_set_t set;
  ASSERT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
  unsetenv("OMP_NUM_THREADS");
  for (const int nproc : {1, CPU_COUNT(&set) + 1}) {
    Job job(nproc, {"print"});
    job.Finish();
    const int threads = nproc == 1 ? CPU_COUNT(&set) : 1;
    EXPECT_TRUE(absl::StrContains(job.out, absl::StrCat("out 0/", nproc, " threads ", threads)))
        << job.out;
  }
  // In the shell of a SLURM job.
  Job job(1, {"print"}, {{"SLURM_CPUS_PER_TASK", "1"}});
  job.Finish();
  EXPECT_TRUE(absl::StrContains(job.out, "out 0/1 threads 1")) << job.out;
}

TEST(LocalTest, ReportsTheFirstFailureAndEndsTheOthers) {
  for (const std::string rank : {"0", "2"}) {
    Job job(3, {"fail", rank, "5"}, kLongGrace);
    job.Finish();
    EXPECT_EQ(job.exit_code(), 5);
    EXPECT_TRUE(absl::StrContains(job.err, absl::StrCat("result: rank ", rank, " (pid ")));
    EXPECT_TRUE(absl::StrContains(job.err, ") exited with code 5\n")) << job.err;
  }
}

// More ranks than the machine has room for, by a slip of the pen: one fails before all have begun.
TEST(LocalTest, AFailureEndsTheStartOfTheOthers) {
  Job job(2'000, {"fail_until", "1"});
  job.Finish();
  EXPECT_EQ(job.exit_code(), 4);
  EXPECT_TRUE(absl::StrContains(job.err, "restart 0 of 1\n"));
  EXPECT_FALSE(absl::StrContains(job.err, "restart 0 of 1999\n"));
}

TEST(LocalTest, ReportsTheSignal) {
  Job job(2, {"die", "1", "9"}, kLongGrace);
  job.Finish();
  EXPECT_EQ(job.exit_code(), 137);
  EXPECT_TRUE(absl::StrContains(job.err, ") was killed by signal 9 (Killed)\n")) << job.err;
}

TEST(LocalTest, WhoIgnoresSigtermIsKilled) {
  Job job(3, {"stubborn", "0", "4"});
  job.Finish();
  EXPECT_EQ(job.exit_code(), 4);
  EXPECT_TRUE(absl::StrContains(
      job.err, "exited with code 4; ranks 1, 2 did not end within 200ms of SIGTERM"))
      << job.err;
}

TEST(LocalTest, SignalsToTheLauncherEndTheRanks) {
  for (int signal : {SIGINT, SIGTERM, SIGHUP}) {
    Job job(2, {"parents"});
    job.WaitUntilReady();
    job.Signal(signal);
    job.Finish();
    EXPECT_EQ(job.exit_code(), 128 + signal);
    EXPECT_TRUE(absl::StrContains(job.err, absl::StrCat("result: stopped by signal ", signal)))
        << job.err;
  }
}

TEST(LocalTest, TheFirstOfSeveralSignalsCounts) {
  Job job(1, {"deaf"});
  job.WaitUntilReady();
  job.Signal(SIGINT);
  EXPECT_EQ(job.ReadLine(), "told");  // the launcher has handled it
  job.Signal(SIGTERM);
  job.Finish();
  EXPECT_EQ(job.exit_code(), 128 + SIGINT);
  EXPECT_TRUE(absl::StrContains(job.err, absl::StrCat("result: stopped by signal ", SIGINT)))
      << job.err;
}

// The time that a test which works never needs.
const std::map<std::string, std::string> kLongStopTimeout = {{"TEST_STOP_TIMEOUT_MS", "60000"}};

TEST(LocalTest, RanksThatHandleTheSignalMaySave) {
  for (int signal : {SIGINT, SIGTERM, SIGUSR1, SIGUSR2}) {
    Job job(2, {"save", "500", "0"}, kLongStopTimeout);  // more than the grace time
    job.WaitUntilReady();
    job.Signal(signal);
    job.Finish();
    EXPECT_EQ(job.exit_code(), 128 + signal) << job.err;
    EXPECT_TRUE(absl::StrContains(job.err, "waiting for ranks 0, 1 to end, for 1m at most"))
        << job.err;
    EXPECT_TRUE(absl::StrContains(job.err, "result: \n")) << job.err;
  }
}

TEST(LocalTest, RanksThatSaveHaveTheirTimeAlone) {
  Job job(2, {"save", "60000", "0"}, {{"TEST_STOP_TIMEOUT_MS", "400"}});
  job.WaitUntilReady();
  job.Signal(SIGTERM);
  job.Finish();
  EXPECT_EQ(job.exit_code(), 128 + SIGTERM) << job.err;
  EXPECT_TRUE(absl::StrContains(
      job.err, "; ranks 0, 1 did not end within 400ms of the signal and got SIGKILL\n"))
      << job.err;
}

TEST(LocalTest, AFurtherSignalAfterASecondKillsRanksThatSave) {
  Job job(2, {"save", "60000", "0"}, kLongStopTimeout);
  job.WaitUntilReady();
  job.Signal(SIGINT);
  job.Signal(SIGINT);
  EXPECT_EQ(job.ReadLine(), "told");  // the launcher has had the first
  usleep(1'100'000);
  job.Signal(SIGTERM);
  job.Finish();
  EXPECT_EQ(job.exit_code(), 128 + SIGINT) << job.err;
  EXPECT_TRUE(absl::StrContains(
      job.err, "; ranks 0, 1 got SIGKILL after a further signal 15 (Terminated)\n"))
      << job.err;
}

TEST(LocalTest, ASignalWhileRanksEndAfterAFailureIsNotLost) {
  Job job(2, {"fail_deaf", "1", "4"}, {{"TEST_GRACE_MS", "60000"}, {"TEST_MAX_RESTARTS", "2"}});
  EXPECT_EQ(job.ReadLine(), "told");  // the launcher has noticed that rank 1 has failed
  usleep(1'100'000);
  job.Signal(SIGTERM);
  job.Finish();
  EXPECT_EQ(job.exit_code(), 4) << job.err;
  EXPECT_TRUE(absl::StrContains(
      job.err, ") exited with code 4; rank 0 got SIGKILL after a further signal 15 (Terminated)\n"))
      << job.err;
  EXPECT_FALSE(absl::StrContains(job.err, "restart 1")) << job.err;
}

// It could not save, or had come to its end.
TEST(LocalTest, RanksThatHandleTheSignalSayHowTheyEnd) {
  for (const int code : {3, 77}) {
    Job job(2, {"save", "1", absl::StrCat(code)},
            {{"TEST_STOP_TIMEOUT_MS", "60000"},
             {"TEST_GRACE_MS", "60000"},
             {"TEST_MAX_RESTARTS", "2"}});
    job.WaitUntilReady();
    job.Signal(SIGTERM);
    job.Finish();
    EXPECT_EQ(job.exit_code(), code) << job.err;
    EXPECT_TRUE(absl::StrContains(job.err, absl::StrCat(") exited with code ", code, "\n")))
        << job.err;
    EXPECT_FALSE(absl::StrContains(job.err, "restart")) << job.err;
  }
}

// A signal that only the ranks have got.
TEST(LocalTest, AStopThatWasSavedIsNoFailureAndNotRestarted) {
  Job job(3, {"exit", absl::StrCat(128 + SIGUSR1)},
          {{"TEST_GRACE_MS", "60000"}, {"TEST_MAX_RESTARTS", "2"}});
  job.Finish();
  EXPECT_EQ(job.exit_code(), 128 + SIGUSR1) << job.err;
  EXPECT_EQ(SortedLines(job.err), std::vector<std::string>{"result: "});
}

// A run would come to the same anomaly again.
TEST(LocalTest, ARunThatWasEndedForAnAnomalyIsNotRestarted) {
  Job job(3, {"exit", absl::StrCat(kAnomalyExitCode)}, {{"TEST_MAX_RESTARTS", "2"}});
  job.Finish();
  EXPECT_EQ(job.exit_code(), kAnomalyExitCode) << job.err;
  EXPECT_FALSE(absl::StrContains(job.err, "; restart 1 of 2")) << job.err;
}

TEST(LocalTest, AFailureWaitsForNobodyToSave) {
  // Ranks that nobody ends would take all of it; those of a busy machine take a part.
  Job job(3, {"fail_beside", "1", "4"}, {{"TEST_GRACE_MS", "60000"}});
  job.Finish();
  EXPECT_EQ(job.exit_code(), 4);
  EXPECT_TRUE(absl::StrContains(job.err, ") exited with code 4\n")) << job.err;
}

TEST(LocalTest, ASignalAfterTheEndOfTheRanksAbandonsTheirOutput) {
  Job job(2, {"chatter", "512"});  // more than the pipe takes
  ASSERT_EQ(job.ReadErrorLine(), "ready");
  EXPECT_TRUE(job.EndsBySignals(SIGTERM));
  job.Finish();
}

TEST(LocalTest, OutputThatIsNotReadYetIsNotKeptInMemory) {
  constexpr int kKib = 32 << 10;
  Job little(2, {"chatter", "1"}), much(2, {"chatter", absl::StrCat(kKib)});
  little.Finish();
  much.Finish();
  EXPECT_EQ(much.exit_code(), 0) << much.err;
  EXPECT_GE(much.out.size(), size_t{kKib} << 10);
  EXPECT_LT(much.most_kib, little.most_kib + kKib / 2);
}

// Signals that are ignored stay ignored; those that the launcher blocks or handles do not.
TEST(LocalTest, RanksHaveAnEmptyStdinAndTheSignalsOfTheLaunchersParent) {
  const auto before_int = signal(SIGINT, SIG_DFL);
  const auto before_pipe = signal(SIGPIPE, SIG_IGN);
  Job job(2, {"state"});
  job.Finish();
  signal(SIGINT, before_int);
  signal(SIGPIPE, before_pipe);
  const std::string state = "stdin '' SIGINT default SIGPIPE ignored";
  EXPECT_EQ(SortedLines(job.out), (std::vector<std::string>{"[rank 1] " + state, state}));
}

// As other launchers may start it, with a closed descriptor.
TEST(LocalTest, WhatARankPrintsIsNotWrittenIntoTheFilesThatItOpens) {
  for (const char* closed : {"0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"}) {
    const std::string file = absl::StrCat(testing::TempDir(), "/file");
    const std::string command = absl::StrCat("exec \"$0\" file '", file, "' ", closed);
    const auto ended = RunCommand({"sh", "-c", command, Program()}, RankAlone());
    ASSERT_TRUE(ended.ok()) << ended.status();
    EXPECT_EQ(ended->exit_code, 0) << ended->err;
    EXPECT_EQ(*ReadFile(file), "contents\n") << closed;
  }
}

TEST(LocalTest, SignalsEndProcess1OfAContainerToo) {
  const std::vector<std::string> container = {"unshare", "--user", "--map-root-user", "--pid",
                                              "--fork"};
  const auto run = [&](std::vector<std::string> argv) {
    argv.insert(argv.begin(), container.begin(), container.end());
    return RunCommand(argv, RankAlone());
  };
  const auto possible = run({"true"});
  if (!possible.ok() || possible->exit_code != 0) {
    GTEST_SKIP() << "this system lets no user make a process id namespace";
  }
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGABRT, SIGRTMIN}) {
    const auto ended = run({Program(), "die", "0", absl::StrCat(signal)});
    ASSERT_TRUE(ended.ok()) << ended.status();
    EXPECT_EQ(ended->exit_code, 128 + signal);
  }
  // What whoever started it ignores, and what is ignored by default, ends it as little as others.
  const auto before = ::signal(SIGHUP, SIG_IGN);
  for (const int signal : {SIGHUP, SIGCHLD, SIGWINCH, SIGCONT}) {
    EXPECT_EQ(run({Program(), "die", "0", absl::StrCat(signal)})->exit_code, signal);
  }
  ::signal(SIGHUP, before);
}

// Ranks are in a process group in the background of the launcher's terminal.
TEST(LocalTest, ATerminalThatStopsWritersInTheBackgroundDoesNotStopRanks) {
  UniqueFd terminal(posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  ASSERT_TRUE(terminal.ok());
  ASSERT_EQ(grantpt(terminal.get()), 0);
  ASSERT_EQ(unlockpt(terminal.get()), 0);
  const std::string name = ptsname(terminal.get());
  const std::string program = Program();
  const pid_t pid = fork();
  ASSERT_GE(pid, 0);
  if (pid == 0) {
    setsid();
    const int fd = open(name.c_str(), O_RDWR);  // becomes the terminal of the session
    termios mode = {};
    if (fd < 0 || tcgetattr(fd, &mode) != 0) _exit(90);
    mode.c_lflag |= TOSTOP;
    if (tcsetattr(fd, TCSANOW, &mode) != 0) _exit(91);
    for (int standard : {0, 1, 2}) dup2(fd, standard);
    signal(SIGTTOU, SIG_DFL);
    alarm(50);  // ends the launcher, and with it the ranks, if they have been stopped
    execl(program.c_str(), program.c_str(), "launch", "2", "print", nullptr);
    _exit(92);
  }
  std::string text;
  char buffer[4096];
  // Until the last process that has the terminal ends: EIO.
  for (ssize_t n; (n = read(terminal.get(), buffer, sizeof(buffer))) > 0;) text.append(buffer, n);
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status << "\n" << text;
  for (const char* line : {"out 0/2", "err 0", "[rank 1] out 1/2", "[rank 1] err 1"}) {
    EXPECT_TRUE(absl::StrContains(text, line)) << line << " in\n" << text;
  }
}

// Finish() would hang if a rank, or a child of one, outlived the launcher.
TEST(LocalTest, NobodySurvivesTheLauncher) {
  Job job(2, {"parents"});
  job.WaitUntilReady();
  job.Signal(SIGKILL);
  job.Finish();
  EXPECT_TRUE(WIFSIGNALED(job.status));
}

// Signals to the process group do not reach such ranks.
TEST(LocalTest, RanksInSessionsOfTheirOwnEndLikewise) {
  for (int signal : {SIGTERM, SIGKILL}) {
    Job job(2, {"apart"});
    job.WaitUntilReady();
    job.Signal(signal);
    job.Finish();
    EXPECT_NE(job.status, 0);
  }
}

TEST(LocalTest, WhatRanksLeaveBehindEndsWithTheJob) {
  Job job(2, {"leave"});
  job.Finish();
  EXPECT_EQ(job.exit_code(), 0) << job.err;
}

TEST(LocalTest, LeavesNoProcessAndNoHandlerBehind) {
  struct sigaction before, after;
  std::unique_ptr<Launcher> launcher = *CreateLauncher("local");
  for (const char* code : {"0", "3"}) {
    sigaction(SIGTERM, nullptr, &before);
    absl::StatusOr<LaunchResult> result =
        launcher->Launch({.nproc_per_node = 2, .argv = {Program(), "exit", code}});
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->exit_code, atoi(code));
    EXPECT_EQ(result->failed_rank == -1, result->exit_code == 0);
    EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
    EXPECT_EQ(errno, ECHILD);
    sigaction(SIGTERM, nullptr, &after);
    EXPECT_EQ(before.sa_handler, after.sa_handler);
  }
}

TEST(LocalTest, TakenPortIsNamed) {
  const LoopbackListener other = ListenOnLoopback();
  LaunchOptions options = {.argv = {Program(), "exit", "0"}};
  options.implementations.Mutable<LocalOptions>("local").master_port = other.port;
  const absl::Status status = (*CreateLauncher("local"))->Launch(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(absl::StrContains(status.message(), absl::StrCat("port ", other.port, " is taken")))
      << status;
}

TEST(LocalTest, HostThatDoesNotResolveIsNamed) {
  LaunchOptions options = {.argv = {Program(), "exit", "0"}};
  options.implementations.Mutable<LocalOptions>("local").master_addr = "no-such-host.invalid";
  const absl::Status status = (*CreateLauncher("local"))->Launch(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(absl::StrContains(status.message(), "master_addr=no-such-host.invalid")) << status;
}

// That rank 0 would serve.
TEST(LocalTest, AddressOfAnotherMachineIsNamed) {
  LaunchOptions options = {.nproc_per_node = 2, .argv = {Program(), "exit", "0"}};
  options.implementations.Mutable<LocalOptions>("local").master_addr = "192.0.2.1";
  const absl::Status status = (*CreateLauncher("local"))->Launch(options).status();
  ASSERT_TRUE(ProblemOf(status)) << status;
  EXPECT_EQ(ProblemOf(status)->path, "local.master_addr");
  EXPECT_TRUE(absl::StrContains(status.message(), "is no address of this machine")) << status;
}

TEST(LocalTest, FolderOfOutputThatCannotBeMadeIsNamed) {
  LaunchOptions options = {.nproc_per_node = 2, .argv = {Program(), "exit", "0"}};
  options.implementations.Mutable<LocalOptions>("local").log_dir = "/dev/null/logs";
  const absl::Status status = (*CreateLauncher("local"))->Launch(options).status();
  ASSERT_TRUE(ProblemOf(status)) << status;
  EXPECT_EQ(ProblemOf(status)->path, "local.log_dir");
  EXPECT_TRUE(absl::StrContains(status.message(), "cannot be written: ")) << status;
}

TEST(LocalTest, ProgramThatCannotRunIsNamed) {
  const absl::Status status = (*CreateLauncher("local"))
                                  ->Launch({.nproc_per_node = 2, .argv = {"/nowhere/train"}})
                                  .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(absl::StrContains(status.message(), "cannot execute '/nowhere/train'")) << status;
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
}

TEST(LocalTest, SenselessRequestsAreRefused) {
  std::unique_ptr<Launcher> launcher = *CreateLauncher("local");
  LaunchOptions bad_port = {.argv = {"/bin/true"}};
  bad_port.implementations.Mutable<LocalOptions>("local").master_port = 65536;
  LaunchOptions bad_address = {.argv = {"/bin/true"}};
  bad_address.implementations.Mutable<LocalOptions>("local").master_addr = "[::1]";
  LaunchOptions bad_node = {.nnodes = 2, .argv = {"/bin/true"}};
  bad_node.implementations.Mutable<LocalOptions>("local") = {.node_rank = 2,
                                                             .master_addr = "127.0.0.1"};
  LaunchOptions lonely_node = {.argv = {"/bin/true"}};
  lonely_node.implementations.Mutable<LocalOptions>("local").node_rank = 1;
  LaunchOptions several_with_restarts = bad_node;
  several_with_restarts.implementations.Mutable<LocalOptions>("local").node_rank = 1;
  several_with_restarts.max_restarts = 1;
  LaunchOptions bad_files = {.argv = {"/bin/true"}};
  bad_files.implementations.Mutable<LocalOptions>("local").redirects = "3";
  for (const LaunchOptions& options :
       {LaunchOptions{}, LaunchOptions{.nproc_per_node = 0, .argv = {"/bin/true"}}, bad_port,
        bad_address, LaunchOptions{.nnodes = 2, .argv = {"/bin/true"}}, bad_node, bad_files,
        lonely_node, several_with_restarts,
        LaunchOptions{.grace = absl::Seconds(-1), .argv = {"/bin/true"}}}) {
    EXPECT_EQ(launcher->Launch(options).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(LocalTest, RestartsAllRanksAsOftenAsAskedFor) {
  Job enough(2, {"fail_until", "2"}, {{"TEST_MAX_RESTARTS", "2"}});
  enough.Finish();
  EXPECT_EQ(enough.exit_code(), 0) << enough.err;
  // Rank 1 fails; rank 0 of a failed attempt may be ended before it prints.
  for (const char* line :
       {"restart 0 of 1", "restart 1 of 1", "restart 2 of 0", "restart 2 of 1"}) {
    EXPECT_TRUE(absl::StrContains(enough.err, line)) << line << " in " << enough.err;
  }
  Job too_few(2, {"fail_until", "2"}, {{"TEST_MAX_RESTARTS", "1"}});
  too_few.Finish();
  EXPECT_EQ(too_few.exit_code(), 4);
  EXPECT_FALSE(absl::StrContains(too_few.err, "restart 2 of")) << too_few.err;
}

TEST(LocalTest, ARestartRunsTheProgramThatTheFirstAttemptRan) {
  const std::string program = absl::StrCat(testing::TempDir(), "/built_again");
  ASSERT_EQ(RunCommand({"/bin/cp", Program(), program}, {}, absl::Minutes(1))->exit_code, 0);
  std::map<std::string, std::string> variables = Environment::FromProcess().variables();
  variables["TEST_MAX_RESTARTS"] = "1";
  const absl::StatusOr<CommandResult> job =
      RunCommand({program, "launch", "1", "replace", program}, variables, absl::Minutes(1));
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->exit_code, 0) << job->err;
  EXPECT_TRUE(absl::StrContains(job->err, "attempt 1\n")) << job->err;
  EXPECT_FALSE(absl::StrContains(job->err, "another program")) << job->err;
}

TEST(LocalTest, ThreeRestartsWithoutProgressAreTheLast) {
  Job job(2, {"stuck", "400", "400"}, {{"TEST_GRACE_MS", "60000"}, {"TEST_MAX_RESTARTS", "10"}});
  job.Finish();
  EXPECT_EQ(job.exit_code(), 4) << job.err;
  EXPECT_TRUE(absl::StrContains(job.err,
                                ") exited with code 4; restarted 3 times from step 400 without "
                                "reaching 401; an earlier checkpoint to go on from, in another "
                                "folder: resume=earlier.pt\n"))
      << job.err;
  EXPECT_TRUE(absl::StrContains(job.err, "attempt 3\n")) << job.err;
  EXPECT_FALSE(absl::StrContains(job.err, "attempt 4\n")) << job.err;
}

TEST(LocalTest, WrongOptionsAreNotRepeated) {
  Job job(2, {"exit", "2"}, {{"TEST_MAX_RESTARTS", "3"}});
  job.Finish();
  EXPECT_EQ(job.exit_code(), 2);
  EXPECT_TRUE(absl::StrContains(job.err, "not restarted")) << job.err;
  EXPECT_FALSE(absl::StrContains(job.err, "restart 1 of 3")) << job.err;
}

TEST(LocalTest, EachRanksOutputIsInFiles) {
  const std::string folder = absl::StrCat(testing::TempDir(), "/rank_logs");
  for (const char* redirects : {"", "3"}) {
    Job job(2, {"print"},
            {{"OMP_NUM_THREADS", "7"},
             {"TEST_LOG_DIR", absl::StrCat(folder, redirects)},
             {"TEST_REDIRECTS", redirects}});
    job.Finish();
    EXPECT_EQ(job.exit_code(), 0) << job.err;
    for (const int rank : {0, 1}) {
      const std::string of_rank = absl::StrCat(folder, redirects, "/attempt_0/", rank);
      EXPECT_EQ(ReadFile(of_rank + "/stdout.log").value_or("none"),
                absl::StrCat("out ", rank, "/2 threads 7\nno newline"));
      EXPECT_EQ(ReadFile(of_rank + "/stderr.log").value_or("none"),
                absl::StrCat("err ", rank, "\n"));
    }
    EXPECT_EQ(absl::StrContains(job.out, "[rank 1] out 1/2"), redirects[0] == '\0') << job.out;
    EXPECT_EQ(absl::StrContains(job.out, "out 0/2"), redirects[0] == '\0') << job.out;
  }
}

TEST(LocalTest, TheTerminalMayHaveTheOutputOfSomeRanks) {
  Job job(3, {"print"}, {{"TEST_FILTER", "0,2"}});
  job.Finish();
  EXPECT_EQ(job.exit_code(), 0) << job.err;
  EXPECT_TRUE(absl::StrContains(job.out, "out 0/3")) << job.out;
  EXPECT_TRUE(absl::StrContains(job.out, "[rank 2] out 2/3")) << job.out;
  EXPECT_FALSE(absl::StrContains(job.out + job.err, "[rank 1]")) << job.out << job.err;
}

// As Kubernetes' TrainJob sets them, for two machines that are this one.
TEST(LocalTest, SeveralNodesMeetAtTheFirst) {
  const auto variables = [](int node, int port) -> std::map<std::string, std::string> {
    return {{"PET_NNODES", "2"},
            {"PET_NPROC_PER_NODE", "2"},
            {"PET_NODE_RANK", absl::StrCat(node)},
            {"PET_MASTER_ADDR", "127.0.0.1"},
            {"PET_MASTER_PORT", absl::StrCat(port)}};
  };
  const int port = ListenOnLoopback().port;  // free again when this line ends
  Job second(0, {"meet"}, variables(1, port)), first(0, {"meet"}, variables(0, port));
  first.Finish();
  second.Finish();
  EXPECT_EQ(first.exit_code(), 0) << first.err;
  EXPECT_EQ(second.exit_code(), 0) << second.err;
  const std::string run = absl::StrCat(" run local-127.0.0.1-", port);
  EXPECT_EQ(SortedLines(first.out),
            (std::vector<std::string>{"[rank 1] rank 1/4 local 1/2 node 0" + run,
                                      "rank 0/4 local 0/2 node 0" + run}));
  EXPECT_EQ(SortedLines(second.out),
            (std::vector<std::string>{"[rank 2] rank 2/4 local 0/2 node 1" + run,
                                      "[rank 3] rank 3/4 local 1/2 node 1" + run}));
}

TEST(LocalTest, ANumberOfNodesThatIsGivenCountsForMoreThanTheVariable) {
  std::unique_ptr<Launcher> launcher = *CreateLauncher("local");
  setenv("PET_NNODES", "2", 1);
  const LaunchOptions unset = {.argv = {"/bin/true"}}, one = {.nnodes = 1, .argv = {"/bin/true"}};
  const absl::Status refused = launcher->Launch(unset).status();
  const bool is_alone = launcher->RunsInProcess(unset), is_one_alone = launcher->RunsInProcess(one);
  const absl::StatusOr<LaunchResult> result = launcher->Launch(one);
  unsetenv("PET_NNODES");
  EXPECT_TRUE(absl::StrContains(refused.message(), "nnodes=2")) << refused;
  EXPECT_FALSE(is_alone);
  EXPECT_TRUE(is_one_alone);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->exit_code, 0);
}

// A name may resolve to an address of IPv6 alone.
TEST(LocalTest, TheFirstNodeListensOnIPv4AndIPv6) {
  constexpr char kLoopback[] = "00000000000000000000000000000001";
  if (!absl::StrContains(ReadFile("/proc/net/if_inet6").value_or(""), kLoopback)) {
    GTEST_SKIP() << "this machine has no IPv6";
  }
  for (const std::string address : {"::1", "127.0.0.1"}) {
    const std::string port = absl::StrCat(ListenOnLoopback().port);
    Job first(1, {"connect", address},
              {{"PET_NNODES", "2"},
               {"PET_NODE_RANK", "0"},
               {"PET_MASTER_ADDR", "localhost"},
               {"PET_MASTER_PORT", port}});
    first.Finish();
    EXPECT_EQ(first.exit_code(), 0) << address << first.err;
  }
}

// As a requeued batch script of SLURM would start it.
TEST(LocalTest, RestartsCountOnFromTheRequeuesOfTheJob) {
  Job job(2, {"fail_until", "0"}, {{"SLURM_JOB_ID", "7"}, {"SLURM_RESTART_COUNT", "3"}});
  job.Finish();
  EXPECT_TRUE(absl::StrContains(job.err, "restart 3 of 1")) << job.err;
}

TEST(LocalTest, ACountOfRequeuesThatIsNoneIsNamed) {
  setenv("SLURM_JOB_ID", "7", 1);
  setenv("SLURM_RESTART_COUNT", "x", 1);
  const absl::Status status = (*CreateLauncher("local"))->Launch({.argv = {"/bin/true"}}).status();
  unsetenv("SLURM_RESTART_COUNT");
  unsetenv("SLURM_JOB_ID");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(status.message(), "SLURM_RESTART_COUNT='x'")) << status;
}

TEST(LocalTest, VariablesThatMakeNoSenseAreNamed) {
  for (const auto& [name, value] : {std::pair("PET_NNODES", "1:4"), std::pair("PET_NNODES", "x"),
                                    std::pair("PET_NPROC_PER_NODE", "many"),
                                    std::pair("PET_NPROC_PER_NODE", "gpu")}) {  // here is none
    setenv(name, value, 1);
    const absl::Status status =
        (*CreateLauncher("local"))->Launch({.argv = {"/bin/true"}}).status();
    unsetenv(name);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(absl::StrContains(status.message(), absl::StrCat(name, "=", value))) << status;
  }
}

TEST(LocalTest, ProgramIsFoundInPath) {
  EXPECT_EQ((*CreateLauncher("local"))->Launch({.argv = {"true"}})->exit_code, 0);
  EXPECT_EQ((*CreateLauncher("local"))->Launch({.argv = {"false"}})->exit_code, 1);
}

}  // namespace
}  // namespace ddp::launchers
