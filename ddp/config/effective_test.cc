#include "ddp/config/effective.h"

#include <cstdlib>
#include <fstream>
#include <random>
#include <string>
#include <utility>
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
  std::vector<double> reals = {};
  absl::Duration wait = absl::Seconds(90);
  Inner optimizer = {};
  std::string folder = "here";
};
constexpr auto OptionsOf(const Outer&) {
  return Options(Option("text", &Outer::text, ""), Option("flag", &Outer::flag, ""),
                 Option("count", &Outer::count, ""), Option("numbers", &Outer::numbers, ""),
                 Option("words", &Outer::words, ""), Option("reals", &Outer::reals, ""),
                 Option("wait_s", &Outer::wait, ""), Nested("optimizer", &Outer::optimizer, ""),
                 Option("folder", &Outer::folder, "").Incidental());
}

TEST(EffectiveTest, NestsAndQuotesWhatYamlWouldMisread) {
  Outer options = {.text = "null", .count = 3, .numbers = {1, 2}, .words = {"a", "7", "no"}};
  EXPECT_EQ(ToYaml(ListOptions(options)),
            "text: \"null\"\nflag: false\ncount: 3\nnumbers: [1, 2]\nwords: [a, \"7\", \"no\"]\n"
            "reals: []\nwait_s: 90\noptimizer:\n  name: sgd\n  lr: 0.1\nfolder: here\n");
}

