// A made-up classification task of any size that needs no file and next to no memory.
//
//   DDP_ASSIGN_OR_RETURN(Splits splits, MakeSynthetic({.train_size = 1'000'000}));
#pragma once

#include "absl/status/statusor.h"
#include "tools/datasets/registry.h"

namespace ddp::tools::datasets {

// Each class has a random prototype, each example is its class's prototype under noise three times
// as large, of which a linear model learns the classes from a few hundred examples. An example is
// a function of (seed, split, index), computed when it is wanted: the same on every rank and
// machine. 10,000 training and 2,000 test examples unless the options say otherwise.
// InvalidArgument names the option for sizes below 1. Registered as "synthetic".
absl::StatusOr<Splits> MakeSynthetic(const DatasetOptions& options);

}  // namespace ddp::tools::datasets
