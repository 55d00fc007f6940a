// The commands of //tools:ckpt, which looks at checkpoints, compares and converts them. They know
// formats by the registry alone: link //checkpoint:all.
//
//   DDP_ASSIGN_OR_RETURN(CommandOutput output, List("runs/a"));
//   std::puts(output.text.c_str());   // or output.json.dump(2)
//   return output.exit_code;
//
// A path is a checkpoint, or a folder of checkpoints: what ends in a format's suffix, and what a
// format can open, is a checkpoint. NotFound: there is nothing at the path, or no checkpoint in the
// folder. Functions are thread-safe.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/options.h"
#include "checkpoint/format.h"
#include "nlohmann/json.hpp"

namespace ddp::tools::ckpt {

// What a command prints, and the exit status that it asks for.
struct CommandOutput {
  std::string text;  // for people; lines, each ended
  nlohmann::ordered_json json;
  int exit_code = 0;
};

// For a folder, lists name, step, time, size, format and state of each checkpoint, whether it is
// pinned, and the metrics that the run noted; oldest first. For a checkpoint, lists path, dtype,
// shape and bytes of each tensor, without reading the tensors' data.
absl::StatusOr<CommandOutput> List(const std::string& path);

struct VerifyOptions {
  // Renames what is "damaged", by Folder::Quarantine. Unavailable if a process saves into that
  // folder.
  bool quarantine = false;
};

constexpr auto OptionsOf(const VerifyOptions&) {
  return Options(Option("quarantine", &VerifyOptions::quarantine,
                        "verify: rename damaged checkpoints to NAME.damaged"));
}

// Reads a checkpoint, or each of a folder, and says whether it is intact: "ok", "unverified"
// (intact as far as can be seen: it has no checksums), "damaged" or "unreadable", with the reason.
// Exit code 1 for the last two, 2 where one was to be renamed and could not be.
absl::StatusOr<CommandOutput> Verify(const std::string& path, const VerifyOptions& options = {});

// Pins a checkpoint of a folder, so that no rule deletes it, or takes the pin away. `name` is its
// file or folder: "epoch_3.pt", or "epoch_3" if only one has this name. NotFound if there is none;
// FailedPrecondition: its name says that it is damaged or abandoned.
absl::StatusOr<CommandOutput> SetPinned(const std::string& directory, const std::string& name,
                                        bool pinned);

// Compares two checkpoints of any formats, value by value; the order of dicts does not count, nor
// where a format has what is of single ranks, or names for numbers of an optimizer's parameters.
// Exit code 1 if they differ: the first difference, the paths of a few others, and the largest one
// between tensors. Tensors are equal if their bits are.
absl::StatusOr<CommandOutput> Diff(const std::string& a, const std::string& b);

struct ConvertOptions {
  std::string from = {};
  std::string to = {};      // must not exist
  std::string format = {};  // of `to`; empty: by its suffix
  std::string only = {};    // pattern of paths ("model/*"; * and ? match '/', too); empty: all
  std::string dtype = {};   // of floating-point tensors ("bfloat16"); empty: as they are
};

constexpr auto OptionsOf(const ConvertOptions&) {
  return Options(
      Option("to", &ConvertOptions::format,
             "convert: format; empty: by the suffix of TO. average: the checkpoint to write"),
      Option("only", &ConvertOptions::only,
             "convert: pattern of the paths to take, such as model/*; empty: all"),
      Option("dtype", &ConvertOptions::dtype,
             "convert: of floating-point tensors, such as bfloat16; empty: as they are"));
}

// Writes a checkpoint in another format, atomically. InvalidArgument: nothing matches `only`, or
// what Format::Write says; AlreadyExists.
absl::StatusOr<CommandOutput> Convert(const ConvertOptions& options);

// Writes the element-wise mean of the models of two or more checkpoints, of any formats, to `to`,
// whose suffix says the format: floating-point and complex tensors, summed in float64. What else a
// model has is taken from the last one; the output names what of it differs. All but the model is
// left out. InvalidArgument, with the path, if names, dtypes or shapes differ; AlreadyExists.
absl::StatusOr<CommandOutput> Average(const std::vector<std::string>& from, const std::string& to);

}  // namespace ddp::tools::ckpt
