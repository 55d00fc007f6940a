// Writes one data file of a checkpoint: a safetensors file, tensor after tensor, with the checksums
// that the manifest has of it. Free of torch.
//
//   DDP_ASSIGN_OR_RETURN(DataFile file, DataFile::Create(folder, FileName(3, false), entries, {},
//                                                        files));
//   for each of `entries`, as sorted:
//     DDP_RETURN_IF_ERROR(file.Append(data, size));  // as often as needed
//     DDP_ASSIGN_OR_RETURN(std::vector<uint64_t> digests, file.EndTensor());
//   DDP_ASSIGN_OR_RETURN(StoredFile stored, file.Finish());
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file.h"
#include "checkpoint/safetensors/header.h"
#include "checkpoint/sharded/manifest.h"

namespace ddp::checkpoint::sharded {

// Movable; thread-compatible. Keeps at most one block of data.
class DataFile {
 public:
  // Sorts `entries`, sets their places, and writes the header. Errors of WriteHeader and of
  // FileWriter.
  static absl::StatusOr<DataFile> Create(const std::string& folder, const std::string& name,
                                         std::vector<safetensors::TensorEntry>& entries,
                                         const safetensors::Metadata& metadata, FileSystem* files);

  // Bytes of the tensor that comes next.
  absl::Status Append(const void* data, size_t size);
  // Ends that tensor; the XXH3 of each of its blocks.
  absl::StatusOr<std::vector<uint64_t>> EndTensor();
  // fsyncs and closes.
  absl::StatusOr<StoredFile> Finish();

  uint64_t header_bytes() const { return stored_.header_bytes; }

 private:
  DataFile(FileWriter file, StoredFile stored)
      : file_(std::move(file)), stored_(std::move(stored)) {}

  absl::Status WriteBlocks(const char* data, size_t size);

  FileWriter file_;
  StoredFile stored_;
  std::vector<uint64_t> digests_;
  std::vector<char> pending_;  // less than one block
};

}  // namespace ddp::checkpoint::sharded
