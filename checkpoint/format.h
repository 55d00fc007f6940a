// A checkpoint format turns logical state into bytes on disk and back.
//
//   DDP_ASSIGN_OR_RETURN(std::unique_ptr<Format> format, CreateFormat("pt"));
//   DDP_RETURN_IF_ERROR(format->Write(state, "/runs/a/.tmp-epoch_3.pt"));
//   DDP_ASSIGN_OR_RETURN(State state, format->Read("/runs/a/epoch_3.pt"));
//   DDP_ASSIGN_OR_RETURN(State part, format->Read("/runs/a/epoch_3.pt",
//       {.parts = {{"epoch", Whole{}}, {"optimizer/state/0/exp_avg", FlatRange{40, 80}}}}));
//
// Atomicity, naming and which ranks write are the manager's (manager.h), not the format's.
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

// What one format is made of.
struct FormatOptions {
  // Of a run: each format finds its own options in it, "checkpoint.NAME.…".
  ImplementationOptions implementations = {};
  FileSystem* files = FileSystem::Default();  // not owned; tests let its calls fail
  // Not owned. For formats that all ranks write, to name and to announce what each has written.
  const Coordinator* ranks = nullptr;  // null: a world of one
};

// What to read of a checkpoint.
struct ReadRequest {
  // By path ("model/fc.weight", levels joined by '/'). Whole: a value, or a dict with all that is
  // below it. Otherwise a part of a tensor. No path lies below another. Empty: the whole
  // checkpoint.
  std::map<std::string, Part> parts = {};
};

// Thread-compatible; stateless between calls.
class Format {
 public:
  virtual ~Format() = default;

  virtual absl::string_view name() const = 0;

  // Ends the names of its files or folders: ".pt".
  virtual absl::string_view suffix() const = 0;

  // True if every rank writes its own part: Write is then collective and has the same path on all
  // of them. False if rank 0 writes alone, which needs state without shards (InvalidArgument names
  // the first).
  virtual bool all_ranks_write() const = 0;

  // Writes to `path` and makes its content durable (fsync). For one writer, `path` does not exist
  // (AlreadyExists otherwise, and it stays as it is). Where all ranks write, it is an empty folder
  // that the caller made and whose entries the caller syncs. On failure, also of another rank, what
  // was written is the caller's to remove. ResourceExhausted if the disk is full; InvalidArgument
  // names the value that it cannot hold.
  virtual absl::Status Write(const State& state, const std::string& path) = 0;

  // NotFound if there is no such file; DataLoss if it is damaged or not of this format, with what
  // is wrong with it. Not collective.
  absl::StatusOr<State> Read(const std::string& path) { return Read(path, {}); }

  // Only what `request` names: the tree has those values with the dicts above them, and `shards`
  // says which tensors are parts. It reads little more than their bytes, so that damage elsewhere
  // may pass unseen. InvalidArgument names a path that the checkpoint lacks, or a part that does
  // not lie within its tensor. Not collective.
  virtual absl::StatusOr<State> Read(const std::string& path, const ReadRequest& request) = 0;

  // Whether all that Read needs is there, without reading what tensors hold: OK, NotFound, or
  // DataLoss for what was cut off or is not of this format. Damage inside a tensor is Read's to
  // find. Not collective.
  virtual absl::Status CheckComplete(const std::string& path) = 0;
};

struct FormatTag {
  static constexpr absl::string_view kWhat = "checkpoint format";
};
struct FormatEntry {
  std::unique_ptr<Format> (*create)(const FormatOptions& options) = nullptr;
  // &AnyOptions::Of<…> for options of this format alone; null: it has none.
  AnyOptions (*options)() = nullptr;
};
using FormatRegistry = Registry<FormatEntry, FormatTag>;

// NotFound, listing what is linked in, for an unknown name.
absl::StatusOr<std::unique_ptr<Format>> CreateFormat(absl::string_view name,
                                                     const FormatOptions& options = {});

}  // namespace ddp::checkpoint
