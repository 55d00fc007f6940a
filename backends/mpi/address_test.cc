#include "backends/mpi/address.h"

#include <string>
#include <vector>

#include "backends/common/interfaces.h"
#include "gtest/gtest.h"

namespace ddp::backends::mpi {
namespace {

using Addresses = std::vector<InterfaceAddress>;

TEST(AddressTest, TakesTheNetworkThatBothMachinesAreIn) {
  const Addresses theirs = {{"eth0", "192.168.1.5", 24}, {"ib0", "10.1.0.5", 16}};
  EXPECT_EQ(ChooseReachable(theirs, {{"eth0", "172.20.0.9", 16}, {"ib0", "10.1.7.9", 16}}),
            "10.1.0.5");
  EXPECT_EQ(ChooseReachable(theirs, {{"eth0", "192.168.1.9", 24}, {"ib0", "10.1.7.9", 16}}),
            "192.168.1.5");
}

TEST(AddressTest, ARoutedNetworkMeansTheFirst) {
  EXPECT_EQ(ChooseReachable({{"eth0", "10.0.1.5", 24}, {"eth1", "10.0.2.5", 24}},
                            {{"eth0", "10.0.3.9", 24}}),
            "10.0.1.5");
}

TEST(AddressTest, AContainerBridgeThatEveryMachineHasIsNotTaken) {
  const Addresses theirs = {{"docker0", "172.17.0.1", 16}, {"eth0", "10.0.1.5", 24}};
  EXPECT_EQ(ChooseReachable(theirs, {{"docker0", "172.17.0.1", 16}, {"eth0", "10.0.3.9", 24}}),
            "10.0.1.5");
  EXPECT_EQ(ChooseReachable(theirs, theirs), "");
}

TEST(AddressTest, PrefixesNeedNotEndWithAByte) {
  EXPECT_EQ(ChooseReachable({{"a", "10.0.0.5", 30}, {"b", "10.0.0.33", 27}},
                            {{"a", "10.0.0.9", 30}, {"b", "10.0.0.62", 27}}),
            "10.0.0.33");
}

TEST(AddressTest, IPv6) {
  EXPECT_EQ(ChooseReachable({{"eth0", "10.0.0.1", 24}, {"eth0", "fd00:1::5", 64}},
                            {{"eth0", "fd00:1::9", 64}}),
            "fd00:1::5");
}

// As for gloo (backends/common/interfaces.h).
TEST(AddressTest, TheOptionOrTheVariableChooseInterfaces) {
  const Addresses all = {
      {"eth0", "10.0.0.1", 24}, {"ib0", "10.1.0.5", 16}, {"eth1", "10.2.0.1", 8}};
  const Environment env = {{"GLOO_SOCKET_IFNAME", "ib0, eth1"}};
  const auto chosen = [&](const std::string& interface, const std::string& hostname,
                          const Environment& variables) {
    const Addresses left = OnInterfaces(all, ChosenInterfaces(interface, hostname, variables));
    std::vector<std::string> names;
    for (const InterfaceAddress& one : left) names.push_back(one.interface);
    return names;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(chosen("", "", {}), (Names{"eth0", "ib0", "eth1"}));
  EXPECT_EQ(chosen("", "", env), (Names{"ib0", "eth1"}));
  EXPECT_EQ(chosen("eth0", "", env), (Names{"eth0"}));
  EXPECT_EQ(chosen("", "node7", env), (Names{"eth0", "ib0", "eth1"}));  // the host name counts
  EXPECT_EQ(chosen("nosuch0", "", {}), Names());
}

TEST(AddressTest, TextGoesThereAndBack) {
  const Addresses addresses = {{"eth0", "10.0.0.1", 24}, {"eth0", "fd00::5", 64}};
  EXPECT_EQ(FromText(ToText(addresses)), addresses);
  EXPECT_TRUE(FromText("").empty());
  EXPECT_TRUE(FromText("host.example").empty());
}

TEST(AddressTest, LoopbackIsNoLocalAddress) {
  for (const InterfaceAddress& address : LocalAddresses()) EXPECT_NE(address.address, "127.0.0.1");
}

}  // namespace
}  // namespace ddp::backends::mpi
