// Sets options from a command line.
//
//   TrainOptions options;
//   const OptionList list = ListOptions(options);
//   const absl::StatusOr<OptionFlags> flags = OptionFlags::Parse(argc, argv, list);
//   if (!flags.ok()) …
//   if (flags->help) { puts(list.Describe("--").c_str()); return 0; }
//   const absl::Status status = list.Validate();
//   if (!status.ok()) fprintf(stderr, "error: %s\n", flags->Explain(status, list).c_str());
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/option_list.h"

namespace ddp {

// An option, its new value, and how the user wrote its name.
struct OptionAssignment {
  std::string path;
  std::string value;
  std::string written;  // "--lr", "optimizer.lr", "base.yaml:3: optimizer.lr"
};

// A parsed command line; no options have been set yet. A value.
struct CommandLine {
  bool help = false;                          // --help or -h was given
  std::vector<OptionAssignment> assignments;  // left to right
  std::vector<std::string> positional;        // other arguments, in order

  // Takes --name=value, --name value, name=value, and for bools --name and --noname; one dash works
  // like two, and in a flag's name '-' like '_'; "--" ends the flags. An argument without dashes
  // whose name is no option's and which is a path that exists is positional. Names are those that
  // OptionList::Find accepts. NotFound for an unknown name; InvalidArgument for an ambiguous name
  // or a missing value: behind a blank, what looks like a flag is none. Messages have names as
  // written. Errors of OptionList::CheckNames: a mistake in the program shows in each of its runs.
  static absl::StatusOr<CommandLine> Read(int argc, const char* const* argv,
                                          const OptionList& list);
};

// Sets options, and explains errors with the names that the user wrote. Thread-compatible.
class OptionSetter {
 public:
  // Checks the type, and that the value is UTF-8 (but of OptionSpec::AnyBytes) without zero bytes;
  // not the range: call OptionList::Validate. The message of an error has the name as written.
  absl::Status Set(const OptionAssignment& assignment, const OptionList& list);

  // The message of `status`. An option is named as it was written ("--lr=-1 must be at least 0"),
  // or by its short name as a flag if it was not. Bytes that are not UTF-8 are written as \xNN.
  std::string Explain(const absl::Status& status, const OptionList& list) const;

  // Returns how the option was written last; nullopt if it was not.
  std::optional<std::string> Written(const std::string& path) const;

 private:
  std::map<std::string, std::string> written_;  // by path
};

// The rest of a command line, after its options have been set. A value.
class OptionFlags {
 public:
  // Reads a CommandLine and sets its options, left to right; the last value wins. Errors of
  // CommandLine::Read and OptionSetter::Set.
  static absl::StatusOr<OptionFlags> Parse(int argc, const char* const* argv,
                                           const OptionList& list);

  std::string Explain(const absl::Status& status, const OptionList& list) const {
    return setter_.Explain(status, list);
  }

  bool help = false;
  std::vector<std::string> positional;

 private:
  OptionSetter setter_;
};

}  // namespace ddp
