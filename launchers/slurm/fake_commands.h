// For tests: shell scripts in place of SLURM's commands.
//
//   FakeCommands commands("submits");
//   commands.Write("sbatch", "echo 7");  // found in PATH while `commands` exists
#pragma once

#include <stdlib.h>

#include <string>

#include "absl/log/absl_check.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "gtest/gtest.h"

namespace ddp::launchers::slurm {

// A new folder that comes first in PATH. Only one may exist at a time. Thread-compatible.
class FakeCommands {
 public:
  explicit FakeCommands(absl::string_view name)
      : folder_(absl::StrCat(absl::StripSuffix(testing::TempDir(), "/"), "/", name)),
        path_(getenv("PATH")) {
    ABSL_CHECK_OK(RemoveTree(folder_));
    ABSL_CHECK_OK(MakeDirectories(folder_));
    setenv("PATH", absl::StrCat(folder_, ":", path_).c_str(), 1);
  }
  FakeCommands(const FakeCommands&) = delete;
  FakeCommands& operator=(const FakeCommands&) = delete;
  ~FakeCommands() { setenv("PATH", path_.c_str(), 1); }

  // $HERE is folder() in `body`.
  void Write(absl::string_view name, absl::string_view body) {
    const std::string path = absl::StrCat(folder_, "/", name);
    ABSL_CHECK_OK(RemoveTree(path));
    absl::StatusOr<FileWriter> writer = FileWriter::Create(path, FileSystem::Default(), 0777);
    ABSL_CHECK_OK(writer.status());
    ABSL_CHECK_OK(writer->Append(absl::StrCat("#!/bin/bash\nHERE='", folder_, "'\n", body, "\n")));
    ABSL_CHECK_OK(writer->Finish());
  }

  // Contents of a file that a command wrote to $HERE; "none" if there is none.
  std::string Contents(absl::string_view name) const {
    return ReadFile(absl::StrCat(folder_, "/", name)).value_or("none");
  }

  const std::string& folder() const { return folder_; }

 private:
  const std::string folder_;
  const std::string path_;
};

}  // namespace ddp::launchers::slurm
