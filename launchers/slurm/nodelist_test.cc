#include "launchers/slurm/nodelist.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"

namespace ddp::launchers {
namespace {

std::string Expanded(absl::string_view list) {
  absl::StatusOr<std::vector<std::string>> nodes = ExpandNodeList(list);
  return nodes.ok() ? absl::StrJoin(*nodes, " ") : nodes.status().ToString();
}

TEST(NodeListTest, ExpandsAsScontrolDoes) {
  EXPECT_EQ(Expanded("login1"), "login1");
  EXPECT_EQ(Expanded("gpu[01-03,7],login1"), "gpu01 gpu02 gpu03 gpu7 login1");
  EXPECT_EQ(Expanded("a[1-2]b[3-4]"), "a1b3 a1b4 a2b3 a2b4");
  EXPECT_EQ(Expanded("rack[1-2]-ib,x"), "rack1-ib rack2-ib x");
  EXPECT_EQ(Expanded("127.0.0.[1-2]"), "127.0.0.1 127.0.0.2");
  EXPECT_EQ(Expanded("[1-2]"), "1 2");
}

TEST(NodeListTest, KeepsTheWidthOfTheFirstNumber) {
  EXPECT_EQ(Expanded("n[9-11]"), "n9 n10 n11");
  EXPECT_EQ(Expanded("n[09-11]"), "n09 n10 n11");
  EXPECT_EQ(Expanded("n[098-100]"), "n098 n099 n100");
  EXPECT_EQ(Expanded("n[0,00,000]"), "n0 n00 n000");
}

TEST(NodeListTest, SkipsBlanksAroundNamesAndRanges) {
  EXPECT_EQ(Expanded("  a1 , b[1, 3-4 ]  "), "a1 b1 b3 b4");
}

TEST(NodeListTest, KeepsOrderAndRepetition) { EXPECT_EQ(Expanded("b,a,b"), "b a b"); }

TEST(NodeListTest, RefusesWhatIsMalformed) {
  for (absl::string_view list :
       {"",       " ",      ",",       "a,",    ",a",    "a,,b",     "a[",           "a[1",
        "a]",     "a[]",    "a[1,]",   "a[1-]", "a[-1]", "a[1-2-3]", "a[3-1]",       "a[x]",
        "a[1-x]", "a[[1]]", "a[1[2]]", "a[1]]", "a b",   "a[+1]",    "a[1234567890]"}) {
    absl::StatusOr<std::vector<std::string>> nodes = ExpandNodeList(list);
    EXPECT_EQ(nodes.status().code(), absl::StatusCode::kInvalidArgument) << "'" << list << "'";
    const std::string quoted = absl::StrCat("'", list, "'");
    EXPECT_NE(nodes.status().message().find(quoted), absl::string_view::npos) << nodes.status();
  }
}

TEST(NodeListTest, RefusesWhatNoClusterHas) {
  EXPECT_EQ(ExpandNodeList("n[1-65536]")->size(), 65536u);
  for (absl::string_view list : {"n[0-65536]", "n[1-999999999]", "n[1-65536],m", "n[1-300]m[1-300]",
                                 "n[1-65536,1]", "n[1-99]m[1-99]o[1-99]p[1-99]q[1-99]"}) {
    EXPECT_EQ(ExpandNodeList(list).status().code(), absl::StatusCode::kInvalidArgument) << list;
  }
}

TEST(TasksPerNodeTest, Expands) {
  EXPECT_EQ(*ExpandTasksPerNode("4"), std::vector<int>({4}));
  EXPECT_EQ(*ExpandTasksPerNode("2(x3),1"), std::vector<int>({2, 2, 2, 1}));
  EXPECT_EQ(*ExpandTasksPerNode("1, 3(x1)"), std::vector<int>({1, 3}));
}

TEST(TasksPerNodeTest, RefusesWhatIsMalformed) {
  for (absl::string_view list :
       {"", "x", "2(x", "2(x3", "2x3", "(x3)", "2()", "-1", "1,", "2(x70000)", "1(x65536),1"}) {
    EXPECT_EQ(ExpandTasksPerNode(list).status().code(), absl::StatusCode::kInvalidArgument) << list;
  }
}

}  // namespace
}  // namespace ddp::launchers
