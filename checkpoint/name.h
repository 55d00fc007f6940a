// Names of a run's checkpoints and their order. Needs neither torch nor the file system.
//
//   EpochName(3)           "epoch_3"           3 complete epochs
//   EpochStepName(3, 120)  "epoch_3_step_120"  3 complete epochs and a part of the next; 120
//                                              optimizer steps of the whole run
//   StepName(120)          "step_120"          for a run without epochs
//   ParseName("epoch_3")->epochs == 3          any other name ("best", "epoch_03"): nullopt
//   SortByAge(files)                           oldest first
//
// On disk a name is followed by its format's suffix: "epoch_3.pt". Functions are thread-safe.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace ddp::checkpoint {

// A parsed name. Newer ones compare greater; "epoch_N" is less than every "epoch_N_step_S". Names
// with and without epochs have no common order: see SortByAge.
struct CheckpointName {
  std::optional<int64_t> epochs;  // complete ones; unset for a run without epochs
  std::optional<int64_t> steps;   // of the whole run; unset at the end of an epoch

  friend auto operator<=>(const CheckpointName&, const CheckpointName&) = default;
};

// CHECK-fail for negative numbers.
std::string EpochName(int64_t epochs);
std::string EpochStepName(int64_t epochs, int64_t steps);
std::string StepName(int64_t steps);

// The inverse of the three functions above; nullopt for any other text, such as names with leading
// zeros, a sign, a number beyond int64 or trailing characters.
std::optional<CheckpointName> ParseName(absl::string_view name);

// A file or folder with the name of a checkpoint.
struct NamedFile {
  CheckpointName name;
  std::string file;  // with the suffix
};

// Parses a file name that is a checkpoint's name plus one of `suffixes`; nullopt otherwise.
std::optional<NamedFile> ParseFileName(absl::string_view file,
                                       const std::vector<std::string>& suffixes);

// "runs/a/epoch_3.sharded" of "runs/a/epoch_3.sharded/", as shells complete the path of a folder.
std::string WithoutSlashes(absl::string_view path);

// Sorts, oldest first. FailedPrecondition, naming one of each, if some have names by epochs and
// others names by steps alone, which have no common order.
absl::Status SortByAge(std::vector<NamedFile>& files);

}  // namespace ddp::checkpoint
