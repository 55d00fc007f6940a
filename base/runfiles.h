// Bazel runfiles: the `data` of a program's targets.
//
//   // In BUILD: data = ["@fashion_mnist//:data"]
//   DDP_ASSIGN_OR_RETURN(std::string folder, Runfile("fashion_mnist/data/fashion"));
//
// Works under `bazel run` and `bazel test`, for programs started from bazel-bin by path or symlink
// from any folder, and in workspaces that depend on this one.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/environment.h"

namespace ddp {

// Path of an existing file or folder in this program's runfiles. `path` starts with the name of its
// Bazel repository. NotFound lists the folders that were searched. Thread-safe.
absl::StatusOr<std::string> Runfile(absl::string_view path);

namespace internal {

// Candidate runfiles roots of the program `executable`, in search order: $RUNFILES_DIR,
// $TEST_SRCDIR, EXECUTABLE.runfiles, and the runfiles tree that contains the program.
std::vector<std::string> RunfilesRoots(const Environment& env, absl::string_view executable);

// The first of `roots` that has `path`.
absl::StatusOr<std::string> FindRunfile(absl::string_view path,
                                        const std::vector<std::string>& roots);

}  // namespace internal

}  // namespace ddp
