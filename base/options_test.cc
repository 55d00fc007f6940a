#include "base/options.h"

#include <stdlib.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/implementation_options.h"
#include "base/option_flags.h"
#include "base/registry.h"
#include "base/utf8.h"
#include "gtest/gtest.h"

namespace ddp {
namespace {

enum class Mode { kOff, kFast };
constexpr auto OptionNames(Mode) {
  return std::to_array<std::pair<absl::string_view, Mode>>(
      {{"off", Mode::kOff}, {"fast", Mode::kFast}});
}

struct Schedule {
  std::string name = "constant";
  int64_t warmup_steps = 0;
  double gamma = 0.1;
};
constexpr auto OptionsOf(const Schedule&) {
  return Options(
      Option("name", &Schedule::name, "of the learning rate").OneOf("constant", "step", "cosine"),
      Option("warmup_steps", &Schedule::warmup_steps, "steps of linear warm-up").AtLeast(0),
      Option("gamma", &Schedule::gamma, "factor of each decay").Above(0));
}

struct Optimizer {
  std::string name = "sgd";
  double lr = 0.5;
};
std::vector<std::string> OptimizerNames() { return {"adam", "sgd"}; }
constexpr auto OptionsOf(const Optimizer&) {
  return Options(Option("name", &Optimizer::name, "kind").OneOfThese(&OptimizerNames),
                 Option("lr", &Optimizer::lr, "learning rate").AtLeast(0));
}

// Options of a single implementation.
struct SlurmOptions {
  std::string partition = "";
  int seed = 7;
};
constexpr auto OptionsOf(const SlurmOptions&) {
  return Options(Option("partition", &SlurmOptions::partition, "of the cluster"),
                 Option("seed", &SlurmOptions::seed, "of the queue").AtLeast(1));
}
struct LauncherEntry {
  AnyOptions (*options)() = nullptr;
};
struct LauncherTag {
  static constexpr absl::string_view kWhat = "launcher";
};
using Launchers = Registry<LauncherEntry, LauncherTag>;
const Registration<Launchers> kSlurm("slurm", LauncherEntry{&AnyOptions::Of<SlurmOptions>});
const Registration<Launchers> kPlain("plain", LauncherEntry{});

struct LauncherOptions {
  ImplementationOptions implementations = ImplementationOptions::From<Launchers>();
};
constexpr auto OptionsOf(const LauncherOptions&) {
  return Options(Inline(&LauncherOptions::implementations));
}

struct All {
  bool shuffle = true;
  int seed = 0;
  std::optional<int> nproc = std::nullopt;
  absl::Duration timeout = absl::Seconds(300);
  Mode mode = Mode::kOff;
  std::vector<int64_t> sizes = {1, 2};
  int keep = 0;
  Schedule schedule = {};
  Optimizer optimizer = {};
  LauncherOptions launcher = {};
};
constexpr auto OptionsOf(const All&) {
  return Options(
      Option("shuffle", &All::shuffle, "shuffle"), Option("seed", &All::seed, "of everything"),
      Option("nproc_per_node", &All::nproc, "ranks").AtLeast(1),
      Option("timeout_s", &All::timeout, "of a collective").Above(0).AtMost(1e7),
      Option("mode", &All::mode, "of work"), Option("sizes", &All::sizes, "of layers").AtLeast(1),
      Option("keep", &All::keep, "newest to keep").Alias("keep_checkpoints").AtLeast(0),
      Nested("schedule", &All::schedule, "learning rate over time"),
      Nested("optimizer", &All::optimizer, "the optimizer"),
      Nested("launcher", &All::launcher, "how ranks start"));
}

std::string MessageOf(const absl::Status& status) { return std::string(status.message()); }

TEST(ListTest, EveryKindOfValueIsSetAndShown) {
  All all;
  const OptionList list = ListOptions(all);
  const std::map<std::string, std::string> values = {{"shuffle", "false"},
                                                     {"seed", "-3"},
                                                     {"nproc_per_node", "4"},
                                                     {"timeout_s", "1.5"},
                                                     {"mode", "fast"},
                                                     {"sizes", "[5, 6, 7]"},
                                                     {"keep", "2"},
                                                     {"schedule.name", "cosine"},
                                                     {"optimizer.lr", "1e-05"},
                                                     {"launcher.slurm.partition", "gpu"}};
  for (const auto& [path, value] : values) ASSERT_TRUE(list.Set(path, value).ok()) << path;
  EXPECT_FALSE(all.shuffle);
  EXPECT_EQ(all.seed, -3);
  EXPECT_EQ(all.nproc, 4);
  EXPECT_EQ(all.timeout, absl::Milliseconds(1500));
  EXPECT_EQ(all.mode, Mode::kFast);
  EXPECT_EQ(all.sizes, (std::vector<int64_t>{5, 6, 7}));
  EXPECT_EQ(all.schedule.name, "cosine");
  EXPECT_EQ(all.optimizer.lr, 1e-5);
  EXPECT_EQ(all.launcher.implementations.Get<SlurmOptions>("slurm").partition, "gpu");
  std::map<std::string, std::string> table;
  for (const auto& [path, value] : list.Table()) table[path] = value;
  for (const auto& [path, value] : values) EXPECT_EQ(table.at(path), value) << path;
  EXPECT_EQ(table.size(), 14);
}

TEST(ListTest, TextsThatAreNoValueChangeNothing) {
  All all;
  const OptionList list = ListOptions(all);
  for (const auto& [path, value, problem] :
       std::vector<std::tuple<std::string, std::string, std::string>>{
           {"shuffle", "maybe", "is neither true nor false"},
           {"seed", "1.5", "is not a whole number"},
           {"seed", "3000000000", "is too large a number"},
           {"seed", "-3000000000", "is too small a number"},
           {"seed", "9223372036854775808", "is too large a number"},
           {"seed", "-9223372036854775809", "is too small a number"},
           {"seed", "-", "is not a whole number"},
           {"nproc_per_node", "x", "is not a whole number (or auto)"},
           {"timeout_s", "inf", "is no finite time"},
           {"mode", "slow", "is none of off, fast"},
           {"sizes", "[1, x]", "has element 'x', which is not a whole number"},
           {"sizes", "[1, 2", "has only one of the brackets"},
           {"optimizer.lr", "nan", "is not a finite number"}}) {
    const absl::Status status = list.Set(path, value);
    EXPECT_TRUE(absl::StrContains(status.message(), path + "=" + value + " " + problem)) << status;
  }
  EXPECT_EQ(list.Table(), [] {
    All fresh;
    return ListOptions(fresh).Table();
  }());
}

TEST(ListTest, DurationsTakeUnits) {
  All all;
  ASSERT_TRUE(ListOptions(all).Set("timeout_s", "1h30m").ok());
  EXPECT_EQ(all.timeout, absl::Minutes(90));
}

TEST(ListTest, AutoAndNothingUnsetAnOptional) {
  All all;
  all.nproc = 3;
  ASSERT_TRUE(ListOptions(all).Set("nproc_per_node", "auto").ok());
  EXPECT_EQ(all.nproc, std::nullopt);
  EXPECT_TRUE(ValidateOptions(all).ok());
}

TEST(ValidateTest, NamesTheOptionAndItsRange) {
  const std::vector<std::pair<void (*)(All&), std::string>> cases = {
      {[](All& all) { all.nproc = 0; }, "nproc_per_node=0 must be at least 1"},
      {[](All& all) { all.timeout = absl::ZeroDuration(); }, "timeout_s=0 must be more than 0"},
      {[](All& all) { all.timeout = absl::InfiniteDuration(); },
       "timeout_s=inf must be at most 10000000"},
      {[](All& all) {
         all.sizes = {3, 0};
       },
       "sizes=[3, 0] must be at least 1"},
      {[](All& all) { all.schedule.gamma = 0; }, "schedule.gamma=0 must be more than 0"},
      {[](All& all) { all.schedule.gamma = std::nan(""); }, "schedule.gamma=nan must be a number"},
      {[](All& all) { all.optimizer.lr = std::numeric_limits<double>::infinity(); },
       "optimizer.lr=inf must be finite"},
      {[](All& all) { all.schedule.name = "sometimes"; },
       "schedule.name=sometimes is none of constant, step, cosine"},
      {[](All& all) { all.optimizer.name = "lion"; }, "optimizer.name=lion is none of adam, sgd"},
      {[](All& all) { all.launcher.implementations.Mutable<SlurmOptions>("slurm").seed = 0; },
       "launcher.slurm.seed=0 must be at least 1"},
  };
  for (const auto& [spoil, message] : cases) {
    All all;
    EXPECT_TRUE(ValidateOptions(all).ok());
    spoil(all);
    EXPECT_EQ(MessageOf(ValidateOptions(all)), message);
  }
}

struct Listed {
  std::string name = "none of them";
};
std::vector<std::string> OneAndTwo() { return {"one", "two"}; }
constexpr auto OptionsOf(const Listed&) {
  return Options(Option("name", &Listed::name, "a name").Lists(&OneAndTwo));
}

TEST(ValidateTest, ListedNamesAreForTheHelpAlone) {
  Listed listed;
  EXPECT_TRUE(ValidateOptions(listed).ok()) << ValidateOptions(listed);
  EXPECT_TRUE(absl::StrContains(ListOptions(listed).Describe(""), "a name (one, two)"));
}

TEST(Utf8Test, IsThatOfTheStandard) {
  for (const char* text : {"", "a\n", "\u00e9", "\u20ac", "\U0001f600", "\xef\xbf\xbf",
                           "\xf4\x8f\xbf\xbf", "\xed\x9f\xbf", "\xee\x80\x80"}) {
    EXPECT_TRUE(IsUtf8(text)) << text;
    EXPECT_EQ(Printable(text), text);
  }
  for (const auto& [text, escaped] : std::vector<std::pair<const char*, const char*>>{
           {"\xff", "\\xff"},
           {"a\x80z", "a\\x80z"},
           {"\xc3", "\\xc3"},                             // cut off
           {"\xc3(", "\\xc3("},                           // no continuation
           {"\xc0\xaf", "\\xc0\\xaf"},                    // overlong
           {"\xe0\x80\xaf", "\\xe0\\x80\\xaf"},           // overlong
           {"\xed\xa0\x80", "\\xed\\xa0\\x80"},           // a surrogate
           {"\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80"},  // above the last code point
           {"\u00e9\xe9\u00e9", "\u00e9\\xe9\u00e9"}}) {
    EXPECT_FALSE(IsUtf8(text)) << escaped;
    EXPECT_EQ(Printable(text), escaped);
    const bool is_surrogate = text[0] == '\xed';
    EXPECT_EQ(IsUtf8(text, Surrogates::kAccept), is_surrogate) << escaped;
  }
}

TEST(NamesTest, AnUnknownNameIsAnsweredByItsHelpOrTheNamesOfItsGroup) {
  All all;
  const OptionList list = ListOptions(all);
  for (const auto& [name, advice] : std::vector<std::pair<std::string, std::string>>{
           {"optimizer.momentum", "; optimizer has name, lr"},
           {"optimizer_momentum", "; optimizer has name, lr"},
           {"optimiser.momentum", "; optimizer has name, lr"},
           {"optimizer.wd", "; optimizer has name, lr"},
           {"optimizer.learn_rate", "; did you mean lr?"},
           {"optimizer_learning_rate", "; did you mean lr?"},
           {"learn_rate", "; did you mean lr?"},
           {"schedule.decay_factor", "; did you mean gamma?"},
           {"schedule.milestones", "; schedule has name, warmup_steps, gamma"},
           {"launcher.slurm.account", "; launcher.slurm has partition, seed"},
           {"slurm_account", "; launcher.slurm has partition, seed"},
           {"launcher.hostfile", "; launcher has slurm.partition, slurm.seed"},
           {"schedule.gama", "; did you mean gamma, schedule?"},
           {"slurm_partitoin", "; did you mean partition?"},
           {"momentum", ""}}) {
    EXPECT_EQ(MessageOf(list.Find(name).status()),
              absl::StrCat("there is no option '", name, "'", advice));
  }
}

TEST(NamesTest, ANameThatIsCutShortAndTheWordsOfAHelpComeBeforeSimilarNames) {
  OptionList list;
  list.Add({.path = "epochs", .help = "passes over the training set"});
  list.Add({.path = "batch_size", .help = "examples per rank and forward"});
  list.Add({.path = "eval_batch_size", .help = "examples per rank of the evaluation"});
  list.Add({.path = "prefetch_factor", .help = "batches that each thread loads ahead"});
  list.Add({.path = "sync_bn", .help = "batch normalisation over the batches of all ranks"});
  list.Add({.path = "optimizer.lr", .help = "learning rate, which the schedule scales"});
  list.Add({.path = "optimizer.weight_decay", .help = "part of the weights"});
  list.Add({.path = "schedule.name", .help = "schedule of the learning rate"});
  list.Add({.path = "checkpoint.every", .help = "epochs between checkpoints"});
  list.Add({.path = "monitor.learning_rates", .help = "record the learning rate of each group"});
  for (const auto& [name, similar] :
       std::vector<std::pair<std::string, std::string>>{{"batch", "batch_size"},
                                                        {"learning_rate", "lr, learning_rates"},
                                                        {"learning_rats", "learning_rates"},
                                                        {"optimizer.weight", "weight_decay"},
                                                        {"epoch", "epochs"}}) {
    EXPECT_EQ(MessageOf(list.Find(name).status()),
              absl::StrCat("there is no option '", name, "'; did you mean ", similar, "?"));
  }
}

TEST(NamesTest, PathTailGroupAndAlias) {
  All all;
  const OptionList list = ListOptions(all);
  for (const auto& [name, path] : std::vector<std::pair<std::string, std::string>>{
           {"schedule.gamma", "schedule.gamma"},
           {"schedule_gamma", "schedule.gamma"},
           {"gamma", "schedule.gamma"},
           {"optimizer", "optimizer.name"},
           {"keep_checkpoints", "keep"},
           {"slurm.partition", "launcher.slurm.partition"},
           {"slurm_partition", "launcher.slurm.partition"},
           {"launcher_slurm.partition", "launcher.slurm.partition"},
           {"seed", "seed"},  // the whole path comes before the tail of slurm's
           {"slurm_seed", "launcher.slurm.seed"}}) {
    const auto option = list.Find(name);
    ASSERT_TRUE(option.ok()) << name << ": " << option.status();
    EXPECT_EQ((*option)->path, path) << name;
  }
  EXPECT_EQ(MessageOf(list.Find("name").status()),
            "'name' is ambiguous: it may mean schedule.name, optimizer.name");
  EXPECT_EQ(list.Find("amma").status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(absl::StrContains(list.Find("gama").status().message(), "did you mean gamma"));
  EXPECT_EQ(list.Find("arm_steps").status().code(), absl::StatusCode::kNotFound);
}

TEST(NamesTest, ShortNamesMeanTheirOptions) {
  All all;
  const OptionList list = ListOptions(all);
  const auto names = list.ShortNames();
  for (const auto& [path, name] : names) EXPECT_EQ((*list.Find(name))->path, path) << name;
  EXPECT_EQ(names.at("schedule.name"), "schedule");
  EXPECT_EQ(names.at("launcher.slurm.seed"), "slurm_seed");
  EXPECT_EQ(names.at("keep"), "keep_checkpoints");
}

TEST(NamesTest, AnAliasOfOneLetterIsNoShortName) {
  OptionList list;
  list.Add({.path = "sweep.multirun", .aliases = {"m"}});
  EXPECT_EQ(list.ShortNames().at("sweep.multirun"), "multirun");
  EXPECT_TRUE(list.Find("m").ok());
}

struct Twice {
  int a = 0, b = 0;
};
constexpr auto OptionsOf(const Twice&) {
  return Options(Option("a", &Twice::a, "a").Alias("b"), Option("b", &Twice::b, "b"));
}

TEST(NamesTest, TwoOptionsOfOneNameAreFound) {
  All all;
  EXPECT_TRUE(ListOptions(all).CheckNames().ok());
  Twice twice;
  EXPECT_EQ(MessageOf(ListOptions(twice).CheckNames()), "alias b of a names another option");
  OptionList list;
  list.Add({.path = "x.y"});
  list.Add({.path = "x_y"});
  EXPECT_EQ(MessageOf(list.CheckNames()), "two options are named x_y");
  // Parsing fails, so no program with such options runs.
  const char* const argv[] = {"program"};
  EXPECT_EQ(MessageOf(OptionFlags::Parse(1, argv, list).status()), "two options are named x_y");
}

TEST(DescribeTest, HasEveryOptionOnceByGroup) {
  All all;
  const std::string text = "\n" + ListOptions(all).Describe("--");
  for (const auto& [path, name] : ListOptions(all).ShortNames()) {
    const std::vector<std::string> pieces = absl::StrSplit(text, absl::StrCat("\n  --", name, "="));
    EXPECT_EQ(pieces.size(), 2) << path << " as " << name << " in\n" << text;
  }
  EXPECT_TRUE(absl::StrContains(text, "  --timeout_s=300 ")) << text;
  EXPECT_TRUE(absl::StrContains(text, "of a collective (more than 0)")) << text;
  EXPECT_TRUE(absl::StrContains(text, "\nschedule: learning rate over time\n  --schedule=constant"))
      << text;
  EXPECT_TRUE(absl::StrContains(text, "launcher.slurm: options of slurm\n  --partition=")) << text;
}

absl::StatusOr<OptionFlags> ParseArguments(All& all, std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "program");
  return OptionFlags::Parse(static_cast<int>(arguments.size()), arguments.data(), ListOptions(all));
}

TEST(FlagsTest, AllSpellings) {
  All all;
  const auto flags = ParseArguments(all, {"--lr=0.25", "-seed", "5", "--noshuffle",
                                          "--optimizer=adam", "--schedule.warmup_steps=9", "word",
                                          "--keep_checkpoints=3", "--lr=0.75", "--", "--seed=6"});
  ASSERT_TRUE(flags.ok()) << flags.status();
  EXPECT_EQ(all.optimizer.lr, 0.75);
  EXPECT_EQ(all.seed, 5);
  EXPECT_FALSE(all.shuffle);
  EXPECT_EQ(all.optimizer.name, "adam");
  EXPECT_EQ(all.schedule.warmup_steps, 9);
  EXPECT_EQ(all.keep, 3);
  EXPECT_EQ(flags->positional, (std::vector<std::string>{"word", "--seed=6"}));
  EXPECT_FALSE(flags->help);
  EXPECT_TRUE(ParseArguments(all, {"--shuffle"}).ok());
  EXPECT_TRUE(all.shuffle);
  EXPECT_TRUE(ParseArguments(all, {"--help"})->help);
}

// A job's folder in a sweep is named by its choices.
TEST(FlagsTest, APathThatExistsIsNoUnknownOption) {
  const std::string folder = absl::StrCat(getenv("TEST_TMPDIR"), "/x");
  ASSERT_TRUE(MakeDirectories(folder + "/width=0.1-1f3a9c2e").ok());
  ASSERT_EQ(chdir(folder.c_str()), 0);
  All all;
  const auto flags = ParseArguments(all, {"width=0.1-1f3a9c2e", "lr=0.25"});
  ASSERT_TRUE(flags.ok()) << flags.status();
  EXPECT_EQ(flags->positional, std::vector<std::string>{"width=0.1-1f3a9c2e"});
  EXPECT_EQ(all.optimizer.lr, 0.25);
  EXPECT_TRUE(absl::IsNotFound(ParseArguments(all, {"width=0.2"}).status()));
}

TEST(FlagsTest, ErrorsHaveTheNameAsWritten) {
  All all;
  for (const auto& [argument, message] : std::vector<std::pair<const char*, std::string>>{
           {"--sed=1", "--sed: there is no option 'sed'; did you mean seed?"},
           {"--name=x", "--name: 'name' is ambiguous: it may mean schedule.name, optimizer.name"},
           {"--lr", "--lr needs a value: --lr=…"},
           {"-lr=x", "-lr=x is not a finite number"},
           {"--noshuffle=1", "--noshuffle=1: --noshuffle takes no value"},
           {"--nolr", "--nolr: there is no option 'nolr'"}}) {
    EXPECT_TRUE(absl::StartsWith(ParseArguments(all, {argument}).status().message(), message))
        << ParseArguments(all, {argument}).status();
  }
}

TEST(FlagsTest, ValuesAreUtf8WithoutZeroBytes) {
  All all;
  const OptionList list = ListOptions(all);
  OptionSetter setter;
  for (const auto& [value, problem] : std::vector<std::pair<std::string, std::string>>{
           {"caf\xe9", "caf\\xe9 is not UTF-8, as text in logs and checkpoints must be"},
           {std::string("a\0b", 3), "a\\x00b has a zero byte"}}) {
    const absl::Status status =
        setter.Set({"launcher.slurm.partition", value, "--slurm_partition"}, list);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), absl::StrCat("--slurm_partition=", problem));
  }
  EXPECT_TRUE(setter.Set({"launcher.slurm.partition", "caf\u00e9", "p"}, list).ok());
}

