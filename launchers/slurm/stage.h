// Copies a program and its Bazel runfiles to a folder that is named by their contents, so that a
// rebuild changes no job that waits in a queue.
//
//   DDP_ASSIGN_OR_RETURN(StagedProgram staged,
//                        StageProgram("/repo/bazel-bin/tools/train", "/shared/stage/builds"));
//   staged.path;  // "/shared/stage/builds/HASH/train.runfiles/workspace/tools/train"
//
// Layout: BUILDS/HASH/PROGRAM.runfiles is the tree of runfiles with the contents of the files that
// its links point to; the program is the one in that tree, where it finds its libraries (RUNPATHs
// are relative to it) and its runfiles (base/runfiles.h). A program without runfiles is
// BUILDS/HASH/PROGRAM. BUILDS/known has the hashes of builds that were read before, so that an
// unchanged build is recognised without reading it. Everything is replaced atomically: any number
// of processes may stage at once.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace ddp::launchers::slurm {

struct StagedProgram {
  std::string hash;  // of paths, contents and executable bits: base/digest.h
  std::string path;  // of the program in its staged build
};

// Copies `program`, an absolute path, and its runfiles into a folder of `builds`, also an absolute
// path, unless they are there. Errors: NotFound for a runfile that does not exist; Aborted if the
// program is being rebuilt; those of base/file.h. Thread-safe.
absl::StatusOr<StagedProgram> StageProgram(const std::string& program, const std::string& builds);

// Returns what StageProgram would return. Writes nothing.
absl::StatusOr<StagedProgram> FindStaged(const std::string& program, const std::string& builds);

}  // namespace ddp::launchers::slurm
