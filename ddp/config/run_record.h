// The facts about a run besides its configuration: run.yaml, beside config.yaml.
//
//   DDP_ASSIGN_OR_RETURN(std::optional<RunRecordOptions> record, ReadRunRecord("runs/a/run.yaml"));
//   if (record) printf("%d ranks\n", record->world_size);
#pragma once

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "base/options.h"

namespace ddp::config {

inline constexpr char kRunRecordFile[] = "run.yaml";

struct RunRecordOptions {
  int world_size = 1;
  int nnodes = 1;
  std::string program = "";  // path
  std::string build = "";    // BuildOf(program)
  std::string host = "";     // of rank 0
};

constexpr auto OptionsOf(const RunRecordOptions&) {
  return Options(Option("world_size", &RunRecordOptions::world_size, "ranks").AtLeast(1),
                 Option("nnodes", &RunRecordOptions::nnodes, "nodes").AtLeast(1),
                 Option("program", &RunRecordOptions::program, "the program's path"),
                 Option("build", &RunRecordOptions::build, "hash of the program"),
                 Option("host", &RunRecordOptions::host, "host name of rank 0"));
}

// nullopt if there is no such file, or one that says no world size. Errors of ReadConfigFile, and
// of values out of range. Thread-safe.
absl::StatusOr<std::optional<RunRecordOptions>> ReadRunRecord(const std::string& path);

// 16 hexadecimal digits: a hash of the bytes of a program's file, without the libraries and data
// that it loads. Empty if it cannot be read. Thread-safe.
std::string BuildOf(const std::string& program);

}  // namespace ddp::config
