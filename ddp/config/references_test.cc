#include "ddp/config/references.h"

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace ddp::config {
namespace {

absl::StatusOr<std::string> Lookup(absl::string_view name) {
  if (name == "lr") return "0.1";
  return absl::NotFoundError(absl::StrCat("no ", name));
}

TEST(ReferencesTest, AreReplaced) {
  setenv("REFERENCES_TEST", "here", 1);
  setenv("REFERENCES_EMPTY", "", 1);
  unsetenv("REFERENCES_NONE");
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"plain $ {text}", "plain $ {text}"},
      {"${lr}", "0.1"},
      {"a-${ lr }/${lr}", "a-0.1/0.1"},
      {"${oc.env:REFERENCES_TEST}/x", "here/x"},
      {"${oc.env:REFERENCES_TEST,other}", "here"},
      {"${oc.env:REFERENCES_EMPTY}", ""},
      {"${oc.env:REFERENCES_NONE,a b}", "a b"},
      {"${oc.env:REFERENCES_NONE,}", ""},
      {"${oc.env:REFERENCES_NONE,${lr}}", "0.1"},
      {"\\${lr}", "${lr}"},
  };
  for (const auto& [text, value] : cases) {
    const absl::StatusOr<std::string> replaced = ReplaceReferences(text, &Lookup);
    ASSERT_TRUE(replaced.ok()) << text << ": " << replaced.status();
    EXPECT_EQ(*replaced, value) << text;
  }
}

TEST(ReferencesTest, WhatIsWrongIsSaid) {
  unsetenv("REFERENCES_NONE");
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"${lr", "has a '${' without its '}'; in quotes it is text"},
      {"${none}", "no none"},
      {"${oc.env:REFERENCES_NONE}",
       "has '${oc.env:REFERENCES_NONE}', but the environment has no REFERENCES_NONE; a default: "
       "${oc.env:REFERENCES_NONE,VALUE}"},
      {"x${now:%Y}",
       "has '${now:%Y}', but only ${oc.env:NAME} and ${OPTION} are replaced here; in quotes it is "
       "text"},
  };
  for (const auto& [text, problem] : cases) {
    EXPECT_EQ(ReplaceReferences(text, &Lookup).status().message(), problem) << text;
  }
  std::string deep = "x";
  for (int i = 0; i < 100; ++i) deep = absl::StrCat("${oc.env:REFERENCES_NONE,", deep, "}");
  EXPECT_EQ(ReplaceReferences(deep, &Lookup).status().message(),
            "has too many levels of references");
}

}  // namespace
}  // namespace ddp::config
