// A safetensors file with checksums: each byte of it that is read is checked. Free of torch.
//
//   DDP_ASSIGN_OR_RETURN(std::string digest, WriteTensorFile(path, tensors, {{"format", "pt"}},
//       [&](const TensorEntry& tensor) { return bytes_of[tensor.name].data(); }));
//
//   DDP_ASSIGN_OR_RETURN(TensorFile file, TensorFile::Open(path));
//   const TensorEntry* tensor = file.Find("fc.weight");
//   DDP_RETURN_IF_ERROR(file.Read(*tensor, 0, tensor->size(), to));
//
// Checksums stand in the file's metadata, where other programs ignore them:
//
//   ddp.header_xxh3   XXH3 of all bytes before the tensors', with these 16 digits as zeros
//   ddp.xxh3          for each tensor, in the order of their bytes, for each block of it (1 MiB;
//   the
//                     last one may be shorter): its XXH3; 16 hexadecimal digits each
//
// Files of other programs lack them; see is_verified.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/file.h"
#include "checkpoint/safetensors/header.h"

namespace ddp::checkpoint::safetensors {

// Metadata of files of ours start with this.
inline constexpr absl::string_view kOwnPrefix = "ddp.";

// Returns the tensor's bytes, tensor.size() of them, valid until the next call.
using GiveBytes = std::function<absl::StatusOr<const void*>(const TensorEntry& tensor)>;

// Creates `path`, writes it and fsyncs it. Sorts `tensors` and sets their places. Calls `give` for
// each tensor twice, first for the checksums. Returns the digest of the header, which depends on
// every byte of the file. Errors of WriteHeader, before anything is created; AlreadyExists.
absl::StatusOr<std::string> WriteTensorFile(const std::string& path,
                                            std::vector<TensorEntry>& tensors, Metadata metadata,
                                            const GiveBytes& give,
                                            FileSystem* files = FileSystem::Default());

// Thread-compatible. Movable.
class TensorFile {
 public:
  // Reads the header. NotFound; DataLoss, which starts with the path, for what is no safetensors
  // file, is cut off, or does not match the checksum of its header.
  static absl::StatusOr<TensorFile> Open(const std::string& path);

  const std::string& path() const { return file_.path(); }

  // Tensors are in the order of their bytes.
  const std::vector<TensorEntry>& tensors() const { return header_.tensors; }

  // The checksums are left out.
  const Metadata& metadata() const { return header_.metadata; }

  // Whether the file has checksums. If not, damage in it is not noticed.
  bool is_verified() const { return !digest_.empty(); }

  // Returns what WriteTensorFile returned; empty without checksums.
  const std::string& digest() const { return digest_; }

  // Null if there is none.
  const TensorEntry* Find(absl::string_view name) const;

  // Reads bytes [offset, offset + size) of a tensor of this file, and the rest of the blocks in
  // which they lie. The last block that was read in part is kept, so that reads in ascending order
  // read each block once. DataLoss names file and tensor if a block does not match its checksum.
  absl::Status Read(const TensorEntry& tensor, uint64_t offset, uint64_t size, void* to);

 private:
  explicit TensorFile(FileReader file) : file_(std::move(file)) {}

  absl::Status Damaged(absl::string_view what) const;
  absl::Status TakeChecksums(absl::string_view head);
  absl::Status ReadBlock(const TensorEntry& tensor, uint64_t block, void* to) const;

  FileReader file_;
  Header header_;
  std::string digest_;
  std::map<absl::string_view, size_t> by_name_;  // of header_.tensors
  std::vector<uint64_t> checksums_;              // of all blocks
  std::vector<size_t> first_checksum_;           // by tensor
  uint64_t kept_at_ = ~uint64_t{0};              // position in the file of kept_
  std::string kept_;
};

}  // namespace ddp::checkpoint::safetensors
