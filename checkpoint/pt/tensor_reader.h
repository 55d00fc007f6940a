// Reads a part of a tensor from an archive.
//
//   DDP_ASSIGN_OR_RETURN(at::Tensor some, ReadTensorPart(zip, "archive/data/3", spec, range));
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "absl/status/statusor.h"
#include "checkpoint/parts.h"
#include "checkpoint/pt/tensor_spec.h"
#include "checkpoint/pt/zip.h"

namespace ddp::checkpoint::pt {

// A new tensor that stores `part` (see parts.h), not as a lazy conjugate or negative. `record` is
// the storage of `spec` and has its size; `part` is a box or range within the tensor. Reads at most
// twice the size of the part, plus 64 KiB per contiguous piece. Does not check the CRC-32, which
// covers the whole storage. Thread-safe.
absl::StatusOr<at::Tensor> ReadTensorPart(const ZipReader& zip, const std::string& record,
                                          const TensorSpec& spec, const Part& part);

}  // namespace ddp::checkpoint::pt
