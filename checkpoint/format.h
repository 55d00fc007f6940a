// A checkpoint format writes a State to disk and reads it back.
//
//   DDP_ASSIGN_OR_RETURN(std::unique_ptr<Format> format, CreateFormat("pt"));
//   DDP_RETURN_IF_ERROR(format->Write(state, "/runs/a/.tmp-epoch_3.pt"));
//   DDP_ASSIGN_OR_RETURN(State state, format->Read("/runs/a/epoch_3.pt"));
//   DDP_ASSIGN_OR_RETURN(State part, format->Read("/runs/a/epoch_3.pt",
//       {.parts = {{"epoch", Whole{}}, {"optimizer/state/0/exp_avg", FlatRange{40, 80}}}}));
//   part.root.at("epoch"); part.sharded.at("optimizer/state/0/exp_avg").parts[0].tensor;
//
// The manager (manager.h) is responsible for names and atomicity.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

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

// Collective: the `size` bytes at `data` of rank `from` on every rank. Example: broadcast of a
// process group.
using BroadcastBytes = std::function<absl::Status(void* data, size_t size, int from)>;

// Collective: moves bytes from rank `from`, which is not 0, to rank 0. `bytes` has one dimension
// and is on the CPU: on `from` it is sent, on rank 0 received; on other ranks it is undefined.
// Example: send and recv of a process group.
using MoveToRank0 = std::function<absl::Status(int from, const at::Tensor& bytes)>;

// Arguments of a format's factory.
struct FormatOptions {
  // Each format's own options, "checkpoint.NAME.…".
  ImplementationOptions implementations = {};
  FileSystem* files = FileSystem::Default();  // not owned; tests let its calls fail
  // Not owned. Formats that all ranks write use it.
  const Coordinator* ranks = nullptr;  // null: a world size of 1
  // Whether checkpoints are read that have no checksums, as other programs may write them, with a
  // warning; otherwise they are refused (FailedPrecondition). A run's own folder refuses them: a
  // format writes checksums, and damage could not be found.
  bool accept_unverified = true;
  // If set, Read is collective in formats that all ranks write: each byte is read once, by one of
  // the ranks that need it, and goes to the others. They ask for the same, but for the parts of
  // tensors; otherwise each reads for itself. Manager::Load does as much for other formats.
  BroadcastBytes broadcast = nullptr;
};

// What to read of one value.
struct Wanted {
  Wanted() = default;
  Wanted(Part part) : parts({std::move(part)}) {}  // NOLINT: as a Part reads
  Wanted(Whole) {}                                 // NOLINT
  Wanted(Box box) : parts({std::move(box)}) {}     // NOLINT
  Wanted(FlatRange range) : parts({range}) {}      // NOLINT
  Wanted(std::vector<Part> several, std::vector<int64_t> order = {})
      : parts(std::move(several)), memory_order(std::move(order)) {}

  bool whole() const { return parts.size() == 1 && std::holds_alternative<Whole>(parts[0]); }

  // {Whole{}}: a value, or a dict with everything below it. Otherwise parts of a tensor, boxes and
  // ranges, which may overlap; none: only its shape and dtype.
  std::vector<Part> parts = {Whole{}};
  std::vector<int64_t> memory_order = {};  // that ranges count in (parts.h); empty: row-major
  bool optional = false;                   // left out where the checkpoint has no such value
};

// Which entries of State::per_rank to read.
enum class PerRank {
  kOwn,  // this rank's, if as many ranks saved; else all
  kAll,
  kNone,
};

// Where a file has the bytes of a storage that were not read: as many as the storage has, from
// `offset` on.
struct StoredBytes {
  uint64_t offset = 0;
  uint32_t crc = 0;     // their CRC-32
  std::string damaged;  // what to say after the path where they do not match it
};
using StoredBytesOf = std::map<const c10::StorageImpl*, StoredBytes>;

