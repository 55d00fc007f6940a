// Reader of idx files, the format of MNIST and its relatives, plain or compressed with gzip.
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
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ddp::tools::datasets {

struct IdxArray {
  std::vector<int64_t> sizes;
  std::vector<uint8_t> values;
};

// Reads all of `path` and checks all of it: type, number of dimensions, that the values are as many
// as the sizes say and end where the file ends, gzip's checksum. NotFound if there is no such file,
// DataLoss if it is damaged or not of this format, with path and reason. Whether it is compressed
// is told by its first bytes, not its name.
absl::StatusOr<IdxArray> ReadIdx(const std::string& path, int dimensions);

}  // namespace ddp::tools::datasets
