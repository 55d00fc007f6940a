#include "launchers/variables.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <map>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace ddp::launchers {
namespace {

TEST(VariablesTest, WhatIsWrittenIsRead) {
  Rank rank = {.rank = 5,
               .world_size = 8,
               .local_rank = 1,
               .local_world_size = 4,
               .node_rank = 1,
               .master_addr = "gpu01",
               .master_port = 29501,
               .master_is_external = true,
               .restart_count = 3,
               .run_id = "abc",
               .master_listen_fd = std::nullopt};
  const Rank read = **RankFromVariables(Environment(VariablesFromRank(rank)));
  EXPECT_EQ(read.rank, 5);
  EXPECT_EQ(read.world_size, 8);
  EXPECT_EQ(read.local_rank, 1);
  EXPECT_EQ(read.local_world_size, 4);
  EXPECT_EQ(read.node_rank, 1);
  EXPECT_EQ(read.master_addr, "gpu01");
  EXPECT_EQ(read.master_port, 29501);
  EXPECT_TRUE(read.master_is_external);
  EXPECT_EQ(read.restart_count, 3);
  EXPECT_EQ(read.run_id, "abc");
}

TEST(VariablesTest, PyTorchJobSetsNoLocalVariables) {
  const Rank rank = **RankFromVariables({{"RANK", "1"},
                                         {"WORLD_SIZE", "2"},
                                         {"MASTER_ADDR", "job-master-0"},
                                         {"MASTER_PORT", "23456"}});
  EXPECT_EQ(rank.local_rank, 0);
  EXPECT_EQ(rank.local_world_size, 1);
  EXPECT_EQ(rank.node_rank, 1);
  EXPECT_FALSE(rank.master_is_external);
}

TEST(VariablesTest, PyTorchsOwnTellNoLocalWorldSize) {
  const auto read = [](const char* rank, const char* world_size, const char* local_rank,
                       const Environment& more = {}) {
    std::map<std::string, std::string> variables = {{"RANK", rank},
                                                    {"WORLD_SIZE", world_size},
                                                    {"LOCAL_RANK", local_rank},
                                                    {"MASTER_ADDR", "h"},
                                                    {"MASTER_PORT", "1"}};
    if (const auto node = more.Get("GROUP_RANK")) variables["GROUP_RANK"] = *node;
    return RankFromVariables(Environment(variables));
  };
  const Rank first = **read("0", "8", "0"), sixth = **read("5", "8", "1");
  EXPECT_EQ(first.local_world_size, 1);
  EXPECT_FALSE(first.local_world_size_is_known);
  EXPECT_EQ(sixth.local_rank, 1);
  EXPECT_EQ(sixth.local_world_size, 2);
  EXPECT_FALSE(sixth.local_world_size_is_known);
  // The last rank of all, which are here.
  const Rank last = **read("7", "8", "7");
  EXPECT_EQ(last.local_world_size, 8);
  EXPECT_TRUE(last.local_world_size_is_known);
  const absl::Status above = read("1", "2", "2").status();
  EXPECT_TRUE(absl::StrContains(above.message(), "local rank 2 is not below")) << above;
  const absl::Status of_torchrun = read("1", "2", "1", {{"GROUP_RANK", "0"}}).status();
  EXPECT_TRUE(absl::StrContains(of_torchrun.message(), "only one of LOCAL_RANK and"))
      << of_torchrun;
}

TEST(VariablesTest, NodesAreCountedWhereNobodyTells) {
  const Rank rank = **RankFromVariables({{"RANK", "5"},
                                         {"WORLD_SIZE", "8"},
                                         {"LOCAL_RANK", "1"},
                                         {"LOCAL_WORLD_SIZE", "4"},
                                         {"MASTER_ADDR", "h"},
                                         {"MASTER_PORT", "1"}});
  EXPECT_EQ(rank.node_rank, 1);
}

TEST(VariablesTest, AWorldOfOneNeedsNoMaster) {
  const Rank rank = **RankFromVariables({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  EXPECT_EQ(rank.master_port, 0);
}

class ListenFdTest : public testing::Test {
 protected:
  ~ListenFdTest() override { close(fd_); }
  Environment Env() const {
    return {{"RANK", "0"}, {"WORLD_SIZE", "1"}, {kMasterListenFd, absl::StrCat(fd_)}};
  }
  int fd_ = socket(AF_INET, SOCK_STREAM, 0);
};

TEST_F(ListenFdTest, IsHandedOverAndNotInherited) {
  ASSERT_EQ(listen(fd_, 1), 0);
  EXPECT_EQ((*RankFromVariables(Env()))->master_listen_fd, fd_);
  EXPECT_EQ(fcntl(fd_, F_GETFD), FD_CLOEXEC);
}

TEST_F(ListenFdTest, MustBeAListeningSocket) {
  const absl::Status status = RankFromVariables(Env()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(status.message(), kMasterListenFd)) << status;
}

}  // namespace
}  // namespace ddp::launchers
