// Entry point of a distributed program: Run starts the ranks, or, in a rank, joins the process
// group.
//
//   int main(int argc, char** argv) {
//     return ddp::session::Run({.launcher = {.default_nproc_per_node = 2}}, argc, argv,
//                              [](const ddp::session::Session& session) -> absl::Status {
//                                DDP_ASSIGN_OR_RETURN(
//                                    auto model, ddp::Wrap(net, session.process_group()));
//                                …
//                                return absl::OkStatus();
//                              });
//   }
//
// The program runs as a single process and under torchrun, srun and mpirun. It supports the
// launchers and backends that it links (//launchers:all, //backends:all).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "backends/process_group.h"
#include "base/coordinator.h"
#include "c10/core/Device.h"
#include "ddp/session/options.h"
#include "ddp/session/store_coordinator.h"
#include "launchers/rank.h"

namespace ddp::session {

// Converts an error to the text that Run prints. Programs with flags use OptionFlags::Explain, to
// show options as the user wrote them. Null: the status's message.
using Explain = std::function<std::string(const absl::Status& status)>;

// One rank of a running job. Thread-compatible. Coordinator calls time out after
// options.work_timeout. If a rank's process ends while others wait for it, they return an error
// within seconds; not without options.group.watch, after this rank has aborted the group, or if the
// whole host of that rank is down. If one of them returns an error of a rank, rank 0 has printed
// it.
class Session final : public Coordinator {
 public:
  Session(launchers::Rank rank, backends::Group group, c10::Device device,
          const SessionOptions& options = {}, const Explain& explain = nullptr);

  int rank() const override { return place_.rank; }
  int size() const override { return place_.world_size; }
  bool is_main() const { return place_.rank == 0; }

  // This process's place in the job: local rank, node, restart count.
  const launchers::Rank& place() const { return place_; }

  c10::Device device() const { return device_; }
  // The wait after which something is reported as stalled (options.group.stall); zero: never.
  absl::Duration stall() const { return stall_; }

  // How long ranks wait for one that works alone (options.work_timeout).
  absl::Duration work_timeout() const { return work_timeout_; }

  // Null with a world size of 1.
  const c10::intrusive_ptr<c10d::ProcessGroup>& process_group() const {
    return group_.process_group;
  }
  // The rendezvous store, also for keys of your own (prefix them); null with a world size of 1.
  const c10::intrusive_ptr<c10d::Store>& store() const { return group_.store; }

  // Collective; see Coordinator. They use the store and not the process group, so they work after
  // the process group has failed.
  absl::Status Agree(const absl::Status& mine) const override;
  absl::StatusOr<std::string> Broadcast(const absl::StatusOr<std::string>& value) const override;
  absl::StatusOr<std::vector<std::string>> AllGather(const std::string& mine) const override;
  absl::StatusOr<std::vector<std::string>> Gather(const std::string& mine) const override;

  // A coordinator of the same ranks for another thread, which may use it while this one uses the
  // session: it has rounds and a connection to the store of its own. All ranks call this equally
  // often; it waits for nobody. A wait there ends for dead ranks as one here does, and if
  // `gives_up`, which that thread asks again and again, returns true; null: it never does. No
  // errors are printed, and no waits reported. Unavailable if the store is lost.
  absl::StatusOr<std::unique_ptr<Coordinator>> ForThread(
      std::function<bool()> gives_up = nullptr) const;

  // Agree(OK) of a rank that communicates no more. Run calls it once `body` has returned OK.
  absl::Status AgreeAtEnd() const;

  // Tells the other ranks that this one has failed with `mine`, whatever they are doing. Run calls
  // it with the error of `body`; call it only to go on after a failure. Returns, on every rank, the
  // error of the lowest rank with a failure of its own; rank 0 has printed it. Returns within
  // seconds after every rank has reached a collective, a Coordinator call or the end of `body`; a
  // rank that reaches none within 10 s is not waited for. The process group is unusable afterwards.
  //
  // `mine` must be marked by CatchCollective (ddp/collective_status.h) if a collective failed: if
  // then no rank has failed by itself (a rank has died, the network is down), returns `mine` within
  // seconds, without waiting for dead ranks. Returns `mine` unchanged if it is OK or a Coordinator
  // call's error, which all ranks know already, and with a world size of 1. If the collective
  // failed because ranks wait for each other (backends/watch/training_thread.h), it returns on
  // every rank the error of the lowest of those.
  absl::Status ShareFailure(const absl::Status& mine) const;

  // Work of `body`, as trainer::Train, has stopped at this signal's request, on all ranks: if
  // `body` returns OK, Run takes it for EndedBy(signal), and rank 0 prints that.
  void NoteStop(int signal) const { stopped_by_ = signal; }
  int stopped_by() const { return stopped_by_; }  // 0: nothing was stopped

 private:
  const launchers::Rank place_;
  const backends::Group group_;
  const c10::Device device_;
  const absl::Duration work_timeout_;
  const absl::Duration stall_;
  const StoreCoordinator ranks_;
  mutable int64_t threads_ = 0;  // calls of ForThread
  mutable int stopped_by_ = 0;
};

// Checks by role; Run calls them. ValidateAsLauncher checks the ranges of options: a process that
// starts ranks on other machines needs neither device nor backend. OptionError.
absl::Status ValidateAsLauncher(const SessionOptions& options);
// Also checks that this machine has the backend and the device; rank `local_rank` needs the GPU of
// that index. OptionError, NotFound or FailedPrecondition.
absl::Status ValidateAsRank(const SessionOptions& options, int local_rank = 0);

// Runs `body` in every rank and returns the exit code for main(): 0 for success; 2 for invalid
// options or variables of a launcher; otherwise another non-zero code, with one message on standard
// error: 1, or the one that the error of `body` asks for (base/exit_code.h). A body that has
// stopped at a signal's request returns EndedBy(signal), on all ranks: then the code is 128 + that
// signal, nothing is printed, and no launcher of ours starts the ranks again; so it is if
// trainer::Train was stopped in a body that returns OK (Session::NoteStop). In a process that is
// not a rank, starts the ranks, waits for them and returns the exit code of the first that failed.
// In a rank, joins the process group, calls `body`, and shares the error that it returns or throws
// with the other ranks (Session::ShareFailure): the job ends with one message. Ranks that were
// started with different options (options.program_options) end with one message before `body`.
// After a call of Run, SIGPIPE does not end the process any more (IgnoreBrokenPipes).
//
// For ranks on this machine nproc_per_node defaults to its number of GPUs, if options.device is not
// "cpu" and there are any; otherwise, and for ranks on other machines, to what the launcher's
// options imply or to options.launcher.default_nproc_per_node. Blocks.
int Run(const SessionOptions& options, int argc, char** argv,
        const std::function<absl::Status(const Session&)>& body, const Explain& explain = nullptr);

}  // namespace ddp::session
