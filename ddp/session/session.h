// From main() to a rank: starts the ranks or joins them, whichever this process is for.
//
//   int main(int argc, char** argv) {
//     return ddp::session::Run({.launcher = {.default_nproc_per_node = 2}}, argc, argv,
//                              [](const ddp::session::Session& session) -> absl::Status {
//                                auto model = ddp::Wrap(net, session.process_group());
//                                …
//                              });
//   }
//
// The same program then runs alone, under torchrun, srun and mpirun. Which launchers and backends
// there are is up to the targets it links (//launchers:all, //backends:all).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "backends/process_group.h"
#include "base/coordinator.h"
#include "c10/core/Device.h"
#include "ddp/session/options.h"
#include "ddp/session/store_coordinator.h"
#include "launchers/rank.h"

namespace ddp::session {

// One rank of a running job. Thread-compatible. Its Coordinator calls wait for
// options.work_timeout; rank 0 prints an error that Agree returns, once for all.
class Session final : public Coordinator {
 public:
  Session(launchers::Rank rank, backends::Group group, c10::Device device,
          const SessionOptions& options = {});

  int rank() const override { return place_.rank; }
  int size() const override { return place_.world_size; }
  bool is_main() const { return place_.rank == 0; }

  // This process's place in the job: local rank, node, restart count.
  const launchers::Rank& place() const { return place_; }

  c10::Device device() const { return device_; }

  // Null in a world of one.
  const c10::intrusive_ptr<c10d::ProcessGroup>& process_group() const {
    return group_.process_group;
  }
  // The ranks' rendezvous store, for keys of one's own (prefix them); null in a world of one.
  const c10::intrusive_ptr<c10d::Store>& store() const { return group_.store; }

  // Collective, see Coordinator. Nothing of torch's process group is used, so they work after it
  // has failed.
  absl::Status Agree(const absl::Status& mine) const override;
  absl::StatusOr<std::string> Broadcast(const absl::StatusOr<std::string>& value) const override;
  absl::StatusOr<std::vector<std::string>> AllGather(const std::string& mine) const override;

 private:
  const launchers::Rank place_;
  const backends::Group group_;
  const c10::Device device_;
  const StoreCoordinator ranks_;
};

// Checks what the role of this process needs, in the order of need. Run calls it.
// A process that only starts ranks elsewhere, or submits them, needs neither device nor backend.
// OptionError, NotFound or FailedPrecondition.
absl::Status ValidateAsLauncher(const SessionOptions& options);
// A rank needs both; `local_rank` decides which GPU.
absl::Status ValidateAsRank(const SessionOptions& options, int local_rank = 0);

// What Run does with an error's text: programs with flags show options as the user wrote them
// (OptionFlags::Explain). Null: the status's own message.
using Explain = std::function<std::string(const absl::Status& status)>;

// Runs `body` in every rank and returns the exit code for main(): 0, or not 0 with one message on
// standard error; 2 for options that cannot be. In a process that is no rank this starts the ranks,
// waits for them and reports the first failure; in a rank it joins the others, calls `body`, and
// prints what it returned or threw. Local ranks default to one per GPU if options.device says so,
// otherwise to options.launcher.default_nproc_per_node.
int Run(const SessionOptions& options, int argc, char** argv,
        const std::function<absl::Status(const Session&)>& body, const Explain& explain = nullptr);

}  // namespace ddp::session
