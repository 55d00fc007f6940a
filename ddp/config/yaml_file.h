// Configuration files in YAML, of which JSON is a subset.
//
//   # configs/run.yaml
//   defaults: [base, model/cnn]    # configs/base.yaml, configs/model/cnn.yaml, then this file, or
//                                  # where _self_ stands
//   optimizer:
//     lr: 0.1                      # optimizer.lr
//   milestones: [3, 6]
//   log_dir: ${oc.env:HOME}/runs   # references.h
//   sweep:                         # under --multirun only
//     seed: range(0, 3)
//     optimizer.name: [sgd, adam]
//
//   DDP_ASSIGN_OR_RETURN(ConfigFile file, ReadConfigFile("configs/run.yaml", list));
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/option_flags.h"
#include "base/option_list.h"

namespace ddp::config {

// The values of one option in a sweep, at least one.
struct Choices {
  std::string path;  // or "GROUP@": the values are names of files, GROUP/VALUE.yaml
  std::vector<std::string> values;
  std::string written;  // "--seed", "run.yaml:8: seed"
};

struct FileAssignment : OptionAssignment {
  bool has_references = false;  // the value is for ReplaceReferences
};

struct ConfigFile {
  std::vector<FileAssignment> assignments;  // in the order of defaults
  std::vector<Choices> sweep;               // one for an option
  std::vector<OptionAssignment> own;        // of the program's own options
};

// Reads a file and those that it includes, without setting anything. Keys are names that
// OptionList::Find accepts, nested or with dots; at the root also names in `own`, options of the
// program itself. A map may have YAML's merge key ("<<: *anchor"). A file that is included is
// relative to the folder of the one that includes it; ".yaml" may be left out where there is no
// file of that very name. `path` may be a pipe.
//
// Errors, with "FILE:LINE: " where there is one: NotFound for a file that does not exist (with
// similar names) and for unknown options and groups; InvalidArgument for what is not YAML, a key
// that occurs twice, a file that includes itself, and a list for an option that takes one value.
// Thread-safe.
absl::StatusOr<ConfigFile> ReadConfigFile(const std::string& path, const OptionList& list,
                                          const OptionList& own = OptionList());

// Appends what a later file says. It replaces the choices of `file` for an option, and its value
// alone replaces them, too.
void Append(ConfigFile& file, ConfigFile later);

}  // namespace ddp::config
