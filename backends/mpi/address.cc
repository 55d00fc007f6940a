#include "backends/mpi/address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <bit>
#include <cstdint>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace ddp::backends::mpi {
namespace {

// Big-endian bytes: 4 of IPv4, 16 of IPv6; empty if `address` is neither.
std::vector<uint8_t> Bytes(const std::string& address) {
  std::vector<uint8_t> bytes(16);
  if (inet_pton(AF_INET6, address.c_str(), bytes.data()) == 1) return bytes;
  bytes.resize(4);
  if (inet_pton(AF_INET, address.c_str(), bytes.data()) == 1) return bytes;
  return {};
}

bool SameNetwork(const InterfaceAddress& a, const InterfaceAddress& b) {
  const std::vector<uint8_t> x = Bytes(a.address), y = Bytes(b.address);
  if (x.size() != y.size() || x.empty() || a.prefix != b.prefix) return false;
  for (int bit = 0; bit < a.prefix; ++bit) {
    const int mask = 0x80 >> bit % 8;
    if ((x[bit / 8] & mask) != (y[bit / 8] & mask)) return false;
  }
  return true;
}

int Ones(const void* mask, size_t bytes) {
  int ones = 0;
  for (size_t i = 0; i < bytes; ++i) ones += std::popcount(static_cast<const uint8_t*>(mask)[i]);
  return ones;
}

}  // namespace

std::vector<InterfaceAddress> LocalAddresses() {
  std::vector<InterfaceAddress> v4, v6;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return {};
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || entry->ifa_netmask == nullptr ||
        (entry->ifa_flags & IFF_UP) == 0 || (entry->ifa_flags & IFF_LOOPBACK) != 0) {
      continue;
    }
    char text[INET6_ADDRSTRLEN] = "";
    if (entry->ifa_addr->sa_family == AF_INET) {
      const auto& address = reinterpret_cast<const sockaddr_in*>(entry->ifa_addr)->sin_addr;
      const auto& mask = reinterpret_cast<const sockaddr_in*>(entry->ifa_netmask)->sin_addr;
      inet_ntop(AF_INET, &address, text, sizeof(text));
      v4.push_back({entry->ifa_name, text, Ones(&mask, sizeof(mask))});
    } else if (entry->ifa_addr->sa_family == AF_INET6) {
      const auto& address = reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr)->sin6_addr;
      const auto& mask = reinterpret_cast<const sockaddr_in6*>(entry->ifa_netmask)->sin6_addr;
      if (IN6_IS_ADDR_LINKLOCAL(&address)) continue;
      inet_ntop(AF_INET6, &address, text, sizeof(text));
      v6.push_back({entry->ifa_name, text, Ones(&mask, sizeof(mask))});
    }
  }
  freeifaddrs(list);
  v4.insert(v4.end(), v6.begin(), v6.end());
  return v4;
}

std::vector<InterfaceAddress> OnInterfaces(std::vector<InterfaceAddress> addresses,
                                           const std::vector<std::string>& interfaces) {
  if (interfaces.empty()) return addresses;
  std::erase_if(addresses, [&](const InterfaceAddress& address) {
    return std::find(interfaces.begin(), interfaces.end(), address.interface) == interfaces.end();
  });
  return addresses;
}

std::string ChooseReachable(const std::vector<InterfaceAddress>& theirs,
                            const std::vector<InterfaceAddress>& mine) {
  std::string first;
  for (const InterfaceAddress& their : theirs) {
    const auto is_mine = [&](const InterfaceAddress& my) { return my.address == their.address; };
    if (std::any_of(mine.begin(), mine.end(), is_mine)) continue;
    const auto shares = [&](const InterfaceAddress& my) { return SameNetwork(my, their); };
    if (std::any_of(mine.begin(), mine.end(), shares)) return their.address;
    if (first.empty()) first = their.address;
  }
  return first;
}

std::string ToText(const std::vector<InterfaceAddress>& addresses) {
  return absl::StrJoin(addresses, ";", [](std::string* out, const InterfaceAddress& address) {
    absl::StrAppend(out, address.interface, " ", address.address, "/", address.prefix);
  });
}

std::vector<InterfaceAddress> FromText(const std::string& text) {
  std::vector<InterfaceAddress> addresses;
  for (absl::string_view part : absl::StrSplit(text, ';', absl::SkipEmpty())) {
    const std::vector<std::string> fields = absl::StrSplit(part, absl::ByAnyChar(" /"));
    InterfaceAddress address;
    if (fields.size() != 3 || !absl::SimpleAtoi(fields[2], &address.prefix)) continue;
    address.interface = fields[0];
    address.address = fields[1];
    addresses.push_back(std::move(address));
  }
  return addresses;
}

}  // namespace ddp::backends::mpi
