// A synthetic classification task of any size that needs no files and almost no memory.
//
//   DDP_ASSIGN_OR_RETURN(Splits splits, MakeSynthetic({.train_size = 1'000'000}));
#pragma once

#include "absl/status/statusor.h"
#include "tools/datasets/registry.h"

namespace ddp::tools::datasets {

// Each class has a random prototype; each example is the prototype of its class plus noise three
// times as large. A linear model learns the classes from a few hundred examples. Examples are
// computed on demand from (seed, split, index): the same on every rank and machine. Defaults:
// 10,000 training and 2,000 test examples. InvalidArgument, naming the option, for sizes below 1.
// Registered as "synthetic". Thread-safe.
absl::StatusOr<Splits> MakeSynthetic(const DatasetOptions& options);

}  // namespace ddp::tools::datasets
