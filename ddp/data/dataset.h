// A dataset: a number of examples, of which any set of indices can be had as one batch.
//
//   class Squares : public ddp::data::Dataset {
//     int64_t size() const override { return 100; }
//     Batch Get(absl::Span<const int64_t> indices) const override { … }
//   };
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "absl/types/span.h"

namespace ddp::data {

// `n` examples, collated along dimension 0.
struct Batch {
  at::Tensor input;   // [n, …]
  at::Tensor target;  // [n] int64 class indices for classification, otherwise the task's own
};

// Thread safety: Get may be called from several threads at once.
class Dataset {
 public:
  virtual ~Dataset() = default;

  // Number of examples; constant.
  virtual int64_t size() const = 0;

  // The examples of `indices`, in that order, each in [0, size()). CPU tensors, freshly allocated.
  virtual Batch Get(absl::Span<const int64_t> indices) const = 0;
};

}  // namespace ddp::data
