#include "ddp/config/choices.h"

#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace ddp::config {
namespace {

using Values = std::vector<std::string>;

TEST(ChoicesTest, CommasOutsideOfBracketsAndQuotesSeparate) {
  EXPECT_EQ(*ParseChoices("0.1, 0.01"), Values({"0.1", "0.01"}));
  EXPECT_EQ(*ParseChoices("one"), Values({"one"}));
  EXPECT_EQ(*ParseChoices("choice(a, b)"), Values({"a", "b"}));
  EXPECT_EQ(*ParseChoices("[1, 2],[3]"), Values({"[1, 2]", "[3]"}));
  EXPECT_EQ(*ParseChoices("'a,b',\"c\""), Values({"a,b", "c"}));
  EXPECT_EQ(*ParseChoices("'it''s',b"), Values({"it's", "b"}));
}

TEST(ChoicesTest, RangesStopBeforeTheirEnd) {
  EXPECT_EQ(*ParseChoices("range(0,3)"), Values({"0", "1", "2"}));
  EXPECT_EQ(*ParseChoices("range(5, 0, -2)"), Values({"5", "3", "1"}));
  EXPECT_EQ(*ParseChoices("range(0, 0.5, 0.1)"), Values({"0", "0.1", "0.2", "0.3", "0.4"}));
  EXPECT_EQ(*ParseChoices("range(1, 2, 0.5)"), Values({"1", "1.5"}));
}

// 2.1 / 0.7 is a little more than 3.
TEST(ChoicesTest, RoundingMakesNoFurtherValue) {
  EXPECT_EQ(*ParseChoices("range(0, 2.1, 0.7)"), Values({"0", "0.7", "1.4"}));
}

TEST(ChoicesTest, WhatIsWrongIsSaid) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "has no choices"},
      {"choice()", "has no choices"},
      {"a,,b", "has an empty choice"},
      {"a,", "has an empty choice"},
      {"range()", "is a range without an end"},
      {"range(3)",
       "is a range without a start and an end: give range(start,stop) or "
       "range(start,stop,step)"},
      {"range(0,3,0)", "is a range without end: its step is 0"},
      {"range(0,3,-1)", "is an empty range"},
      {"range(3,3)", "is an empty range"},
      {"range(0,x)", "is a range with 'x', which is not a number"},
      {"range(0,1e9)", "is a range of 1e+09 values"},
      {"[1,2", "has a bracket without an end"},
      {"1],2", "has a ']' too many"},
      {"'a,b",
       "has a quote without an end; a text with a quote in it stands in quotes of the other kind"},
  };
  for (const auto& [text, problem] : cases) {
    EXPECT_EQ(ParseChoices(text).status().message(), problem) << text;
  }
}

TEST(ChoicesTest, AListIsNoChoice) {
  const auto looks = [](absl::string_view text, OptionKind kind = OptionKind::kNumber) {
    return LooksLikeChoices(text, kind);
  };
  EXPECT_TRUE(looks("1,2"));
  EXPECT_TRUE(looks("range(0,3)"));
  EXPECT_TRUE(looks("choice(1)"));
  EXPECT_FALSE(looks("[1,2]"));
  EXPECT_FALSE(looks("'1,2'"));
  EXPECT_FALSE(looks("12"));
  // A bare comma is the list's own; between lists in brackets it is not.
  EXPECT_FALSE(looks("1,2", OptionKind::kList));
  EXPECT_FALSE(looks("[1],2", OptionKind::kList));
  EXPECT_TRUE(looks("[1],[2,3]", OptionKind::kList));
  EXPECT_TRUE(looks("choice(1,2)", OptionKind::kList));
  EXPECT_TRUE(CommasAreOfTheValue("1,2", OptionKind::kList));
  EXPECT_FALSE(CommasAreOfTheValue("1,2", OptionKind::kNumber));
  // One backend per device, but two devices.
  EXPECT_FALSE(looks("cpu:gloo,cuda:nccl", OptionKind::kText));
  EXPECT_TRUE(looks("cpu:gloo,shm", OptionKind::kText));
  EXPECT_TRUE(looks("cuda:0,cuda:1", OptionKind::kText));
  EXPECT_TRUE(looks("choice('cpu:gloo,cuda:nccl', shm)", OptionKind::kText));
}

// In silence the comma would be part of one value.
TEST(ChoicesTest, CommasBesideAnUnbalancedQuoteOrBracketAreLeftToTheParser) {
  for (const OptionKind kind : {OptionKind::kText, OptionKind::kNumber, OptionKind::kList}) {
    for (const char* const text : {"it's,b", "a,\"b", "(a,b", "a],b"}) {
      EXPECT_TRUE(LooksLikeChoices(text, kind)) << text;
      EXPECT_FALSE(ParseChoices(text).ok()) << text;
    }
    for (const char* const text : {"it's", "\"it's,b\"", "(a"}) {
      EXPECT_FALSE(LooksLikeChoices(text, kind)) << text;
    }
  }
  EXPECT_EQ(*ParseChoices("\"it's\",b"), Values({"it's", "b"}));
}

TEST(ChoicesTest, FunctionsOfOtherSweeps) {
  EXPECT_EQ(UnknownSweepFunction("interval(0, 1)"), "interval");
  EXPECT_EQ(UnknownSweepFunction(" shuffle(range(1,3))"), "shuffle");
  EXPECT_EQ(UnknownSweepFunction("range(0,1)"), "");
  EXPECT_EQ(UnknownSweepFunction("intervals"), "");
}

TEST(ChoicesTest, QuotesAroundTheWholeGo) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"a", "a"},
      {"'a'", "a"},
      {"\"a,b\"", "a,b"},
      {"''", ""},
      {"'", "'"},
      {"'a", "'a"},
      {"'it''s'", "it's"},
      {"'a','b'", "'a','b'"},
      {"'a'b'", "'a'b'"},
      {"'a''", "'a''"},
      {"\"a\"b\"", "\"a\"b\""},
      {"it's", "it's"},
      {"'''a'''", "'a'"},
      {"'say \"x\"'", "say \"x\""},
  };
  for (const auto& [text, value] : cases) EXPECT_EQ(Unquoted(text), value) << text;
  for (const char* const value :
       {"", "a", "'", "'a'", "\"a\"", "'a\"b'", "\"it's\"", "''", "a'b'", "${a}", "it's ${a}"}) {
    EXPECT_EQ(Unquoted(Quoted(value)), value) << value;
  }
}

}  // namespace
}  // namespace ddp::config