// What YAML 1.1, whose readers PyYAML is one of, takes for the same value of the same type.
TEST(EffectiveTest, GoldenValues) {
  const std::vector<std::pair<std::string, std::string>> texts = {
      {"", R"("")"},
      {"plain", "plain"},
      {"/a/b.c", "/a/b.c"},
      {"cpu:shm,cuda:nccl", "cpu:shm,cuda:nccl"},
      {"~", R"("~")"},
      {"Yes", R"("Yes")"},
      {"12", R"("12")"},
      {"1e-05", R"("1e-05")"},
      {"it's", R"("it's")"},
      {"a \"b\"", R"("a \"b\"")"},
      {"a\\b", R"("a\\b")"},
      {"two\nlines\tand \x01", R"("two\nlines\tand \x01")"},
      {"gr\xC3\xBCn", "\"gr\xC3\xBCn\""},
      {"\xC2\x85", R"("\x85")"},
      {"\xE2\x80\xA8", R"("\u2028")"},
      {"\xEF\xBB\xBF", R"("\ufeff")"},
      {"12:30:45", R"("12:30:45")"},
      {"0o7", R"("0o7")"},
      {".inf", R"(".inf")"},
      {"<<", R"("<<")"},
      {"=", R"("=")"},
      {"${lr}", R"("${lr}")"},
      {"--exclude=node[03-05]", R"("--exclude=node[03-05]")"},
  };
  for (const auto& [text, yaml] : texts) {
    Outer options = {.text = text};
    const std::string written = ToYaml(ListOptions(options));
    EXPECT_EQ(written.substr(0, written.find("\nflag:")), "text: " + yaml);
  }
  const auto line = [](Outer options, const std::string& name) {
    const std::string written = "\n" + ToYaml(ListOptions(options));
    const size_t begin = written.find("\n" + name + ":") + 1;
    return written.substr(begin, written.find('\n', begin) - begin);
  };
  EXPECT_EQ(line({.words = {"--exclude=node[03-05]", "a:b", "x=y", "7", "1e-05"}}, "words"),
            R"(words: ["--exclude=node[03-05]", "a:b", x=y, "7", "1e-05"])");
  EXPECT_EQ(line({.reals = {1, 0.5, 1e-05, 1e+30}}, "reals"), "reals: [1, 0.5, 1.0e-05, 1.0e+30]");
  EXPECT_EQ(line({.optimizer = {.lr = 1e-05}}, "  lr"), "  lr: 1.0e-05");
  EXPECT_EQ(line({.optimizer = {.lr = 2.5e-07}}, "  lr"), "  lr: 2.5e-07");
}

// Writes the options, reads them back, and compares.
void ExpectReadBack(Outer options) {
  const std::string path = absl::StrCat(std::getenv("TEST_TMPDIR"), "/effective.yaml");
  const OptionList list = ListOptions(options);
  const auto before = list.Table();
  const std::string text = ToYaml(list);
  EXPECT_EQ(list.Table(), before) << "written without a trace";
  std::ofstream(path) << text;
  options = Outer();
  const absl::StatusOr<ConfigFile> file = ReadConfigFile(path, list);
  ASSERT_TRUE(file.ok()) << text << ": " << file.status();
  for (const FileAssignment& assignment : file->assignments) {
    EXPECT_FALSE(assignment.has_references) << text;
    ASSERT_TRUE(list.Set(assignment.path, assignment.value).ok()) << assignment.written;
  }
  EXPECT_EQ(list.Table(), before) << text;
}

TEST(EffectiveTest, ReadsBackToTheSameValues) {
  for (const char* const text :
       {"",       "plain",       "~",         "true",        "12",   "1e3",
        "a: b",   "a #b",        "- x",       "[1]",         "{a}",  "'q'",
        "\"q\"",  "back\\slash", "tab\there", "line\nbreak", "grün", "cpu:shm,cuda:nccl",
        "/a/b c", "*x",          "&x",        "!x",          "%x",   "@x",
        "0x1F",   "2026-11-23",  ".5",        "end:",        "a=b"}) {
    ExpectReadBack({.text = text, .flag = true, .words = {"x", "y z"}, .optimizer = {.lr = 1e-30}});
  }
}

// Texts of characters that mean something to YAML, to lists or to references.
TEST(EffectiveTest, AnyTextIsReadBack) {
  const std::vector<std::string> pieces = {"a",
                                           "Z",
                                           "0",
                                           "7",
                                           "e",
                                           "-",
                                           "+",
                                           ".",
                                           ",",
                                           ":",
                                           ";",
                                           "=",
                                           "[",
                                           "]",
                                           "{",
                                           "}",
                                           "(",
                                           ")",
                                           "'",
                                           "\"",
                                           "\\",
                                           "/",
                                           "#",
                                           "&",
                                           "*",
                                           "!",
                                           "|",
                                           ">",
                                           "<",
                                           "%",
                                           "@",
                                           "`",
                                           "?",
                                           "~",
                                           "$",
                                           "_",
                                           " ",
                                           "\t",
                                           "\n",
                                           "\r",
                                           "\x01",
                                           "\x7f",
                                           "\xC2\x85",
                                           "\xC2\xA0",
                                           "\xC3\xBC",
                                           "\xE2\x80\xA9",
                                           "\xEF\xBB\xBF",
                                           "\xF0\x9F\x98\x80",
                                           "${",
                                           "<<",
                                           "null",
                                           "true",
                                           "1e-05",
                                           "auto",
                                           ": ",
                                           " #",
                                           "- "};
  std::mt19937 random(30);
  const auto pick = [&](size_t n) { return random() % n; };
  int lists = 0;
  for (int i = 0; i < 1000; ++i) {
    std::vector<std::string> texts(3);
    for (std::string& text : texts) {
      for (size_t left = pick(7); left > 0; --left) text += pieces[pick(pieces.size())];
    }
    Outer options = {.text = texts[0], .optimizer = {.name = texts[1]}};
    // Lists hold what their text can say.
    const std::string list = absl::StrCat("[", texts[1], ", ", texts[2], "]");
    if (ParseOption(list, options.words).ok() && FormatOption(options.words) == list) ++lists;
    ASSERT_NO_FATAL_FAILURE(ExpectReadBack(options)) << i;
    if (HasFailure()) break;
  }
  EXPECT_GT(lists, 100);
}

TEST(EffectiveTest, IdentityIsOfWhatTheRunComputes) {
  Outer options;
  const OptionList list = ListOptions(options);
  const auto defaults = list.Table();
  const std::string id = Identity(list, defaults, {"text"});
  EXPECT_EQ(id.size(), 32);
  options.text = "x";
  options.folder = "there";
  EXPECT_EQ(Identity(list, defaults, {"text"}), id);
  options.optimizer.lr = 0.2;
  const std::string other = Identity(list, defaults, {"text"});
  EXPECT_NE(other, id);
  // An option that a later version adds has its default, wherever it stands.
  Outer later;
  OptionList longer;
  longer.Add({.path = "added", .get = [] { return std::string("5"); }});
  const OptionList rest = ListOptions(later);
  for (const OptionRef& option : rest.options()) longer.Add(option);
  const auto later_defaults = longer.Table();
  EXPECT_EQ(Identity(longer, later_defaults, {"text"}), id);
  later.optimizer.lr = 0.2;
  EXPECT_EQ(Identity(longer, later_defaults, {"text"}), other);
}

TEST(EffectiveTest, DifferencesAreOfWhatTheRunComputes) {
  Outer now, then;
  now.optimizer.lr = 0.2;
  now.folder = "there";  // incidental
  now.text = "0x1";
  const std::string new_text = ToYaml(ListOptions(now)), old_text = ToYaml(ListOptions(then));
  std::vector<std::string> found;
  for (const auto& [path, is, was] : Differences(ListOptions(now), new_text, old_text)) {
    found.push_back(absl::StrCat(path, " ", is, " ", was));
  }
  std::sort(found.begin(), found.end());
  EXPECT_EQ(found, (std::vector<std::string>{"optimizer.lr 0.2 0.1", "text 0x1 "}));
  // Another version has other options, and may write numbers otherwise.
  EXPECT_EQ(Differences(ListOptions(now), new_text, "optimizer:\n  lr: 2e-1\nelse: 3\n").size(),
            0u);
  for (const std::string text : {"", "a: [", "&a [*a]", "optimizer: 3", "[1, 2]", "\xff"}) {
    EXPECT_TRUE(Differences(ListOptions(now), new_text, text).empty()) << text;
  }
}

// It has been written as "auto".
TEST(EffectiveTest, AnUnsetOptionalIsNoPartOfTheIdentity) {
  std::string value;
  OptionList list;
  list.Add({.path = "limit", .get = [&] { return value; }});
  const auto defaults = list.Table();
  const std::string id = Identity(list, defaults, {});
  value = "auto";
  EXPECT_EQ(Identity(list, defaults, {}), id);
  value = "7";
  EXPECT_NE(Identity(list, defaults, {}), id);
}

}  // namespace
}  // namespace ddp::config
