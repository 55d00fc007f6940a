// Reads a part of a tensor out of an archive, and little else of it.
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

// `record` has the storage of `spec`, in its size; `part` is a box or a range inside it. A new
// tensor as parts.h says. What is read is at most twice the part and 64 KiB per contiguous piece
// of it. Not checked against the CRC-32, which is of the whole storage.
absl::StatusOr<at::Tensor> ReadTensorPart(const ZipReader& zip, const std::string& record,
                                          const TensorSpec& spec, const Part& part);

}  // namespace ddp::checkpoint::pt
