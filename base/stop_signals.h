// Signals by which a user or a scheduler asks a program to stop when it can: the handler notes that
// one has come, and the program looks between two steps.
//
//   const StopSignals signals({SIGTERM, SIGINT});
//   do {
//     TakeStep();
//   } while (signals.received() == 0);
//   Save();
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace ddp {

// While one exists, its signals do nothing but that `received` returns the first of them. A signal
// that comes a second or more after the first, any of them, ends the process at once, as it would
// without a handler; one that comes sooner is taken for the first, which a launcher and a terminal
// may both deliver. Signals that are ignored (nohup) stay so.
//
// With SIGTERM among them SIGHUP, of a terminal that is closed, counts as SIGTERM. SIGPIPE does
// nothing: at Ctrl-C, `tee` ends before the program behind which it stands has saved.
//
// Handlers belong to the process, so all objects share them and what they have received: the first
// begins, with its signals, and the last ends. Then the handlers of before are restored; not after
// a signal, since the process is about to end: what comes within two more seconds, as from a
// launcher that sees another rank end first, is ignored, and later signals end the process.
// Thread-safe.
class StopSignals {
 public:
  explicit StopSignals(const std::vector<int>& signals);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // The first signal that has come; 0: none.
  int received() const;
};

// From now on a write to a pipe without a reader is an error, which does not end the process, as if
// SIGPIPE were ignored; but processes that this one starts have its default action. Where SIGPIPE
// is ignored or has a handler already, it stays so. Thread-safe.
void IgnoreBrokenPipes();

// SIGTERM has the name "TERM", and so do INT, USR1 and USR2; nullopt for other names.
std::optional<int> StopSignalOf(absl::string_view name);
// The inverse; for other signals their number.
std::string StopSignalName(int signal);

// Sends SIGTERM to a process that need not finish its step: StopSignals do not hold it up.
// Launchers use it when their job has failed, so that the ranks could not save together. Other
// processes get a SIGTERM like any other.
void EndAtOnce(int pid);

}  // namespace ddp
