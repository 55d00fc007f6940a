// Reads parts of tensors out of the files of a checkpoint, checked and by pread. Free of torch.
//
//   PartReader reader(folder, manifest);
//   DDP_RETURN_IF_ERROR(reader.Read("model.fc.weight", FlatRange{40, 80}, {}, to));
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file.h"
#include "checkpoint/parts.h"
#include "checkpoint/sharded/manifest.h"

namespace ddp::checkpoint::sharded {

struct Placed;

// Thread-compatible. Reads the blocks in which the elements lie and no others; of a file, a block
// that is read in part is kept until another one is.
class PartReader {
 public:
  // `manifest`: of DecodeManifest; must outlive the reader.
  PartReader(std::string folder, const Manifest& manifest)
      : folder_(std::move(folder)), manifest_(manifest) {}

  // OK if all files are there in the sizes that the manifest has; else DataLoss, with the path.
  absl::Status CheckSizes();

  // OK if all files' headers match their checksums. What a whole read needs, since only other
  // programs use them.
  absl::Status CheckHeaders();

  // Reads a part, which must be within the tensor, to `to`: with the elements of a range in the
  // order of dimensions `memory_order`, or those of a box in row-major order. DataLoss names file
  // and tensor.
  absl::Status Read(const std::string& name, const Part& part,
                    const std::vector<int64_t>& memory_order, void* to);

  // From files so far, without the manifest.
  uint64_t bytes_read() const { return bytes_read_; }

 private:
  // A file, and the block of it that was last read in part.
  struct Source {
    FileReader file;
    uint64_t block_begin = ~uint64_t{0};
    std::vector<char> block = {};
  };
  struct Reading {
    const std::string& name;
    const StoredTensor& tensor;
    const StoredPart& stored;
    Source* source;
  };

  absl::StatusOr<Source*> Open(size_t file);
  absl::Status ReadBlocks(const Reading& reading, uint64_t begin, uint64_t end, char* to);
  absl::Status Fetch(const Reading& reading, uint64_t begin, uint64_t end, char* to);
  absl::Status CopyBox(const Reading& reading, const Placed& from, const Placed& to, char* out);

  std::string folder_;
  const Manifest& manifest_;
  std::map<size_t, std::unique_ptr<Source>> sources_;
  std::vector<char> row_;
  uint64_t bytes_read_ = 0;
};

}  // namespace ddp::checkpoint::sharded
