// Reads idx files, the format of MNIST and similar data sets, plain or compressed with gzip.
//
//   DDP_ASSIGN_OR_RETURN(IdxArray images, ReadIdx("train-images-idx3-ubyte.gz", 3));
//   images.sizes;   // {60000, 28, 28}
//   images.values;  // 47,040,000 bytes
//
// The format: bytes 0 0, a type (8: unsigned byte, the only one read here), the number of
// dimensions, each dimension's size as a big-endian 32-bit number, then the values in row-major
// order. Source: http://yann.lecun.com/exdb/mnist/
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace ddp::tools::datasets {

struct IdxArray {
  std::vector<int64_t> sizes;
  absl::Span<const uint8_t> values;
  // Keeps them: the mapped file (base/mapped_file.h), of which the processes of a host share one
  // copy; of a compressed file, this process's own memory.
  std::shared_ptr<const void> owner;
};

// Reads and checks the whole file: type, number of dimensions, exact length, gzip's checksum.
// NotFound if there is no such file; DataLoss, with path and reason, if it is damaged or not of
// this format. Compression is detected by the first bytes, not by the name. Thread-safe.
absl::StatusOr<IdxArray> ReadIdx(const std::string& path, int dimensions);

}  // namespace ddp::tools::datasets
