// A checkpoint format writes a State to disk and reads it back.
//
//   DDP_ASSIGN_OR_RETURN(std::unique_ptr<Format> format, CreateFormat("pt"));
//   DDP_RETURN_IF_ERROR(format->Write(state, "/runs/a/.tmp-epoch_3.pt"));
//   DDP_ASSIGN_OR_RETURN(State state, format->Read("/runs/a/epoch_3.pt"));
//   DDP_ASSIGN_OR_RETURN(State part, format->Read("/runs/a/epoch_3.pt",
//       {.parts = {{"epoch", Whole{}}, {"optimizer/state/0/exp_avg", FlatRange{40, 80}}}}));
//
// The manager (manager.h) is responsible for names and atomicity.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/coordinator.h"
#include "base/file.h"
#include "base/implementation_options.h"
#include "base/registry.h"
#include "checkpoint/parts.h"
#include "checkpoint/state.h"

namespace ddp::checkpoint {

// Arguments of a format's factory.
struct FormatOptions {
  // Each format's own options, "checkpoint.NAME.…".
  ImplementationOptions implementations = {};
  FileSystem* files = FileSystem::Default();  // not owned; tests let its calls fail
  // Not owned. Formats that all ranks write use it.
  const Coordinator* ranks = nullptr;  // null: a world size of 1
};

// The parts of a checkpoint to read.
struct ReadRequest {
  // The keys are paths ("model/fc.weight", levels joined by '/'). Whole: a value, or a dict with
  // everything below it. Otherwise a part of a tensor. No path may be below another. Empty: the
  // whole checkpoint.
  std::map<std::string, Part> parts = {};
};

// Thread-compatible. No state between calls.
class Format {
 public:
  virtual ~Format() = default;

  virtual absl::string_view name() const = 0;

  // Suffix of its files or folders: ".pt".
  virtual absl::string_view suffix() const = 0;

  // True if every rank writes its part: Write is then collective, with the same path on all ranks.
  // False if only rank 0 writes; Write then refuses state with shards (InvalidArgument).
  virtual bool all_ranks_write() const = 0;

  // Writes to `path` and fsyncs the contents. With one writer, `path` must not exist
  // (AlreadyExists, and it is not changed). If all ranks write, `path` is an empty folder; the
  // caller has made it and fsyncs it afterwards. If Write fails, on any rank, the caller removes
  // `path`. ResourceExhausted if the disk is full; InvalidArgument names a value that the format
  // cannot hold.
  virtual absl::Status Write(const State& state, const std::string& path) = 0;

  // The whole checkpoint. NotFound if there is no such file; DataLoss, with the reason, if it is
  // damaged or not of this format. Not collective.
  absl::StatusOr<State> Read(const std::string& path) { return Read(path, {}); }

  // Only what `request` names: `root` has those values and the dicts above them, `shards` describes
  // the parts. Reads little else, so damage elsewhere may go undetected. InvalidArgument names a
  // path that the checkpoint lacks, or a part outside its tensor; otherwise errors as above. Not
  // collective.
  virtual absl::StatusOr<State> Read(const std::string& path, const ReadRequest& request) = 0;

  // Checks that everything that Read needs is present, without reading tensor data: OK, NotFound,
  // or DataLoss for a truncated file or another format. Only Read detects damage inside tensors.
  // Not collective.
  virtual absl::Status CheckComplete(const std::string& path) = 0;
};

struct FormatTag {
  static constexpr absl::string_view kWhat = "checkpoint format";
};
struct FormatEntry {
  std::unique_ptr<Format> (*create)(const FormatOptions& options) = nullptr;
  // &AnyOptions::Of<…> for this format's own options; null: none.
  AnyOptions (*options)() = nullptr;
};
using FormatRegistry = Registry<FormatEntry, FormatTag>;

// NotFound, listing the linked formats, for an unknown name. Thread-safe.
absl::StatusOr<std::unique_ptr<Format>> CreateFormat(absl::string_view name,
                                                     const FormatOptions& options = {});

}  // namespace ddp::checkpoint
