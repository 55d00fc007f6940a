// Tensors of one file that all ranks read together, each byte of it once.
//
//   SharedReader reader(path, ranks, broadcast);
//   DDP_RETURN_IF_ERROR(reader.Read({{&described, tensor}}));
//   DDP_RETURN_IF_ERROR(reader.End());
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/coordinator.h"
#include "base/file.h"
#include "base/json.h"
#include "checkpoint/format.h"

namespace ddp::checkpoint {

// Reads storages chunk after chunk, each by one rank, which gives it to the others. Collective, but
// for the constructor. The arguments outlive it. Thread-compatible.
class SharedReader {
 public:
  SharedReader(const std::string& path, const Coordinator& ranks, const BroadcastBytes& broadcast)
      : path_(path),
        ranks_(ranks),
        broadcast_(broadcast),
        size_(static_cast<size_t>(ranks.size())) {}

  // The number of bytes that the ranks read in parallel: one chunk each.
  size_t round_bytes() const { return size_ * kChunkBytes; }

  // Reads these tensors, which are described with the places of their bytes: {"offset", "crc",
  // "damaged"}, of a StoredBytes. Returns errors of `broadcast` only: End returns those of reads,
  // and finds damage.
  absl::Status Read(const std::vector<std::pair<const nlohmann::json*, at::Tensor>>& tensors);

  // After the last Read. OK if all that was read matches its CRC-32; else the same on all ranks.
  absl::Status End();

 private:
  static constexpr size_t kChunkBytes = 8 << 20;
  struct Chunk {
    char* to;
    uint64_t offset;
    size_t bytes;
  };
  struct Storage {
    uint32_t crc;
    std::string damaged;
  };
  struct ChunkOf {
    size_t storage;
    size_t bytes;
  };

  void ReadOne(const Chunk& chunk, size_t number);

  const std::string& path_;
  const Coordinator& ranks_;
  const BroadcastBytes& broadcast_;
  const size_t size_;
  std::optional<FileReader> file_;
  std::vector<Storage> storages_;
  std::vector<ChunkOf> chunks_;  // of all storages, in order
  std::string crcs_;             // "CHUNK CRC" of those that this rank has read
  absl::Status failure_;         // of this rank
};

}  // namespace ddp::checkpoint
