// A program whose own options have names that every program of config::Program has.
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/option_list.h"
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

}  // namespace
}  // namespace ddp::config
