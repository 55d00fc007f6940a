#include "checkpoint/name_map.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "base/option_error.h"

namespace ddp::checkpoint {
namespace {

using Names = std::vector<std::string>;

Names Mapped(absl::string_view rules, const Names& names) {
  const auto map = NameMap::Parse(rules);
  EXPECT_TRUE(map.ok()) << map.status();
  if (!map.ok()) return {};
  const auto mapped = map->Apply(names);
  EXPECT_TRUE(mapped.ok()) << mapped.status();
  return mapped.value_or(Names());
}

TEST(NameMapTest, ReplacesEachMatch) {
  EXPECT_EQ(Mapped("", {"a", "b"}), Names({"a", "b"}));
  EXPECT_EQ(Mapped(R"(^backbone\.=encoder.)", {"backbone.a", "my.backbone.a"}),
            Names({"encoder.a", "my.backbone.a"}));
  EXPECT_EQ(Mapped("^model.=", {"model.a"}), Names({"a"}));
  EXPECT_EQ(Mapped("a=bb", {"a.a"}), Names({"bb.bb"}));
  // The second sees what the first has made.
  EXPECT_EQ(Mapped("^a$=b,^b$=c", {"a"}), Names({"c"}));
}

TEST(NameMapTest, Groups) {
  EXPECT_EQ(Mapped(R"(h\.(\d+)\.(\w)=layer.$1.$2)", {"h.12.w"}), Names({"layer.12.w"}));
  EXPECT_EQ(Mapped(R"(h\.(\d+)\.(\w)=layer.\1.\2)", {"h.12.w"}), Names({"layer.12.w"}));
  EXPECT_EQ(Mapped(R"((\d)=\10)", {"h7"}), Names({"h70"})) << "the group, and then a zero";
  EXPECT_EQ(Mapped("(b)=[$&]", {"abc"}), Names({"a[b]c"}));
}

TEST(NameMapTest, CommasInBracketsAndEqualSignsInExpressions) {
  EXPECT_EQ(Mapped(R"(^x{1,2}\.=y.,[,(]=_)", {"xx.a", "b,(c"}), Names({"y.a", "b__c"}));
  EXPECT_EQ(Mapped(R"(a(?=b)=c)", {"ab", "ad"}), Names({"cb", "ad"}));
  EXPECT_EQ(Mapped(R"(a\,b=c)", {"a,b"}), Names({"c"}));
}

TEST(NameMapTest, ErrorsNameTheOptionAndTheRule) {
  const auto refused = [](const absl::Status& status, absl::string_view value,
                          absl::string_view words) {
    const auto problem = ProblemOf(status);
    ASSERT_TRUE(problem.has_value()) << status;
    EXPECT_EQ(problem->path, "init_map");
    EXPECT_EQ(problem->value, value);
    EXPECT_TRUE(absl::StrContains(problem->problem, words)) << status;
  };
  refused(NameMap::Parse("encoder").status(), "encoder", "OLD=NEW");
  refused(NameMap::Parse("=a").status(), "=a", "OLD=NEW");
  refused(NameMap::Parse("a=b,").status(), "", "OLD=NEW");
  refused(NameMap::Parse("a=b,(c=d").status(), "(c=d", "no valid regular expression '(c'");
  refused(NameMap::Parse("(a)=$2").status(), "(a)=$2", "names group 2, and '(a)' has 1");
  const Names names = {"a.x", "b.x", "c"};
  refused(NameMap::Parse("^d=e")->Apply(names).status(), "^d=e",
          "none of the 3 names: a.x, b.x, c");
  refused(NameMap::Parse("^a=b")->Apply(names).status(), "^a=b", "'a.x' and 'b.x' become 'b.x'");
}

TEST(NameMapTest, VeryLongNamesAreLeftAlone) {
  const std::string longest(100000, 'a');
  EXPECT_EQ(Mapped("a*b?=c", {longest, "ab"})[0], longest);
}

}  // namespace
}  // namespace ddp::checkpoint
