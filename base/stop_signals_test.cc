#include "base/stop_signals.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "base/exit_code.h"
#include "gtest/gtest.h"

namespace ddp {
namespace {

// waitpid's status of a process that does this.
int StatusOf(const std::function<int()>& body) {
  const pid_t pid = fork();
  if (pid == 0) _exit(body());
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return status;
}

int KilledBy(const std::function<int()>& body) {
  const int status = StatusOf(body);
  return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

int ExitCode(const std::function<int()>& body) {
  const int status = StatusOf(body);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(StopSignalsTest, TheFirstSignalIsNoted) {
  EXPECT_EQ(ExitCode([] {
              const StopSignals signals({SIGTERM, SIGINT});
              if (signals.received() != 0) return 1;
              raise(SIGINT);
              raise(SIGTERM);
              return signals.received() == SIGINT ? 0 : 2;
            }),
            0);
}

TEST(StopSignalsTest, AFurtherSignalEndsTheProcessAfterASecond) {
  EXPECT_EQ(KilledBy([] {
              const StopSignals signals({SIGTERM, SIGINT});
              raise(SIGINT);
              usleep(900'000);
              raise(SIGTERM);  // perhaps the same stop by another way
              usleep(200'000);
              raise(SIGTERM);
              return 0;
            }),
            SIGTERM);
}

TEST(StopSignalsTest, OthersAndThoseBeforeAndAfterKeepTheirEffect) {
  EXPECT_EQ(KilledBy([] {
              const StopSignals signals({SIGTERM});
              raise(SIGUSR1);
              return 0;
            }),
            SIGUSR1);
  EXPECT_EQ(KilledBy([] {
              { const StopSignals signals({SIGTERM}); }
              raise(SIGTERM);
              return 0;
            }),
            SIGTERM);
  for (const int twice : {SIGTERM, SIGHUP}) {
    EXPECT_EQ(KilledBy([twice] {
                { const StopSignals signals({SIGTERM, twice}); }
                raise(twice);
                return 0;
              }),
              twice);
  }
  EXPECT_EQ(ExitCode([] {
              signal(SIGINT, SIG_IGN);
              const StopSignals signals({SIGINT});
              raise(SIGINT);
              return signals.received();
            }),
            0);
}

// As the terminal that is closed, and `tee` that Ctrl-C ends.
TEST(StopSignalsTest, WhoLosesItsTerminalMaySave) {
  EXPECT_EQ(ExitCode([] {
              const StopSignals signals({SIGTERM, SIGINT});
              raise(SIGPIPE);
              if (signals.received() != 0) return 1;
              raise(SIGHUP);
              return signals.received();
            }),
            SIGTERM);
  EXPECT_EQ(ExitCode([] {
              signal(SIGHUP, SIG_IGN);
              const StopSignals signals({SIGTERM});
              raise(SIGHUP);
              return signals.received();
            }),
            0);
  EXPECT_EQ(KilledBy([] {
              { const StopSignals signals({SIGTERM}); }
              raise(SIGPIPE);
              return 0;
            }),
            SIGPIPE);
}

// All objects share them, as the ranks of a test that are threads.
TEST(StopSignalsTest, ObjectsAreCounted) {
  EXPECT_EQ(ExitCode([] {
              const StopSignals signals({SIGTERM});
              { const StopSignals others({SIGTERM}); }
              raise(SIGTERM);
              const StopSignals more({SIGTERM});
              return more.received() == SIGTERM ? 0 : 1;
            }),
            0);
}

TEST(StopSignalsTest, WhileTheProcessEndsSignalsDoNothing) {
  EXPECT_EQ(ExitCode([] {
              {
                const StopSignals signals({SIGTERM});
                raise(SIGTERM);
                usleep(1'100'000);
              }
              raise(SIGTERM);
              const StopSignals signals({SIGTERM});
              return signals.received();  // of a new run
            }),
            0);
  EXPECT_EQ(KilledBy([] {
              {
                const StopSignals signals({SIGTERM});
                raise(SIGTERM);
              }
              usleep(2'100'000);
              raise(SIGTERM);
              return 0;
            }),
            SIGTERM);
  // The handlers of before are those of before the first.
  EXPECT_EQ(KilledBy([] {
              {
                const StopSignals signals({SIGTERM});
                raise(SIGTERM);
              }
              { const StopSignals signals({SIGTERM}); }
              raise(SIGTERM);
              return 0;
            }),
            SIGTERM);
}

TEST(StopSignalsTest, EndAtOnceWaitsForNoStep) {
  EXPECT_EQ(KilledBy([] {
              const StopSignals signals({SIGTERM});
              EndAtOnce(getpid());
              return 0;
            }),
            SIGTERM);
}

TEST(StopSignalsTest, Names) {
  for (const char* name : {"TERM", "INT", "USR1", "USR2"}) {
    EXPECT_EQ(StopSignalName(StopSignalOf(name).value()), name);
  }
  EXPECT_EQ(StopSignalOf("KILL"), std::nullopt);
  EXPECT_EQ(StopSignalOf("SIGTERM"), std::nullopt);
  EXPECT_EQ(StopSignalName(SIGHUP), "1");
}

TEST(ExitCodeTest, IsThatOfTheStatus) {
  EXPECT_EQ(ExitCodeIn(absl::OkStatus()), std::nullopt);
  EXPECT_EQ(ExitCodeIn(absl::AbortedError("a")), std::nullopt);
  const absl::Status error = WithExitCode(absl::AbortedError("a"), 70);
  EXPECT_EQ(ExitCodeIn(error), 70);
  EXPECT_FALSE(HasEndedBySignal(error));
  EXPECT_EQ(ExitCodeIn(EndedBy(SIGUSR1)), 138);
  EXPECT_TRUE(HasEndedBySignal(EndedBy(SIGUSR1)));
}

}  // namespace
}  // namespace ddp
