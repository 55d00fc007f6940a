// Configuration files in YAML, of which JSON is a subset.
//
//   # configs/run.yaml
//   defaults: [base, model/cnn]    # configs/base.yaml, then configs/model/cnn.yaml, then this file
//   optimizer:
//     lr: 0.1                      # optimizer.lr
//   milestones: [3, 6]
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
  std::string path;
  std::vector<std::string> values;
  std::string written;  // "--seed", "run.yaml:8: seed"
};

struct ConfigFile {
  std::vector<OptionAssignment> assignments;  // of included files first
  std::vector<Choices> sweep;
};

// Reads a file and those that it includes, without setting anything. Keys are names that
// OptionList::Find accepts, nested or with dots. A file that is included is relative to the folder
// of the one that includes it; ".yaml" may be left out.
//
// Errors, with "FILE:LINE: " where there is one: NotFound for a file that does not exist (with
// similar names) and for unknown options; InvalidArgument for what is not YAML, a key that occurs
// twice, a file that includes itself, a list for an option that takes one value, and "${…}", which
// is not replaced here. Thread-safe.
absl::StatusOr<ConfigFile> ReadConfigFile(const std::string& path, const OptionList& list);

}  // namespace ddp::config
