// Which of a machine's addresses another machine can reach.
//
//   std::string address = ChooseReachable(/*theirs=*/{{"eth0", "10.0.0.1", 24}}, LocalAddresses());
#pragma once

#include <string>
#include <vector>

namespace ddp::backends::mpi {

struct InterfaceAddress {
  std::string interface;  // "eth0"
  std::string address;    // numeric, IPv4 or IPv6
  int prefix = 32;        // bits of the network's part

  bool operator==(const InterfaceAddress&) const = default;
};

// Of interfaces that are up, without loopback and link-local; IPv4 first. Empty on a machine
// without a network.
std::vector<InterfaceAddress> LocalAddresses();

// The first of `theirs` that shares a network with one of `mine`; else the first. An address that
// both machines have themselves, as container bridges' are, is not taken. Empty if none is left.
std::string ChooseReachable(const std::vector<InterfaceAddress>& theirs,
                            const std::vector<InterfaceAddress>& mine);

// For a message: "eth0 10.0.0.1/24;…".
std::string ToText(const std::vector<InterfaceAddress>& addresses);
std::vector<InterfaceAddress> FromText(const std::string& text);

}  // namespace ddp::backends::mpi
