// From main() to a rank: starts the ranks or joins them, whichever this process is for.
//
//   int main(int argc, char** argv) {
//     return ddp::trainer::Run({.nproc_per_node = 2}, argc, argv,
//                              [](const ddp::trainer::Session& session) -> absl::Status {
//                                … session.group.process_group, session.device …
//                              });
//   }
//
// The same program then runs alone, under torchrun, srun and mpirun. Which launchers and backends
// there are is up to the targets it links (//launchers:all, //backends:all).
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "backends/process_group.h"
#include "c10/core/Device.h"
#include "launchers/rank.h"

namespace ddp::trainer {

struct SessionOptions {
  std::string launcher = "auto";
  // Unset: what the environment says, or default_nproc_per_node.
  std::optional<int> nproc_per_node = std::nullopt;
  int default_nproc_per_node = 1;  // ranks that the local launcher starts if nothing says
  std::string backend = "auto";
  std::string device = "cpu";                       // cpu, cuda, or auto: cuda where there is one
  absl::Duration timeout = absl::Minutes(5);        // of one collective
  absl::Duration join_timeout = absl::Seconds(60);  // of the ranks finding each other
  std::string hostname = "";
  std::string interface = "";  // network of the gloo backend; see its header
  backends::ShmOptions shm = {};
  backends::NcclOptions nccl = {};
  absl::Duration stall =
      absl::Seconds(30);  // until a collective under way is reported; zero: never
};

// One rank of a running job. Thread-compatible.
class Session {
 public:
  Session(launchers::Rank rank, backends::Group group, c10::Device device)
      : rank(std::move(rank)), group(std::move(group)), device(device) {}

  const launchers::Rank rank;
  const backends::Group group;  // null members in a world of one
  const c10::Device device;

  bool is_main() const { return rank.rank == 0; }

  // Collective. Brings what may have failed on some ranks only to all of them, so that none waits
  // in vain: OK if every rank's `mine` is; otherwise the lowest failing rank's error, on every
  // rank. It has then been printed, once, by rank 0.
  absl::Status Agree(const absl::Status& mine) const;

  // Collective. Rank 0's value on every rank; what rank 0 failed with, as Agree gives it.
  absl::StatusOr<std::string> FromMain(const absl::StatusOr<std::string>& value) const;

 private:
  mutable int64_t exchanges_ = 0;  // keys of one exchange are never used again
};

// InvalidArgument, NotFound or FailedPrecondition, naming option and value, for what can be told
// before there are ranks: launcher, backend, device, timeouts. Run checks it first.
absl::Status Validate(const SessionOptions& options);

// Ranks per machine where nothing says: one per GPU if `device` is cuda (or auto, and there are
// GPUs), otherwise `on_cpu`.
int DefaultNprocPerNode(const std::string& device, int on_cpu);

// Runs `body` in every rank and returns the exit code for main(): 0, or not 0 with one message on
// standard error. In the process the user started this starts the ranks (launcher `local`), waits
// for them and reports the first failure; in a rank it joins the others, calls `body`, and prints
// what it returned or threw.
int Run(const SessionOptions& options, int argc, char** argv,
        const std::function<absl::Status(const Session&)>& body);

}  // namespace ddp::trainer
