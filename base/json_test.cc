#include "base/json.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"

namespace ddp {
namespace {

TEST(JsonTest, EveryKindOfValue) {
  const auto value = ParseJson(
      R"( {"a":[1,-2,18446744073709551615,1.0,-0.0,1e3],"b":{"c":null,"d":true},"e":"ä\u00e4\n","":{}} )");
  ASSERT_TRUE(value.ok()) << value.status();
  const nlohmann::json& list = value->at("a");
  EXPECT_EQ(list.at(0).get<int64_t>(), 1);
  EXPECT_TRUE(list.at(1).is_number_integer());
  EXPECT_EQ(list.at(2).get<uint64_t>(), UINT64_MAX);
  EXPECT_TRUE(list.at(3).is_number_float());
  EXPECT_TRUE(std::signbit(list.at(4).get<double>()));
  EXPECT_EQ(list.at(5).get<double>(), 1000);
  EXPECT_TRUE(value->at("b").at("c").is_null());
  EXPECT_EQ(value->at("e"), "ää\n");
  EXPECT_TRUE(value->at("").empty());
  EXPECT_EQ(ParseJson("7")->get<int>(), 7);
}

void ExpectRefused(absl::string_view text, absl::string_view problem, JsonLimits limits = {}) {
  const absl::Status status = ParseJson(text, limits).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
  EXPECT_TRUE(absl::StrContains(status.message(), problem)) << text << ": " << status;
}

TEST(JsonTest, WhatIsNoJsonIsRefused) {
  for (const char* text : {"", " ", "{", "{]", "[1,]", "{\"a\" 1}", "01", "nan", "'a'", "[1] 2",
                           "// c\n1", "\"\xff\"", "\"\\ud800\"", "\"\n\"", "1e999"}) {
    ExpectRefused(text, "is no JSON at byte");
  }
  ExpectRefused(absl::string_view("{}\0", 3), "is no JSON at byte 2");
  ExpectRefused(absl::string_view("[\0]", 3), "is no JSON at byte 1");
}

TEST(JsonTest, DuplicateKeysAreRefused) {
  ExpectRefused(R"({"a":1,"b":{"a":2},"a":3})", "has the key \"a\" twice");
  ExpectRefused(R"([{"x\u0079":1,"xy":1}])", "has the key \"xy\" twice");
  EXPECT_TRUE(ParseJson(R"([{"a":1},{"a":2}])").ok());
}

TEST(JsonTest, LimitsHold) {
  EXPECT_TRUE(ParseJson("[[{}]]", {.depth = 3}).ok());
  ExpectRefused("[[[{}]]]", "more than 3 levels", {.depth = 3});
  ExpectRefused(std::string(10'000'000, '['), "more than 64 levels");
  ExpectRefused(std::string(1'000'000, '['), "is no JSON", {.depth = ~size_t{0}});
  EXPECT_TRUE(ParseJson("[[1,2],[3,4]]", {.items = 2}).ok());
  ExpectRefused("[1,2,3]", "more than 2 items", {.items = 2});
  ExpectRefused("[1,[2,3]]", "more than 4 values", {.values = 4});
  EXPECT_TRUE(ParseJson("[1,[2,3]]", {.values = 5}).ok());
}

}  // namespace
}  // namespace ddp
