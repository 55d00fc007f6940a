// A program whose own options have names that every program of config::Program has.
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/options.h"
#include "ddp/config/program.h"
#include "gtest/gtest.h"
#include "launchers/launcher.h"

namespace ddp::config {
namespace {

struct OwnOptions {
  std::string name = "";
  launchers::LaunchOptions launcher = {};
};

// The exit code of a program with an option named `name`, and what it has printed.
std::optional<int> StartWith(const std::string& name, std::string& printed) {
  OwnOptions options;
  OptionList list;
  list.Add({.path = name,
            .set =
                [&options](absl::string_view text) {
                  options.name = std::string(text);
                  return absl::OkStatus();
                },
            .get = [&options] { return options.name; },
            .check = [] { return absl::OkStatus(); }});
  Program program(list, {.about = "For tests.", .launch = &options.launcher});
  char argv0[] = "program";
  char* argv[] = {argv0, nullptr};
  testing::internal::CaptureStderr();
  const std::optional<int> code = program.Start(1, argv);
  printed = testing::internal::GetCapturedStderr();
  return code;
}

TEST(ProgramNamesTest, NamesOfEveryProgramAreTaken) {
  std::string printed;
  EXPECT_EQ(StartWith("model.multirun", printed), std::nullopt) << printed;
  EXPECT_EQ(StartWith("multirun", printed), 2);
  EXPECT_EQ(printed, "error: two options are named multirun\n");
  EXPECT_EQ(StartWith("m", printed), 2);
  EXPECT_EQ(printed, "error: alias m of multirun names another option\n");
}

struct StopOptions {
  int64_t stop_at = 0;
  std::string name = "";
  launchers::LaunchOptions launcher = {};
};
constexpr auto OptionsOf(const StopOptions&) {
  return Options(Option("stop_at", &StopOptions::stop_at, ""),
                 Option("name", &StopOptions::name, ""),
                 Nested("launcher", &StopOptions::launcher, ""));
}

TEST(ProgramNamesTest, OptionsOfTheProcessAreNoPartOfTheConfiguration) {
  StopOptions options;
  Program program(
      ListOptions(options),
      {.about = "For tests.", .launch = &options.launcher, .process_options = {"stop_at"}});
  std::vector<std::string> arguments = {"program", "stop_at=5", "name=x"};
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  EXPECT_EQ(program.Start(static_cast<int>(argv.size()), argv.data()), std::nullopt);
  EXPECT_EQ(program.Configuration().substr(0, 19), "stop_at: 0\nname: x\n");
  EXPECT_EQ(options.stop_at, 5);
}

}  // namespace
}  // namespace ddp::config
