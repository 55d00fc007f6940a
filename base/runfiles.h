// Bazel runfiles: the `data` of a program's targets.
//
//   // In BUILD: data = ["@fashion_mnist//:data"]
//   DDP_ASSIGN_OR_RETURN(std::string folder, Runfile("fashion_mnist/data/fashion"));
//
// Works under `bazel run` and `bazel test`, for programs started from bazel-bin by path or symlink
// from any folder, and in workspaces and modules that depend on this one.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/environment.h"

namespace ddp {

// Path of an existing file or folder in this program's runfiles. `path` starts with the name of its
// Bazel repository, as BUILD files call it: those of this repository, or else of the main one.
// NotFound lists the folders that were searched. Thread-safe.
absl::StatusOr<std::string> Runfile(absl::string_view path);

namespace internal {

// Candidate runfiles roots of the program `executable`, in search order: $RUNFILES_DIR,
// $TEST_SRCDIR, EXECUTABLE.runfiles, and the runfiles tree that contains the program.
std::vector<std::string> RunfilesRoots(const Environment& env, absl::string_view executable);

// The first of `roots` that has `path`. With Bazel modules, the folders of a root have canonical
// repository names ("libtorch_ddp~~dependencies~fashion_mnist"). Its file _repo_mapping has lines
// "SOURCE,NAME,FOLDER": BUILD files of repository SOURCE refer to FOLDER as NAME. Looks NAME up for
// repository `source`, then for the main repository, "".
absl::StatusOr<std::string> FindRunfile(absl::string_view path,
                                        const std::vector<std::string>& roots,
                                        absl::string_view source = "");

}  // namespace internal

}  // namespace ddp
