// Liveness probes of processes on other hosts. Each process keeps a listening TCP socket on which
// no data is exchanged. The kernel accepts connections while the process exists, even if it is busy
// or stopped, and refuses them after the process has ended. If the whole host is down, a probe gets
// no answer.
//
//   ProbeListener* listener = ProbeListener::OfThisProcess(/*towards=*/"master-host");
//   store->set("probe/3", listener->address());                  // "10.0.0.2:40123"
//   Probe({"10.0.0.2:40123"}, absl::Milliseconds(100));           // {ProbeResult::kAlive}
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"

namespace ddp::backends::watch {

// Thread-safe.
class ProbeListener {
 public:
  // Listens on a port chosen by the system, at the local address from which this host reaches
  // `towards` (a name or an address): other hosts reach this one there. May query a name server.
  // Unavailable if there is no such address.
  static absl::StatusOr<std::unique_ptr<ProbeListener>> Open(const std::string& towards);

  // One listener for all groups of this process. The first call opens it; it is never closed,
  // because a group may end before its process. Null if it cannot be opened. A forked child opens
  // its own and closes the parent's, which would otherwise look alive as long as the child exists.
  static ProbeListener* OfThisProcess(const std::string& towards);

  const std::string& address() const { return address_; }

  // Accepts and closes the pending connections. Call it regularly: the kernel queues a limited
  // number of them (somaxconn: 4096, before Linux 5.4: 128) and answers no probe beyond that.
  void AcceptPending();

 private:
  ProbeListener(UniqueFd listener, std::string address)
      : listener_(std::move(listener)), address_(std::move(address)) {}

  const UniqueFd listener_;
  const std::string address_;
};

// Whether `address` ("127.0.0.1:40123") is a loopback address: each host reaches only itself there.
bool IsLoopback(absl::string_view address);

enum class ProbeResult {
  kAlive,
  kRefused,   // nothing listens there: the process has ended if an earlier probe found it alive
  kNoAnswer,  // within the timeout, or no route
};

// Probes all addresses at once; the results are in the order of `addresses`. Blocks for `timeout`
// at most.
std::vector<ProbeResult> Probe(const std::vector<std::string>& addresses, absl::Duration timeout);

}  // namespace ddp::backends::watch
