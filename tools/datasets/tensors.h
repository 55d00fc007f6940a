// A data set out of a folder of tensors, in safetensors files.
//
//   DDP_ASSIGN_OR_RETURN(Splits splits, LoadTensors({.data_dir = "digits"}));
//
// In Python:
//   safetensors.torch.save_file({"input": images, "target": labels}, "digits/train.safetensors")
//   safetensors.torch.save_file({"input": …, "target": …}, "digits/test.safetensors")
#pragma once

#include "absl/status/statusor.h"
#include "tools/datasets/registry.h"

namespace ddp::tools::datasets {

// The files train*.safetensors and test*.safetensors of options.data_dir, each split's one after
// the other in the order of their names. Each file has the tensors `input` [n, …], of floats of any
// width, or bytes, which become fractions of 255; and `target` [n], of integers from 0 on. Batches
// are float32 and int64. Files are mapped: the processes of a host share one copy. num_classes is
// the largest target of both splits + 1. NotFound: no folder, or no file of a split. DataLoss: a
// damaged file. InvalidArgument names the file and the tensor that is missing or does not fit; or a
// requested size exceeds the split. Registered as "tensors". Thread-safe.
absl::StatusOr<Splits> LoadTensors(const DatasetOptions& options);

}  // namespace ddp::tools::datasets
