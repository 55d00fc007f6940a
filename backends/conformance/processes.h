// Child processes that tests kill at any moment, and checks for leaked resources.
//
//   Processes ranks(3, [](int rank, Child& child) { child.Tell("ready"); return 0; });
//   while (std::optional<Event> event = ranks.Next(deadline)) …
//   ranks.Kill(1);
//   absl::Status ended = ranks.Wait(deadline);
//
// They are forked from a process that has loaded LibTorch and started no thread: this takes a few
// milliseconds per process instead of half a second for a new program. Does not use torch.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace ddp::backends::conformance {

// A message of a child. Smaller than PIPE_BUF, so that writes of several children do not
// interleave.
struct Event {
  static constexpr int kTextBytes = 3000;

  int rank = 0;
  int64_t at_ns = 0;  // CLOCK_MONOTONIC
  char kind[32] = "";
  char text[kTextBytes] = "";
};

int64_t MonotonicNanoseconds();

// A child's ends of the pipes between it and its parent.
class Child {
 public:
  Child(int rank, int events, int commands) : rank_(rank), events_(events), commands_(commands) {}

  void Tell(const std::string& kind, const std::string& text = "");
  // Blocks until the parent sends something.
  int Command();

 private:
  const int rank_;
  const int events_;
  const int commands_;
};

// Not thread safe. A child dies with its parent.
class Processes {
 public:
  using Body = std::function<int(int rank, Child& child)>;

  // Forks; each child runs `body` and exits with what it returns, without running destructors of
  // static objects. This process must have no other threads.
  Processes(int count, const Body& body);
  // Kills and reaps what is left.
  ~Processes();
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  // The next event of any child; nullopt at the deadline, or when all children have ended.
  std::optional<Event> Next(int64_t deadline_ns);
  void Command(int rank, int command);
  // SIGKILL; reaps.
  void Kill(int rank);
  // Waits for all that were not killed, and reaps them. DeadlineExceeded names those still running,
  // Internal those that exited with other than 0.
  absl::Status Wait(int64_t deadline_ns);
  // "", or how a child ended that was not killed from here: "exit status 1", "signal 11". Reaps.
  std::string HowItEnded(int rank);

 private:
  bool Reaped(int rank);

  std::vector<pid_t> pids_;  // -1: reaped
  std::vector<int> exit_status_;
  std::vector<int> commands_;
  int events_ = -1;
};

// Names of /dev/shm.
std::set<std::string> SharedMemoryNames();

// Names that are not in `before` and that no process has mapped: leaked by a dead process.
std::vector<std::string> LeftBehind(const std::set<std::string>& before);

// Makes orphaned grandchildren children of this process.
void AdoptOrphans();
// Whether this process has children, of its own or adopted, that have not been reaped.
bool HasChildren();

// Open file descriptors of this process: "socket:[123]", "anon_inode:[eventpoll]" and the like.
std::multiset<std::string> Descriptors();

}  // namespace ddp::backends::conformance
