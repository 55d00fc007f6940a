// What each program needs before main(): ddp_cc_binary links it, and so does what starts ranks or
// is one (//ddp/session, //launchers/local). It has no interface.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

namespace ddp {
namespace {

// Opens those of descriptors 0, 1 and 2 that are closed (`program 2>&-`). The next file that is
// opened would get the number, and what is printed would be written into it.
void OpenStandardStreams() {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (fcntl(fd, F_GETFD) >= 0) continue;
    // The lowest closed descriptor is taken, which is `fd`. Without /dev (chroot) a folder takes
    // the number, and reads and writes fail as those of a closed descriptor do.
    if (open("/dev/null", O_RDWR) < 0) open("/", O_RDONLY | O_DIRECTORY);
  }
}

void End(int signal) { _exit(128 + signal); }

// Whether the kernel ends a process with this signal by default, and at nobody's request but a
// user's. Not: SIGPIPE, since a process that ignores it gets an error instead; and signals of
// faults, which end process 1, too.
bool EndsByDefault(int signal) {
  switch (signal) {
    case SIGHUP:
    case SIGINT:
    case SIGQUIT:
    case SIGABRT:
    case SIGALRM:
    case SIGTERM:
    case SIGUSR1:
    case SIGUSR2:
    case SIGVTALRM:
    case SIGPROF:
    case SIGXCPU:
    case SIGIO:
    case SIGPWR:
    case SIGSTKFLT:
      return true;
    default:
      return signal >= SIGRTMIN && signal <= SIGRTMAX;
  }
}

// The kernel does not apply the default action of these signals to process 1 of a container:
// without a handler, `docker stop` kills it only after a timeout. Handlers that the program
// installs later replace these.
void EndBySignalsAsProcess1() {
  if (getpid() != 1) return;
  for (int signal = 1; signal < NSIG; ++signal) {
    struct sigaction action;
    if (!EndsByDefault(signal) || sigaction(signal, nullptr, &action) != 0) continue;
    if (action.sa_handler != SIG_DFL) continue;  // ignored by the wish of whoever started us
    action = {};
    action.sa_handler = End;
    sigaction(signal, &action, nullptr);
  }
}

// A write beyond the limit on the size of files (`ulimit -f`) is an error then, as on a full disk,
// and does not end the process without a word. Python ignores this signal too.
void IgnoreTooLargeFiles() {
  struct sigaction action;
  if (sigaction(SIGXFSZ, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) return;
  action = {};
  action.sa_handler = SIG_IGN;
  sigaction(SIGXFSZ, &action, nullptr);
}

// Early among the initialisers of the program. Those of shared libraries come first; LibTorch's
// leave no file open.
[[gnu::constructor(101)]] void Start() {
  OpenStandardStreams();
  EndBySignalsAsProcess1();
  IgnoreTooLargeFiles();
}

}  // namespace
}  // namespace ddp
