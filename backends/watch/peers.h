// Detects which of a group's other processes have ended: on this host by watching the processes, on
// other hosts by probing their listeners (probe.h).
//
//   Peers peers;
//   peers.Learn(/*rank=*/2, report_of_2);
//   peers.Probe({2});                                   // only has an effect if it is remote
//   peers.Dead();                                       // {} or {2}
#pragma once

#include <chrono>
#include <map>
#include <set>
#include <string>

#include "absl/strings/string_view.h"
#include "backends/common/host.h"
#include "backends/common/peer.h"
#include "backends/watch/report.h"

namespace ddp::backends::watch {

// Not thread-safe. Holds one file descriptor for each local process.
class Peers {
 public:
  // `rank`: that of this process. Probing starts at the next rank, a different one for each
  // process.
  explicit Peers(std::string host = HostId(), int rank = -1);

  // Host and process as this process reports them.
  const std::string& host() const { return host_; }
  const std::string& process() const { return process_; }

  // Learns each rank's process once, and its probe address once it is reported; later calls do
  // nothing. Never reported dead: a rank in this very process (ranks as threads), and a remote rank
  // without a probe address that can be used from here.
  void Learn(int rank, const RankReport& report);

  // Ranks on other hosts.
  const std::set<int>& remote() const { return remote_; }
  // Whether each remote rank has reported its probe address, that it has none, or that it has left.
  bool know_all_probe_addresses() const { return without_address_.empty(); }
  // Remote ranks that no probe has found alive yet, before the attempts are used up. A refusal
  // means that the process has ended only if it was found alive before: firewalls refuse, too.
  std::set<int> Unverified() const;

  // Probes some of those of `ranks` that are remote, and others in the next call. Blocks for a
  // round trip, or for 100 ms if a host does not answer.
  void Probe(const std::set<int>& ranks);

  // Ranks whose process has ended, refused() included.
  std::set<int> Dead() const;
  // Ranks that are taken for dead only because a probe was refused.
  const std::set<int>& refused() const { return refused_; }
  // A refused rank has answered a status request since, so it is alive. It is not probed again.
  void MarkAlive(int rank);

 private:
  struct Remote {
    std::string probe_address;
    bool was_alive = false;
    int attempts = 0;
    std::chrono::steady_clock::time_point last_attempt = {};
  };
  bool IsUnverified(const Remote& remote) const;

  const std::string host_;
  const std::string process_;
  std::set<int> known_;
  std::set<int> dead_when_learned_;
  std::set<int> refused_;
  std::map<int, backends::Peer> local_;
  std::set<int> remote_;
  std::set<int> without_address_;    // remote ranks that have not reported a probe address
  std::map<int, Remote> probeable_;  // remote ranks with a probe address
  int last_probed_;
};

}  // namespace ddp::backends::watch