struct Said {
  std::string text = "";
};
constexpr auto OptionsOf(const Said&) {
  return Options(Option("text", &Said::text, "what is said").AnyBytes());
}

TEST(FlagsTest, AnyBytesMayBeAllowedButNoZero) {
  Said said;
  const OptionList list = ListOptions(said);
  OptionSetter setter;
  EXPECT_TRUE(setter.Set({"text", "caf\xe9", "--text"}, list).ok());
  EXPECT_EQ(said.text, "caf\xe9");
  EXPECT_EQ(setter.Set({"text", std::string("a\0b", 3), "--text"}, list).message(),
            "--text=a\\x00b has a zero byte");
}

// Also what a program has set.
TEST(ValidateTest, TextsAreUtf8WithoutZeroBytes) {
  All all;
  all.schedule.name = "caf\u00e9";
  EXPECT_FALSE(absl::StrContains(ValidateOptions(all).message(), "UTF-8")) << ValidateOptions(all);
  all.schedule.name = "caf\xe9";
  EXPECT_EQ(ValidateOptions(all).message(),
            "schedule.name=caf\\xe9 is not UTF-8, as text in logs and checkpoints must be");
  Said said = {.text = "caf\xe9"};
  EXPECT_TRUE(ValidateOptions(said).ok()) << ValidateOptions(said);
  said.text = std::string("a\0b", 3);
  EXPECT_EQ(ValidateOptions(said).message(), "text=a\\x00b has a zero byte");
}

