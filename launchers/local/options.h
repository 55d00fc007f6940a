// Options of the local launcher: launcher.local.…
#pragma once

#include <optional>
#include <string>

#include "absl/time/time.h"
#include "base/options.h"

namespace ddp::launchers {

struct LocalOptions {
  // Number of this machine, from 0, among several (LaunchOptions::nnodes) that each start their
  // ranks by this launcher.
  std::optional<int> node_rank = std::nullopt;
  // Host name or address at which rank 0, on node 0, serves the rendezvous store. Empty: 127.0.0.1;
  // with several nodes it must be given.
  std::string master_addr = "";
  int master_port = 0;  // 0: a free one; with several nodes 29500, as torchrun's
  // Maximum time that ranks which handle the signal, in order to save, have for it.
  absl::Duration stop_timeout = absl::Minutes(10);
  // exclusive: binds each rank to cores of its own (launchers/local/core_binding.h).
  std::string numa_binding = "none";
  // A folder for the output of each rank, launchers/local/output.h; empty: none.
  std::string log_dir = "";
  std::string redirects = "";
  std::string tee = "";
  std::string local_ranks_filter = "";
};

constexpr auto OptionsOf(const LocalOptions&) {
  return Options(
      Option("node_rank", &LocalOptions::node_rank,
             "which of nnodes machines this is, from 0; each runs this command")
          .AtLeast(0)
          .AtMost(1e6)
          .Incidental(),
      Option("master_addr", &LocalOptions::master_addr,
             "address of node 0 for the rendezvous store; empty: 127.0.0.1")
          .Incidental(),
      Option("master_port", &LocalOptions::master_port,
             "port of the rendezvous store; 0: a free one, with several nodes 29500")
          .AtLeast(0)
          .AtMost(65535)
          .Incidental(),
      Option("stop_timeout_s", &LocalOptions::stop_timeout,
             "time for the ranks to save and end after a signal to the launcher")
          .AtLeast(0)
          .AtMost(1e7)
          .Incidental(),
      Option("numa_binding", &LocalOptions::numa_binding,
             "exclusive: binds each rank to cores of its own, neighbours on one socket")
          .OneOf("none", "exclusive")
          .Incidental(),
      Option("log_dir", &LocalOptions::log_dir,
             "folder for the output of each rank: attempt_N/RANK/stdout.log and stderr.log")
          .Incidental(),
      Option("redirects", &LocalOptions::redirects,
             "what goes to these files only: 1: stdout, 2: stderr, 3: both; 0:3,1:2: of local "
             "ranks 0 and 1")
          .Incidental(),
      Option("tee", &LocalOptions::tee,
             "what goes to the files and the terminal, likewise; empty: all, without redirects")
          .Incidental(),
      Option("local_ranks_filter", &LocalOptions::local_ranks_filter,
             "local ranks whose output is on the terminal, as in 0,2; empty: all")
          .Incidental());
}

}  // namespace ddp::launchers
