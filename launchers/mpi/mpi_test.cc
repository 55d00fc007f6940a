// Specific to launcher mpi; the rest is in launchers/conformance_test.cc.
#include <map>
#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "launchers/launcher.h"

namespace ddp::launchers {
namespace {

absl::StatusOr<std::optional<Rank>> Detect(std::map<std::string, std::string> variables) {
  return (*CreateLauncher("mpi"))->Detect(Environment(std::move(variables)));
}

TEST(MpiTest, ReadsHydrasVariables) {
  const Rank rank = **Detect(
      {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}});
  EXPECT_EQ(rank.rank, 1);
  EXPECT_EQ(rank.world_size, 2);
  EXPECT_EQ(rank.local_rank, 1);
  EXPECT_EQ(rank.local_world_size, 2);
  EXPECT_EQ(rank.master_addr, "127.0.0.1");
  EXPECT_EQ(rank.master_port, 29500);
}

TEST(MpiTest, OpenMpisNodeRankIsNoNodesIndex) {
  // The third process on the first node, of which another job of the same mpirun has two.
  std::map<std::string, std::string> variables = {
      {"OMPI_COMM_WORLD_RANK", "0"},       {"OMPI_COMM_WORLD_SIZE", "4"},
      {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
      {"OMPI_COMM_WORLD_NODE_RANK", "2"},  {"MASTER_ADDR", "node0"}};
  EXPECT_EQ((*Detect(variables))->node_rank, 0);
  variables["OMPI_COMM_WORLD_RANK"] = "2";
  EXPECT_EQ((*Detect(variables))->node_rank, 1);
}

TEST(MpiTest, SeveralNodesLeaveTheMasterOpenUnlessTheyAreTold) {
  std::map<std::string, std::string> variables = {{"OMPI_COMM_WORLD_RANK", "0"},
                                                  {"OMPI_COMM_WORLD_SIZE", "4"},
                                                  {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                                                  {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
  EXPECT_EQ((*Detect(variables))->master_addr, "");
  variables["MASTER_ADDR"] = "node0";
  EXPECT_EQ((*Detect(variables))->master_addr, "node0");
}

TEST(MpiTest, RankZeroIsWhereOpenMpisMpirunIs) {
  const std::string mpirun = "5.0;tcp://10.77.0.1,192.0.2.2:39623;tcp6://[fd00::2]:48487";
  std::map<std::string, std::string> variables = {
      {"OMPI_COMM_WORLD_RANK", "0"},       {"OMPI_COMM_WORLD_SIZE", "4"},
      {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
      {"OMPI_MCA_orte_hnp_uri", mpirun},   {"OMPI_MCA_orte_local_daemon_uri", mpirun}};
  EXPECT_EQ((*Detect(variables))->master_addr, "10.77.0.1");
  // Rank 0 is on another node than mpirun.
  variables["OMPI_MCA_orte_local_daemon_uri"] = "5.1;tcp://10.77.0.2:38411";
  EXPECT_EQ((*Detect(variables))->master_addr, "");
  variables["OMPI_COMM_WORLD_RANK"] = "2";
  EXPECT_EQ((*Detect(variables))->master_addr, "10.77.0.1");
  variables["MASTER_ADDR"] = "node0";
  EXPECT_EQ((*Detect(variables))->master_addr, "node0");
}

// As Open MPI 5.0.11 sets them.
TEST(MpiTest, RankZeroIsWhereTheHostInOpenMpi5sJobIs) {
  std::map<std::string, std::string> variables = {
      {"OMPI_COMM_WORLD_RANK", "0"},
      {"OMPI_COMM_WORLD_SIZE", "2"},
      {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
      {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
      {"PMIX_NAMESPACE", "prterun-gpu-node-0-18719@1"},
      {"PMIX_HOSTNAME", "gpu-node-0"},
      {"PMIX_RANK", "0"},
      {"PMIX_SERVER_URI4", "prterun-gpu-node-0-18719@0.0;tcp4://127.0.0.1:59673"}};
  EXPECT_EQ((*Detect(variables))->master_addr, "gpu-node-0");
  // Rank 0 is on another node than mpirun.
  const std::string other = "prterun-gpu-node-0-18719@0.1;tcp4://127.0.0.1:46223";
  variables["PMIX_SERVER_URI4"] = other;
  EXPECT_EQ((*Detect(variables))->master_addr, "");
  variables["OMPI_COMM_WORLD_RANK"] = "1";
  EXPECT_EQ((*Detect(variables))->master_addr, "gpu-node-0");
  variables["MASTER_ADDR"] = "node1";
  EXPECT_EQ((*Detect(variables))->master_addr, "node1");
  variables.erase("MASTER_ADDR");
  // Others' jobs have no host's name.
  for (const char* job : {"1092943873", "slurm.pmix.488141.1", "prterun-", "prterun-5@1"}) {
    variables["PMIX_NAMESPACE"] = job;
    EXPECT_EQ((*Detect(variables))->master_addr, "") << job;
  }
}

TEST(MpiTest, PortBelongsToTheJob) {
  std::map<std::string, std::string> variables = {{"OMPI_COMM_WORLD_RANK", "0"},
                                                  {"OMPI_COMM_WORLD_SIZE", "1"},
                                                  {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                                                  {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
                                                  {"PMIX_NAMESPACE", "1092943873"}};
  const int port = (*Detect(variables))->master_port;
  EXPECT_EQ((*Detect(variables))->run_id, "mpi-1092943873");
  variables["PMIX_NAMESPACE"] = "1092943874";
  EXPECT_NE((*Detect(variables))->master_port, port);
  variables["MASTER_PORT"] = "31000";
  EXPECT_EQ((*Detect(variables))->master_port, 31000);
}

TEST(MpiTest, PmixAloneIsNotEnough) {
  const absl::Status status = Detect({{"PMIX_RANK", "0"}, {"PMIX_NAMESPACE", "x"}}).status();
  EXPECT_TRUE(absl::StrContains(status.message(), "PMI_SIZE is missing")) << status;
}

}  // namespace
}  // namespace ddp::launchers