TEST(FlagsTest, ALibrarysErrorIsExplainedInTheUsersWords) {
  All all;
  const auto flags = ParseArguments(all, {"--optimizer.lr=-1", "--gamma=0"});
  ASSERT_TRUE(flags.ok());
  const OptionList list = ListOptions(all);
  EXPECT_EQ(flags->Explain(list.Validate(), list), "--gamma=0 must be more than 0");
  // A library validates its own struct, so the path in its error is relative.
  const absl::Status inner = ValidateOptions(all.optimizer);
  EXPECT_EQ(inner.message(), "lr=-1 must be at least 0");
  EXPECT_EQ(flags->Explain(inner, list), "--optimizer.lr=-1 must be at least 0");
  EXPECT_EQ(flags->Explain(InGroup("optimizer", inner), list),
            "--optimizer.lr=-1 must be at least 0");
  EXPECT_EQ(flags->Explain(OptionError("mode", "fast", "is not for today"), list),
            "--mode=fast is not for today");
  // What is named is what the program takes: "--noshuffle=false" it would refuse.
  const auto negated = ParseArguments(all, {"--noshuffle"});
  ASSERT_TRUE(negated.ok());
  EXPECT_EQ(negated->Explain(OptionError("shuffle", "false", "has no effect"), list),
            "--noshuffle has no effect");
  EXPECT_EQ(flags->Explain(absl::NotFoundError("no file"), list), "no file");
  EXPECT_EQ(flags->Explain(absl::NotFoundError("no file \xff"), list), "no file \\xff");
}

TEST(ErrorTest, PathValueAndProblemAreData) {
  const absl::Status error = InGroup("group", OptionError("shm.segment_mb", "0", "must be more"));
  EXPECT_EQ(error.message(), "group.shm.segment_mb=0 must be more");
  const auto problem = ProblemOf(error);
  ASSERT_TRUE(problem.has_value());
  EXPECT_EQ(problem->path, "group.shm.segment_mb");
  EXPECT_EQ(problem->value, "0");
  EXPECT_EQ(problem->problem, "must be more");
  EXPECT_EQ(ProblemOf(absl::NotFoundError("x=0 y")), std::nullopt);
}

}  // namespace
}  // namespace ddp
