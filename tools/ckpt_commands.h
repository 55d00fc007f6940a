// The commands of //tools:ckpt, which looks at checkpoints, compares and converts them. They know
// formats by the registry alone: link //checkpoint:all.
//
//   DDP_ASSIGN_OR_RETURN(Report report, List("runs/a"));
//   std::puts(report.text.c_str());   // or report.json.dump(2)
//   return report.exit_code;
//
// A path is a checkpoint, or a folder of checkpoints: what ends in a format's suffix, and what a
// format can open, is a checkpoint. NotFound: there is nothing at the path, or no checkpoint in the
// folder. Functions are thread-safe.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "base/options.h"
#include "checkpoint/format.h"
#include "nlohmann/json.hpp"

namespace ddp::tools::ckpt {

struct Report {
  std::string text;  // for people; lines, each ended
  nlohmann::ordered_json json;
  int exit_code = 0;
};

// Of a folder: name, step, time, size, format and state of each checkpoint, oldest first. Of a
// checkpoint: path, dtype, shape and bytes of each tensor, which reads all of it.
absl::StatusOr<Report> List(const std::string& path);

// Reads a checkpoint, or each of a folder, and says whether it is intact: "ok", "unverified"
// (intact as far as can be seen: it has no checksums), "damaged" or "unreadable", with the reason.
// Exit code 1 for the last two.
absl::StatusOr<Report> Verify(const std::string& path);

// Compares two checkpoints of any formats, value by value; the order of dicts does not count. Exit
// code 1 if they differ: the first difference, and the largest one between tensors. Tensors are
// equal if their bits are.
absl::StatusOr<Report> Diff(const std::string& a, const std::string& b);

struct ConvertOptions {
  std::string from = {};
  std::string to = {};      // must not exist
  std::string format = {};  // of `to`; empty: by its suffix
  std::string only = {};    // pattern of paths ("model/*"; * and ? match '/', too); empty: all
  std::string dtype = {};   // of floating-point tensors ("bfloat16"); empty: as they are
};

constexpr auto OptionsOf(const ConvertOptions&) {
  return Options(Option("to", &ConvertOptions::format, "format; empty: by the suffix of TO"),
                 Option("only", &ConvertOptions::only,
                        "pattern of the paths to take, such as model/*; empty: all"),
                 Option("dtype", &ConvertOptions::dtype,
                        "of floating-point tensors, such as bfloat16; empty: as they are"));
}

// Writes a checkpoint in another format, atomically. InvalidArgument: nothing matches `only`, or
// what Format::Write says; AlreadyExists.
absl::StatusOr<Report> Convert(const ConvertOptions& options);

}  // namespace ddp::tools::ckpt
