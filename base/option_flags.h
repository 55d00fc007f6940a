// A command line as options.
//
//   TrainOptions options;
//   absl::StatusOr<OptionFlags> flags = OptionFlags::Parse(argc, argv, ListOptions(options));
//   if (flags.ok() && flags->help) { puts(list.Describe("--")…); return 0; }
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

// What a command line held besides values of options. A value.
class OptionFlags {
 public:
  // Sets the options that arguments 1 … argc-1 name, from left to right, the last one winning:
  // --name=value, --name value, for bools also --name and --noname; "--" ends the flags; one dash
  // does for two. Names as OptionList::Find takes them. Error messages have the names as they were
  // written. Nothing is validated but each value's type.
  static absl::StatusOr<OptionFlags> Parse(int argc, const char* const* argv,
                                           const OptionList& list);

  // The message of an error, with options named as the command line did ("--lr=-1 must be at least
  // 0"), or by their short names where it did not name them.
  std::string Explain(const absl::Status& status, const OptionList& list) const;

  bool help = false;                    // --help or -h was there
  std::vector<std::string> positional;  // arguments that are no flags, in order

 private:
  std::map<std::string, std::string> written_;  // path -> "--lr"
};

}  // namespace ddp
