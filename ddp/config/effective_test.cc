#include "ddp/config/effective.h"

#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/options.h"
#include "ddp/config/yaml_file.h"
#include "gtest/gtest.h"

namespace ddp::config {
namespace {

struct Inner {
  std::string name = "sgd";
  double lr = 0.1;
};
constexpr auto OptionsOf(const Inner&) {
  return Options(Option("name", &Inner::name, ""), Option("lr", &Inner::lr, ""));
}

struct Outer {
  std::string text = "";
  bool flag = false;
  std::optional<int> count = std::nullopt;
  std::vector<int64_t> numbers = {};
  std::vector<std::string> words = {};
  absl::Duration wait = absl::Seconds(90);
  Inner optimizer = {};
  std::string folder = "here";
};
constexpr auto OptionsOf(const Outer&) {
  return Options(Option("text", &Outer::text, ""), Option("flag", &Outer::flag, ""),
                 Option("count", &Outer::count, ""), Option("numbers", &Outer::numbers, ""),
                 Option("words", &Outer::words, ""), Option("wait_s", &Outer::wait, ""),
                 Nested("optimizer", &Outer::optimizer, ""),
                 Option("folder", &Outer::folder, "").Incidental());
}

TEST(EffectiveTest, NestsAndQuotesWhatYamlWouldMisread) {
  Outer options = {.text = "null", .count = 3, .numbers = {1, 2}, .words = {"a", "7", "no"}};
  EXPECT_EQ(ToYaml(ListOptions(options)),
            "text: \"null\"\nflag: false\ncount: 3\nnumbers: [1, 2]\nwords: [a, 7, \"no\"]\n"
            "wait_s: 90\noptimizer:\n  name: sgd\n  lr: 0.1\nfolder: here\n");
}

TEST(EffectiveTest, ReadsBackToTheSameValues) {
  const std::string path = absl::StrCat(std::getenv("TEST_TMPDIR"), "/effective.yaml");
  for (const char* const text :
       {"",       "plain",       "~",         "true",        "12",   "1e3",
        "a: b",   "a #b",        "- x",       "[1]",         "{a}",  "'q'",
        "\"q\"",  "back\\slash", "tab\there", "line\nbreak", "grün", "cpu:shm,cuda:nccl",
        "/a/b c", "*x",          "&x",        "!x",          "%x",   "@x",
        "0x1F",   "2026-11-23",  ".5",        "end:",        "a=b"}) {
    Outer options = {.text = text, .flag = true, .words = {"x", "y z"}, .optimizer = {.lr = 1e-30}};
    const OptionList list = ListOptions(options);
    const auto before = list.Table();
    std::ofstream(path) << ToYaml(list);
    options = Outer();
    const absl::StatusOr<ConfigFile> file = ReadConfigFile(path, list);
    ASSERT_TRUE(file.ok()) << text << ": " << file.status();
    for (const OptionAssignment& assignment : file->assignments) {
      ASSERT_TRUE(list.Set(assignment.path, assignment.value).ok()) << assignment.written;
    }
    EXPECT_EQ(list.Table(), before) << text;
  }
}

TEST(EffectiveTest, IdentityIsOfWhatTheRunComputes) {
  Outer options;
  const OptionList list = ListOptions(options);
  const std::string id = Identity(list, {"text"});
  EXPECT_EQ(id.size(), 32);
  options.text = "x";
  options.folder = "there";
  EXPECT_EQ(Identity(list, {"text"}), id);
  options.optimizer.lr = 0.2;
  EXPECT_NE(Identity(list, {"text"}), id);
}

}  // namespace
}  // namespace ddp::config
