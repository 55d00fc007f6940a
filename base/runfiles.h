// Data that Bazel put beside a program: the `data` of its targets, "runfiles".
//
//   // In BUILD: data = ["@fashion_mnist//:data"]
//   DDP_ASSIGN_OR_RETURN(std::string folder, Runfile("fashion_mnist/data/fashion"));
//
// Works under `bazel run` and `bazel test`, for a program started by its path in bazel-bin from any
// folder or through a link to it, and in programs of other workspaces that depend on this one.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/environment.h"

namespace ddp {

// Path of an existing file or folder of this program's runfiles. `path` begins with the name of
// its repository. NotFound lists the places that were searched. Thread-safe.
absl::StatusOr<std::string> Runfile(absl::string_view path);

namespace internal {

// Folders that may be the root of the runfiles of the program at path `executable`, in the order
// in which they are searched: what the environment names, FILE.runfiles beside the program, and
// the runfiles tree that the program itself lies in.
std::vector<std::string> RunfilesRoots(const Environment& env, absl::string_view executable);

// The first of `roots` that has `path`.
absl::StatusOr<std::string> FindRunfile(absl::string_view path,
                                        const std::vector<std::string>& roots);

}  // namespace internal

}  // namespace ddp
