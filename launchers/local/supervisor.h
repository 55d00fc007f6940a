// Waits for the running ranks of a job, forwards their output, and ends all if one fails.
//
//   Supervisor supervisor(std::move(group), std::move(signals), grace);
//   supervisor.Add({.rank = 0, .pid = pid});
//   LaunchResult result = supervisor.Run();
#pragma once

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/process.h"
#include "base/signal_pipe.h"
#include "base/unique_fd.h"
#include "launchers/launcher.h"
#include "launchers/local/lines.h"

namespace ddp::launchers {

struct RankProcess {
  int rank = 0;
  pid_t pid = 0;
  // Reading ends of its output, forwarded to our stdout and stderr with "[rank N] " before each
  // line. If they are unset, the process has our stdout and stderr itself.
  UniqueFd stdout_pipe;
  UniqueFd stderr_pipe;
};

// Single-threaded: one poll loop. Thread-compatible.
class Supervisor {
 public:
  // `grace` is the time between SIGTERM and SIGKILL.
  Supervisor(PosixProcessGroup group, SignalPipe signals, absl::Duration grace);
  // Kills and reaps remaining ranks; after Run there are none.
  ~Supervisor();

  void Add(RankProcess process);

  // Returns when all ranks have ended and been reaped and their output has been forwarded. The
  // first rank that fails, or a SIGINT, SIGTERM or SIGHUP to this process, ends the others.
  LaunchResult Run();

 private:
  using Clock = std::chrono::steady_clock;

  struct Child {
    int rank;
    pid_t pid;
    bool running = true;
  };
  struct Stream {
    UniqueFd fd;
    LineSink* sink;
    LinePrefixer lines;
  };

  void AddStream(int rank, UniqueFd fd, LineSink* sink);
  void Wait();
  void HandleSignals();
  void Reap();
  void NoteFailure(const Child& child, int status);
  void StartEnding();
  void KillIfOverdue();
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
  absl::Duration grace_;
  std::vector<Child> children_;
  LineSink stdout_;
  LineSink stderr_;
  std::vector<Stream> streams_;
  LaunchResult result_;
  bool output_abandoned_ = false;
  std::optional<Clock::time_point> deadline_;  // set: ending; SIGKILL at that time
  bool killed_ = false;
};

}  // namespace ddp::launchers
