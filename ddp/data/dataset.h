// The interface of a dataset with random access: any set of examples can be read as one batch.
//
//   class Squares : public ddp::data::Dataset {
//     int64_t size() const override { return 100; }
//     ddp::data::Batch Get(absl::Span<const int64_t> indices) const override { … }
//   };
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "absl/types/span.h"

namespace ddp::data {

// `n` examples, collated along dimension 0.
struct Batch {
  at::Tensor input;  // [n, …]
  // [n] int64 class indices for classification, otherwise the task's own; undefined: none.
  at::Tensor target;
};

// Get must be thread-safe: loader threads call it concurrently.
class Dataset {
 public:
  virtual ~Dataset() = default;

  // Number of examples; constant.
  virtual int64_t size() const = 0;

  // The examples `indices`, in this order; each index is in [0, size()). Returns new CPU tensors.
  // May throw: Loader::Next then returns an error.
  virtual Batch Get(absl::Span<const int64_t> indices) const = 0;
};

}  // namespace ddp::data
