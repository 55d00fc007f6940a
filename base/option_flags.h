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
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/option_list.h"

namespace ddp {

// What a command line has besides option values. A value.
class OptionFlags {
 public:
  // Sets the options in `list` from arguments 1 … argc-1, left to right; the last value wins. Takes
  // --name=value, --name value, and for bools --name and --noname; one dash works like two; "--"
  // ends the flags. Names are those that OptionList::Find accepts. Checks the type of each value,
  // not its range: call OptionList::Validate. NotFound for an unknown name; InvalidArgument for an
  // ambiguous name, a missing value or a value of the wrong type. Messages have names as written.
  static absl::StatusOr<OptionFlags> Parse(int argc, const char* const* argv,
                                           const OptionList& list);

  // The message of `status`. An option is named as on the command line ("--lr=-1 must be at least
  // 0"), or by its short name if it was not given there.
  std::string Explain(const absl::Status& status, const OptionList& list) const;

  bool help = false;                    // --help or -h was given
  std::vector<std::string> positional;  // other arguments, in order

 private:
  std::map<std::string, std::string> written_;  // path -> "--lr"
};

}  // namespace ddp
