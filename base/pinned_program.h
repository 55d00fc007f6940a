// A program's file as it is now, for processes that are started later.
//
//   DDP_ASSIGN_OR_RETURN(PinnedProgram program, PinnedProgram::Open("/bazel-bin/tools/train"));
//   …a build replaces the file…
//   options.argv[0] = program.Path();  // starts the former all the same
#pragma once

#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace ddp {

// Owns a descriptor, which programs that this process executes do not inherit. Movable; const
// methods are thread-safe.
class PinnedProgram {
 public:
  // For this process's own program, opens the file that the process was started from, also if a
  // build has replaced it since. InvalidArgument for a name without a slash, which is looked up in
  // PATH; errors of base/file.h.
  static absl::StatusOr<PinnedProgram> Open(const std::string& path);

  // Returns where this process or its children can execute it: `path`, which reads better in lists
  // of processes, as long as the file is there. Always `path` for a script, which its interpreter
  // opens by this name.
  std::string Path() const;

 private:
  PinnedProgram(std::string path, UniqueFd fd) : path_(std::move(path)), fd_(std::move(fd)) {}

  std::string path_;
  UniqueFd fd_;
};

}  // namespace ddp