// The parts of a checkpoint to read.
struct ReadRequest {
  // The keys are paths ("model/fc.weight", levels joined by '/'). No path may be below another.
  // Empty: the whole checkpoint.
  std::map<std::string, Wanted> parts = {};
  // Beside `parts`, also all that they do not name, whole. Then damage in `parts` is found, too: a
  // format whose checksums are of whole tensors reads these whole, and cuts them.
  bool all_else = false;
  PerRank per_rank = PerRank::kAll;
  // Not owned. Set: what a State cannot hold, such as Python objects, is left out, as None in lists
  // and tuples, and up to 1000 of these are added here ("'model/x' is a nested tensor"). Null:
  // it is an error, Unimplemented.
  std::vector<std::string>* left_out = nullptr;
  // Tensors that are read whole are on the device meta: they have shape and dtype, and their data
  // is not read, so that damage in it goes undetected. A sparse tensor comes as a dense one of its
  // shape. Not together with all_else and parts of tensors.
  bool meta = false;
  // All is read and checked, without `parts`, and data is dropped once it has been checked, so that
  // it takes the memory of the largest tensor, or less. Only the status counts.
  bool only_check = false;
  // Not owned. Set: a format with one file and checksums may leave the storages of tensors that it
  // gives whole as they are allocated, and adds here where their bytes are. The caller reads them.
  StoredBytesOf* unread = nullptr;
};

// InvalidArgument if a path lies below another.
absl::Status CheckRequest(const ReadRequest& request);

// Tells a reader that walks down the dicts of a checkpoint whether `request` asks for something
// below `path`, which has an entry. What is optional may not be there, however far the way to it
// goes: where the entry is no dict, it leads nowhere.
bool LeadsOn(const ReadRequest& request, const std::string& path, bool is_dict);

// Whether all parts of `wanted` are within a tensor of this shape.
bool Fits(const Wanted& wanted, const std::vector<int64_t>& shape);

// Returns what a request asks for, but for which parts of tensors, as text. Ranks of which it is
// equal can read a checkpoint together.
std::string InCommon(const ReadRequest& request);

// Returns what `wanted` asks for of a tensor that was read whole, as copies; nullopt if a part is
// not within it, or if it is not dense. Thread-safe.
std::optional<ShardedTensor> Cut(const at::Tensor& whole, const Wanted& wanted);

// Tensors of a state that have no values in memory yet, so that a format can write them one after
// the other: each is on the device meta, with the shape, dtype and strides that its values will
// have, and known by its storage. Thread-compatible.
class TensorSource {
 public:
  virtual ~TensorSource() = default;
  // Whether it is one of these.
  virtual bool Has(const c10::Storage& storage) const = 0;
  // Its values, on the CPU, in memory of their own. May be called again. An error ends the write.
  virtual absl::StatusOr<at::Tensor> Get(const c10::Storage& storage) = 0;
};

// Thread-compatible. No state between calls, but for the plan of WhatThisRankWrites.
class Format {
 public:
  virtual ~Format() = default;

  virtual absl::string_view name() const = 0;

  // Suffix of its files or folders: ".pt".
  virtual absl::string_view suffix() const = 0;

  // True if every rank writes its part: Write is then collective, with the same path on all ranks.
  // False if only rank 0 writes; Write then refuses state with parts of tensors
  // (InvalidArgument), which Consolidate (consolidate.h) makes whole.
  virtual bool all_ranks_write() const = 0;

  // Writes to `path` and fsyncs the contents. With one writer, `path` must not exist
  // (AlreadyExists, and it is not changed). If all ranks write, `path` is an empty folder; the
  // caller has made it and fsyncs it afterwards. If Write fails, on any rank, the caller removes
  // `path`. ResourceExhausted if the disk is full; InvalidArgument names a value that the format
  // cannot hold. `source` gives tensors that `state` has without values, in a format with one
  // writer; null: there are none.
  virtual absl::Status Write(const State& state, const std::string& path, TensorSource* source) = 0;
  absl::Status Write(const State& state, const std::string& path) {
    return Write(state, path, nullptr);
  }

