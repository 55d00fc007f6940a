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

  // OK if all files are there in the sizes that the manifest has; else DataLoss, with the path, or
  // FailedPrecondition for a symbolic link.
  absl::Status CheckSizes();

  // OK if the files' headers match their checksums: of each `step`-th file from `first` on. What a
  // whole read needs, since only other programs use them.
  absl::Status CheckHeaders(size_t first = 0, size_t step = 1);

  // Reads a part, which must be within the tensor, to `to`: with the elements of a range in the
  // order of dimensions `memory_order`, or those of a box in row-major order. DataLoss names file
  // and tensor.
  absl::Status Read(const std::string& name, const Part& part,
                    const std::vector<int64_t>& memory_order, void* to);

  // Reads the whole tensor, piece by piece, only to check it. Errors of Read.
  absl::Status Check(const std::string& name);

  // Ranks that need some of the same blocks, as at the ends of their parts, plan first: until
  // EndPlan, Read reads nothing, and notes what it would read. A kept block is not read again.
  void BeginPlan() { is_planning_ = true; }
  // Bytes [begin, end) of a file, by its index: whole blocks, all but the last of kBlockBytes.
  struct Blocks {
    size_t file = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
  };
  // Ends planning and returns the blocks in ascending order.
  std::vector<Blocks> EndPlan();
  // Reads a block that was planned. Errors of Read.
  absl::Status ReadPlanned(size_t file, uint64_t offset, char* to);
  void Keep(size_t file, uint64_t offset, std::vector<char> block) {
    kept_[{file, offset}] = std::move(block);
  }

  // Returns the bytes read from files so far, without the manifest.
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

  // A block, by its file and where it begins there.
  using BlockPlace = std::pair<size_t, uint64_t>;
  struct Planned {
    const std::string* name;  // of the manifest, as the next two are
    const StoredTensor* tensor;
    const StoredPart* stored;
    uint64_t bytes;
  };

  absl::StatusOr<Source*> Open(size_t file);
  void Plan(const Reading& reading, uint64_t begin, uint64_t end);
  absl::Status ReadBlocks(const Reading& reading, uint64_t begin, uint64_t end, char* to);
  absl::Status Fetch(const Reading& reading, uint64_t begin, uint64_t end, char* to);
  absl::Status CopyBox(const Reading& reading, const Placed& from, const Placed& to, char* out);

  std::string folder_;
  const Manifest& manifest_;
  std::map<size_t, std::unique_ptr<Source>> sources_;
  std::vector<char> row_;
  uint64_t bytes_read_ = 0;
  bool is_planning_ = false;
  std::map<BlockPlace, Planned> planned_;
  std::map<BlockPlace, std::vector<char>> kept_;
};

}  // namespace ddp::checkpoint::sharded
