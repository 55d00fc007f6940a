// Finds an address of a machine that another machine can reach.
//
//   std::string address = ChooseReachable(/*theirs=*/{{"eth0", "10.0.0.1", 24}}, LocalAddresses());
#pragma once

#include <string>
#include <vector>

namespace ddp::backends::mpi {

struct InterfaceAddress {
  std::string interface;  // "eth0"
  std::string address;    // numeric, IPv4 or IPv6
  int prefix = 32;        // length of the network prefix, in bits

  bool operator==(const InterfaceAddress&) const = default;
};

// Addresses of the interfaces that are up, without loopback and link-local addresses; IPv4 first.
// Empty on a machine without a network.
std::vector<InterfaceAddress> LocalAddresses();

// Those of `addresses` that are of these interfaces; all, if `interfaces` is empty.
std::vector<InterfaceAddress> OnInterfaces(std::vector<InterfaceAddress> addresses,
                                           const std::vector<std::string>& interfaces);

// The first of `theirs` that is in the network of one of `mine`; otherwise the first of `theirs`.
// Addresses that both machines have, such as those of container bridges, are excluded. Empty if no
// address is left.
std::string ChooseReachable(const std::vector<InterfaceAddress>& theirs,
                            const std::vector<InterfaceAddress>& mine);

// "eth0 10.0.0.1/24;…", to be sent to other ranks; FromText is its inverse.
std::string ToText(const std::vector<InterfaceAddress>& addresses);
std::vector<InterfaceAddress> FromText(const std::string& text);

}  // namespace ddp::backends::mpi