  // Reads the whole checkpoint. NotFound if there is no such file; DataLoss, with the reason, if it
  // is damaged or not of this format; Unimplemented, with the path of a value that a State cannot
  // hold; FailedPrecondition for FormatOptions::accept_unverified. Not collective, but for
  // FormatOptions::broadcast; if it is, an error of one rank may be only that rank's.
  absl::StatusOr<State> Read(const std::string& path) { return Read(path, {}); }

  // Reads only what `request` names: `root` has whole values and the dicts above them, `sharded`
  // the tensors of which parts were asked for, in the order of the request. Reads little else, so
  // damage elsewhere may go undetected. InvalidArgument names a path that the checkpoint lacks, or
  // a part outside its tensor (with ReadRequest::all_else, such a tensor is in `root`, whole);
  // otherwise errors as above. Collective as above.
  virtual absl::StatusOr<State> Read(const std::string& path, const ReadRequest& request) = 0;

  // Checks that everything that Read needs is present, without reading tensor data: OK, NotFound,
  // DataLoss for a truncated file or another format, otherwise as Read. Only Read detects damage
  // inside tensors.
  // Not collective.
  virtual absl::Status CheckComplete(const std::string& path) = 0;

  // Returns, for a copy that Write gets later, the state without the values that this rank does not
  // write. Write makes the same files of it. If all ranks write, tensors that all have may be in
  // State::sharded, with a tensor on the device meta in their place in the root; where a rank
  // `edits` the copy before Write, the result is the whole state. It shares memory with `state`.
  //
  // The first call is collective, and makes a plan: errors of Write. Later calls follow it, and
  // neither ask other ranks nor fail. nullopt: the state has other tensors than the plan, or others
  // of shape or dtype, so that Write needs all of it on all ranks.
  virtual absl::StatusOr<std::optional<State>> WhatThisRankWrites(State state, bool /*edits*/) {
    return std::optional<State>(std::move(state));
  }
  // The next WhatThisRankWrites is again the first. All ranks call it between the same two calls.
  virtual void ForgetPlan() {}
};

struct FormatTag {
  static constexpr absl::string_view kWhat = "checkpoint format";
};
struct FormatEntry {
  std::unique_ptr<Format> (*create)(const FormatOptions& options) = nullptr;
  // &AnyOptions::Of<…> for this format's own options; null: none.
  AnyOptions (*options)() = nullptr;
  // Not empty: the format has no Write. What to do instead, to follow "NAME ".
  absl::string_view read_only = {};
  // Whether a file or folder without this format's suffix is of this format nevertheless, by a look
  // at the names in it. Null: never.
  bool (*recognises)(const std::string& path) = nullptr;
};
using FormatRegistry = Registry<FormatEntry, FormatTag>;

// Names of the linked formats that have a Write, sorted.
std::vector<std::string> WritableFormats();

// NotFound, listing the linked formats, for an unknown name. Thread-safe.
absl::StatusOr<std::unique_ptr<Format>> CreateFormat(absl::string_view name,
                                                     const FormatOptions& options = {});

// The linked format whose suffix `path` ends in; null if there is none. Thread-safe.
std::unique_ptr<Format> FormatBySuffix(absl::string_view path, const FormatOptions& options = {});
// The name of the linked format that recognises what is at `path`, else of the first that can open
// it, which reads little; empty if it is no checkpoint, or one so damaged that nothing tells its
// format. Not collective. Thread-safe.
std::string FormatByContent(const std::string& path);

// Path of a checkpoint in `folder` that a message may name: the newest with a run's name, else a
// file or folder that a format can open, rather one that is called a model. Looks at a few dozen
// entries; empty if none of them is a checkpoint. Not collective. Thread-safe.
std::string CheckpointIn(const std::string& folder);

// Reads what has neither a format's suffix nor the contents of one, for the error that says best
// what it is: NotFound for a folder, naming a checkpoint in it; DataLoss with the reasons of a
// format that knows the file, else of all that have files. Not collective. Thread-safe.
absl::StatusOr<State> ReadUnknown(const std::string& path, const ReadRequest& request,
                                  FormatOptions options);

}  // namespace ddp::checkpoint
