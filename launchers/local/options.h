// Options of the local launcher: launcher.local.…
#pragma once

#include <string>

#include "absl/time/time.h"
#include "base/options.h"

namespace ddp::launchers {

struct LocalOptions {
  // Host name or address of this machine at which rank 0 serves the rendezvous store.
  std::string master_addr = "127.0.0.1";
  int master_port = 0;  // 0: a free one
  // Maximum time that ranks which handle the signal, in order to save, have for it.
  absl::Duration stop_timeout = absl::Minutes(10);
};

constexpr auto OptionsOf(const LocalOptions&) {
  return Options(Option("master_addr", &LocalOptions::master_addr,
                        "address of this machine for the rendezvous store"),
                 Option("master_port", &LocalOptions::master_port,
                        "port of the rendezvous store; 0: a free one")
                     .AtLeast(0)
                     .AtMost(65535),
                 Option("stop_timeout_s", &LocalOptions::stop_timeout,
                        "time for the ranks to save and end after a signal to the launcher")
                     .AtLeast(0)
                     .AtMost(1e7));
}

}  // namespace ddp::launchers
