// Fashion-MNIST: 60,000 training and 10,000 test images of 28x28 grey pixels in 10 classes.
// https://github.com/zalandoresearch/fashion-mnist
//
//   DDP_ASSIGN_OR_RETURN(Splits splits, LoadFashionMnist({}));  // registered as "fashion_mnist"
#pragma once

#include "absl/status/statusor.h"
#include "tools/datasets/registry.h"

namespace ddp::tools::datasets {

// Reads the four original files, {train,t10k}-{images-idx3,labels-idx1}-ubyte, each with or without
// ".gz", from options.data_dir or, if that is empty, from Bazel's @fashion_mnist. Those without are
// mapped: the processes of a host share one copy. Pixels are normalised with mean and standard
// deviation of the training split. NotFound: a file is missing, with a remedy. DataLoss: a damaged
// file, with the reason. InvalidArgument: a requested size exceeds the split. Thread-safe.
absl::StatusOr<Splits> LoadFashionMnist(const DatasetOptions& options);

}  // namespace ddp::tools::datasets
