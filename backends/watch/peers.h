// Which of a group's other processes have ended, where that can be seen: on this host.
//
//   Peers peers;
//   peers.Learn(/*rank=*/2, host_of_2, process_of_2);   // from its report
//   peers.Dead();                                       // {} or {2}
#pragma once

#include <map>
#include <set>
#include <string>

#include "absl/strings/string_view.h"
#include "backends/shm/peer.h"

namespace ddp::backends::watch {

// Thread-compatible. Holds one descriptor per process watched.
class Peers {
 public:
  Peers();

  // What this process says of itself.
  const std::string& host() const { return host_; }
  const std::string& process() const { return process_; }

  // Each rank once; later calls for it do nothing. A rank on another host or in this very process
  // (ranks as threads) is never seen dead.
  void Learn(int rank, absl::string_view host, absl::string_view process);

  std::set<int> Dead() const;

 private:
  const std::string host_;
  const std::string process_;
  std::set<int> known_;
  std::set<int> found_dead_;  // before they could be watched
  std::map<int, shm::Peer> watched_;
};

}  // namespace ddp::backends::watch
