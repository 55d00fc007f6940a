#include "ddp/config/choices.h"

#include <string>
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
}

TEST(ChoicesTest, RangesStopBeforeTheirEnd) {
  EXPECT_EQ(*ParseChoices("range(0,3)"), Values({"0", "1", "2"}));
  EXPECT_EQ(*ParseChoices("range(5, 0, -2)"), Values({"5", "3", "1"}));
  EXPECT_EQ(*ParseChoices("range(0, 0.5, 0.1)"), Values({"0", "0.1", "0.2", "0.3", "0.4"}));
  EXPECT_EQ(*ParseChoices("range(1, 2, 0.5)"), Values({"1", "1.5"}));
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
      {"'a,b", "has a quote without an end"},
  };
  for (const auto& [text, problem] : cases) {
    EXPECT_EQ(ParseChoices(text).status().message(), problem) << text;
  }
}

TEST(ChoicesTest, AListIsNoChoice) {
  EXPECT_TRUE(LooksLikeChoices("1,2"));
  EXPECT_TRUE(LooksLikeChoices("range(0,3)"));
  EXPECT_TRUE(LooksLikeChoices("choice(1)"));
  EXPECT_FALSE(LooksLikeChoices("[1,2]"));
  EXPECT_FALSE(LooksLikeChoices("'1,2'"));
  EXPECT_FALSE(LooksLikeChoices("12"));
}

}  // namespace
}  // namespace ddp::config
