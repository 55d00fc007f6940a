// Which of a group's other processes have ended: on this host by watching them, on others by
// knocking at their doors.
//
//   Peers peers;
//   peers.Learn(/*rank=*/2, report_of_2);
//   peers.Knock({2});                                   // if it is elsewhere
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

// Thread-compatible. Holds one descriptor per process watched.
class Peers {
 public:
  // `rank`: this process's own; each begins to knock at the next.
  explicit Peers(std::string host = HostId(), int rank = -1);

  // What this process says of itself.
  const std::string& host() const { return host_; }
  const std::string& process() const { return process_; }

  // Each rank's process once, and its door when it tells of one; later calls do nothing. A rank in
  // this very process (ranks as threads) is never seen dead, nor one on another host without a
  // door that can be used from here.
  void Learn(int rank, const Report& report);

  // Ranks on other hosts, and whether each has said where its door is, that it has none, or that it
  // has left.
  const std::set<int>& elsewhere() const { return elsewhere_; }
  bool know_all_doors() const { return untold_.empty(); }
  // Those whose doors were neither found open nor given up yet. Only one that was open once tells,
  // when it is shut, that the process has ended: firewalls refuse as well.
  std::set<int> Untried() const;

  // Of those of `ranks` that are elsewhere, some, and others the next time. Blocks for a round
  // trip; for a tenth of a second where a host does not answer.
  void Knock(const std::set<int>& ranks);

  std::set<int> Dead() const;
  // Those of them of which only the door says so, and what to do when one of these gives a sign of
  // life after all: its door is not asked again.
  const std::set<int>& shut() const { return shut_; }
  void Vouch(int rank);

 private:
  struct Remote {
    std::string door;
    bool was_open = false;
    int tries = 0;
    std::chrono::steady_clock::time_point tried = {};
  };
  bool IsUntried(const Remote& remote) const;

  const std::string host_;
  const std::string process_;
  std::set<int> known_;
  std::set<int> found_dead_;  // before they could be watched
  std::set<int> shut_;        // their doors
  std::map<int, backends::Peer> watched_;
  std::set<int> elsewhere_;
  std::set<int> untold_;  // of these, those of whose doors nothing is known
  std::map<int, Remote> doors_;
  int last_knocked_;
};

}  // namespace ddp::backends::watch
