// Waits for the running ranks of a job, forwards their output, and ends all if one fails.
//
//   Supervisor supervisor(std::move(group), std::move(signals), {.grace = absl::Seconds(3)});
//   supervisor.Add({.rank = 0, .pid = pid});
//   LaunchResult result = supervisor.Run();
#pragma once

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/process.h"
#include "base/signal_pipe.h"
#include "base/unique_fd.h"
#include "launchers/launcher.h"
#include "launchers/local/lines.h"

namespace ddp::launchers {

// Output of a rank that the supervisor forwards. Without a pipe the rank writes by itself, to our
// stdout or stderr or wherever it is to.
struct RankOutput {
  UniqueFd pipe;  // the reading end; goes to our stdout or stderr
  UniqueFd file;  // if it is set, gets the same, as the rank has written it
};

struct RankProcess {
  int rank = 0;
  pid_t pid = 0;
  std::string prefix;  // of each line that is forwarded: "[rank N] "
  RankOutput out;
  RankOutput err;
};

// Times between a signal to the ranks and SIGKILL.
struct Patience {
  absl::Duration grace = absl::Seconds(3);
  // Ranks that handle a signal to the launcher have this long after it: they may save.
  absl::Duration stop_timeout = absl::ZeroDuration();
};

// Single-threaded: one poll loop. Thread-compatible.
class Supervisor {
 public:
  Supervisor(PosixProcessGroup group, SignalPipe signals, Patience patience);
  // Kills and reaps remaining ranks; after Run there are none.
  ~Supervisor();

  void Add(RankProcess process);

  // Whether nothing speaks against further ranks: none has failed, and no signal has come. Where
  // one does, Run ends those that there are.
  bool MayAdd();

  // Returns when all ranks have ended and been reaped and their output has been forwarded. The
  // first rank that fails ends the others. A signal to this process is passed on to the ranks,
  // SIGHUP as SIGTERM; if all of them then exit with 0 or with 128 + a signal that asks for a stop,
  // they have ended as they were asked to, and the result has no description. A further signal, a
  // second or more after the first, kills the ranks; so does the first one, a second or more after
  // a failure. After any signal failed_rank is -1, also where a rank has failed.
  LaunchResult Run();

 private:
  using Clock = std::chrono::steady_clock;

  struct Child {
    int rank;
    pid_t pid;
    bool running = true;
    int status = 0;  // waitpid's
  };
  enum class Phase {
    kRunning,
    kStopping,  // the ranks have been asked to end, and may save
    kEnding,    // without each other they cannot
  };
  struct Stream {
    UniqueFd fd;
    UniqueFd file;
    LineSink* sink;
    LinePrefixer lines;

    void Add(absl::string_view text);
  };

  void AddStream(const std::string& prefix, RankOutput output, LineSink* sink);
  void Wait();
  void HandleSignals();
  void Reap();
  void Stop(int signal);
  void NoteStop(int signal, absl::Duration patience);
  void NoteFailure(const Child& child);
  void EndRanks();
  void KillIfOverdue();
  void Kill(const std::string& why);
  std::vector<int> Running() const;
  void SignalAll(int signal);
  // Reads once; returns false at the end of the stream.
  bool ReadSome(Stream& stream);
  // Reads what is left in the streams without waiting for end of file, which a process that has
  // left the group could delay indefinitely.
  void Drain();
  bool AnyRunning() const;
  int PollTimeout() const;

  PosixProcessGroup group_;
  SignalPipe signals_;
  Patience patience_;
  std::vector<Child> children_;
  LineSink stdout_;
  LineSink stderr_;
  std::vector<Stream> streams_;
  LaunchResult result_;
  bool output_abandoned_ = false;
  Phase phase_ = Phase::kRunning;
  Clock::time_point deadline_;  // for SIGKILL, unless they run
  // Once they stop or end:
  Clock::time_point stopped_at_;
  int sent_ = 0;             // the signal that asks the ranks to; 0: not sent by us
  bool is_patient_ = false;  // deadline_ is that of ranks which handle it
  bool killed_ = false;
};

}  // namespace ddp::launchers
