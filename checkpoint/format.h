// A checkpoint format turns logical state into bytes on disk and back.
//
//   DDP_ASSIGN_OR_RETURN(std::unique_ptr<Format> format, CreateFormat("pt"));
//   DDP_RETURN_IF_ERROR(format->Write(state, "/runs/a/.tmp-epoch_3.pt"));
//   DDP_ASSIGN_OR_RETURN(State state, format->Read("/runs/a/epoch_3.pt"));
//
// Atomicity, naming and which ranks write are the manager's (manager.h), not the format's.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/file.h"
#include "base/registry.h"
#include "checkpoint/state.h"

namespace ddp::checkpoint {

struct FormatOptions {
  FileSystem* files = FileSystem::Default();  // not owned; tests let its calls fail
};

// Thread-compatible; stateless between calls.
class Format {
 public:
  virtual ~Format() = default;

  virtual absl::string_view name() const = 0;

  // Ends the names of its files or folders: ".pt".
  virtual absl::string_view suffix() const = 0;

  // True if every rank writes its own part (Write is then called on all of them, with the same
  // path); false if rank 0 writes alone, which needs state without shards (InvalidArgument names
  // the first).
  virtual bool all_ranks_write() const = 0;

  // Writes to `path`, which does not exist (AlreadyExists otherwise, and it stays as it is), and
  // makes its content durable (fsync). On failure what was written is the caller's to remove.
  // ResourceExhausted if the disk is full; InvalidArgument names the value that it cannot hold.
  virtual absl::Status Write(const State& state, const std::string& path) = 0;

  // NotFound if there is no such file; DataLoss if it is damaged or not of this format, with what
  // is wrong with it.
  virtual absl::StatusOr<State> Read(const std::string& path) = 0;
};

struct FormatTag {
  static constexpr absl::string_view kWhat = "checkpoint format";
};
using FormatFactory = std::unique_ptr<Format> (*)(const FormatOptions& options);
using FormatRegistry = Registry<FormatFactory, FormatTag>;

// NotFound, listing what is linked in, for an unknown name.
absl::StatusOr<std::unique_ptr<Format>> CreateFormat(absl::string_view name,
                                                     const FormatOptions& options = {});

}  // namespace ddp::checkpoint
