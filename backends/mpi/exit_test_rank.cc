// One rank of exit_test.sh: ends in the way that its argument says, while rank 0 waits for it.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "backends/mpi/collectives.h"
#include "backends/mpi/mpi_group.h"
#include "backends/mpi/runtime.h"

namespace ddp::backends::mpi {
namespace {

absl::Status Wait(MpiGroup& group, absl::Duration timeout) {
  auto done = std::make_shared<std::promise<absl::Status>>();
  group.Submit({.body = [](Channel& channel) { return Barrier(channel); },
                .describe = [] { return std::string("barrier"); },
                .timeout = timeout,
                .done = [done](const absl::Status& status, int) { done->set_value(status); }});
  return done->get_future().get();
}

int Main(const std::string& how) {
  const absl::StatusOr<Runtime*> runtime = Runtime::Start(absl::Seconds(60));
  if (!runtime.ok()) {
    std::fprintf(stderr, "error: %s\n", std::string(runtime.status().message()).c_str());
    return 1;
  }
  (*runtime)->WaitAtExit(absl::Seconds(how == "hang" ? 1 : 60));
  const std::shared_ptr<MpiGroup> group = MpiGroup::World(**runtime);
  if (!Wait(*group, absl::Seconds(60)).ok()) return 1;
  const bool leaves = group->rank() == 1;

  if (how == "return") {  // whoever is late is waited for
    if (!leaves) absl::SleepFor(absl::Milliseconds(300));
    std::printf("rank %d returns\n", group->rank());
    return 0;
  }
  if (how == "hang") {  // rank 0 gives up waiting in MPI_Finalize
    if (leaves) return 0;
    for (;;) absl::SleepFor(absl::Seconds(1));
  }
  if (how == "timeout") {  // what has been given up does not keep the process
    if (leaves) return 0;
    const absl::Status status = Wait(*group, absl::Milliseconds(100));
    std::printf("rank 0 gave up: %s\n", std::string(status.message()).c_str());
    return status.ok() ? 1 : 0;
  }
  if (leaves && how == "fail") std::exit(3);
  if (leaves && how == "kill") std::raise(SIGKILL);
  return Wait(*group, absl::Seconds(60)).ok() ? 0 : 1;
}

}  // namespace
}  // namespace ddp::backends::mpi

int main(int argc, char** argv) { return ddp::backends::mpi::Main(argc > 1 ? argv[1] : "return"); }
