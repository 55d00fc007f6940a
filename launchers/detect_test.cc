#include "launchers/detect.h"

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace ddp::launchers {
namespace {

TEST(PortTest, NeighbouringJobsAndStepsDiffer) {
  std::set<int> ports;
  for (uint64_t job = 9990; job < 10040; ++job) {
    for (uint64_t step = 0; step < 100; ++step) ports.insert(PortFromJob(job, step));
  }
  EXPECT_EQ(ports.size(), 50 * 100);
}

TEST(PortTest, StaysOutsideTheEphemeralRange) {
  for (uint64_t id : {uint64_t{0}, uint64_t{1}, uint64_t{4711}, UINT64_MAX}) {
    EXPECT_GE(PortFromJob(id, id), 20000);
    EXPECT_LT(PortFromJob(id, id), 30000);
  }
}

// Ranks built at different times must agree: the values are part of the interface.
TEST(PortTest, IsFixedForAllTimes) {
  EXPECT_EQ(PortFromJob(4711, 0), 25811);
  EXPECT_EQ(PortFromJob(4711, 3), 25814);
  EXPECT_EQ(PortFromName(""), 20000 + 14695981039346656037u % 10000);
  EXPECT_EQ(PortFromName("a"), 20000 + 0xaf63dc4c8601ec8cu % 10000);  // the algorithm's test vector
  EXPECT_NE(PortFromName("1092943873"), PortFromName("1092943874"));
}

TEST(JobTest, IsSlurmsByEitherNameOfItsVariable) {
  for (const char* name : {"SLURM_JOB_ID", "SLURM_JOBID"}) {
    const Environment env = {{name, "7"}, {"SLURM_RESTART_COUNT", "2"}};
    EXPECT_EQ(RequeuesOfJob(env).value(), 2);
    EXPECT_EQ(JobOf(env, "none"), "slurm-7");
  }
  EXPECT_EQ(RequeuesOfJob({{"SLURM_JOB_ID", "7"}}).value(), 0);
}

TEST(AddressTest, NamesAndAddresses) {
  for (const std::string address :
       {"node0", "gpu-09.cluster.example.org", "job_1-master-0.default.svc.cluster.local.", "9to5",
        "node_0", "NODE0.Example.ORG", "localhost.", "10.0.0.1.example.org.", "10.0.0.1", "127.1",
        "::1", "2001:db8::7", "::ffff:10.0.0.1", "fe80::1%lo", "fe80::1%1", "localhost",
        "0.0.0.0"}) {
    EXPECT_EQ(AddressProblem(address), "") << address;
  }
}

TEST(AddressTest, WhatIsNoneIsSaid) {
  for (const auto& [address, problem] : std::vector<std::pair<std::string, std::string>>{
           {"", "is empty"},
           {" node0", "has white space"},
           {"node0\r", "has white space"},
           {"node0 ", "has white space"},
           {"node0\n", "has white space"},
           {"node 0", "has white space"},
           {"tcp://node0", "has a scheme"},
           {"tcp://node0:29500", "has a scheme"},
           {"[::1]", "has brackets"},
           {"[::1]:29500", "has brackets"},
           {"[node0]", "has brackets"},
           {"node0:29500", "has a port"},
           {"10.0.0.1:29500", "has a port"},
           {"::1::", "is no IPv6 address"},
           {"2001:db8::g", "is no IPv6 address"},
           {"fe80::1", "lacks its interface"},
           {"fe80::1%", "lacks its interface"},
           {"fe80::1%nosuch0", "names interface nosuch0, which this machine lacks"},
           {"2001:db8::7%lo", "has an interface"},
           {"10.0.0.256", "is no IPv4 address"},
           {"10.0.0.1.5", "is no IPv4 address"},
           {"10.0.0.1.", "has a dot behind its last number"},
           {"127.1.", "has a dot behind its last number"},
           {"10.0.0.1.5.", "has a dot behind its last number"},
           {"10.0.0.1..", "has a part without characters"},
           {"256.1.1.1", "is no IPv4 address"},
           {"1.2.3.4.5", "is no IPv4 address"},
           {"10.0.0", "has fewer than four numbers, and is read as 10.0.0.0"},
           {"192.168.1", "has fewer than four numbers, and is read as 192.168.0.1"},
           {"10.0.0.010", "has a number that begins with 0"},
           {"node0.7", "is no IPv4 address"},
           {"29500", "is a number"},
           {"29500.", "is a number"},
           {"node..example", "has a part without characters"},
           {".example", "has a part without characters"},
           {"node0..", "has a part without characters"},
           {".", "has a part without characters"},
           {"-node0", "has a part that begins or ends with -"},
           {std::string(64, 'a'), "has a part too long"},
           {"node0." + std::string(64, 'a') + ".", "has a part too long"},
           {"node0/", "has characters that no host name has"},
           {"user@node0", "has characters that no host name has"},
           {"kn\u00f6del", "has characters that no host name has"}}) {
    EXPECT_TRUE(absl::StartsWith(AddressProblem(address), problem))
        << address << ": " << AddressProblem(address);
  }
}

TEST(AddressTest, OfRankZeroIsNamedAsItIsWritten) {
  Rank rank;
  rank.rank = rank.node_rank = 1;
  rank.world_size = 2;
  rank.master_addr = "tcp://a";
  rank.master_port = 1;
  const Environment env = {{"MASTER_ADDR", "tcp://a"}};
  const absl::Status status = CheckRank(rank, env, {"MASTER_ADDR"}, "unset it");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StartsWith(status.message(), "MASTER_ADDR='tcp://a' has a scheme")) << status;
  rank.master_addr = "a\n";
  EXPECT_TRUE(absl::StartsWith(CheckRank(rank, env, {}, "").message(),
                               "MASTER_ADDR='a\\n' has white space"));
  rank.master_addr = "a";
  EXPECT_TRUE(CheckRank(rank, env, {}, "").ok());
}

}  // namespace
}  // namespace ddp::launchers
