// The interface of a data set with random access: any set of examples can be read as one batch.
//
//   class Squares : public ddp::data::Dataset {  // of batches with an input and a target
//     int64_t size() const override { return 100; }
//     ddp::data::Batch Get(absl::Span<const int64_t> indices) const override { … }
//   };
//   class Views : public ddp::data::DatasetOf<Cameras> { … };  // batches of any tree
//
// A data set that gives single examples: example_dataset.h.
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "ddp/data/batch.h"

namespace ddp::data {

// A data set of any type of batch. Get and GetAny must be thread-safe: loader threads call them
// concurrently.
class AnyDataset {
 public:
  virtual ~AnyDataset() = default;

  // Number of examples; constant.
  virtual int64_t size() const = 0;

  // The examples `indices`, in this order; each index is in [0, size()). Returns new CPU tensors.
  // May throw: the loader then returns an error.
  virtual AnyBatch GetAny(absl::Span<const int64_t> indices) const = 0;
};

// A data set that makes whole batches.
template <Tree B>
class DatasetOf : public AnyDataset {
 public:
  // See AnyDataset::GetAny.
  virtual B Get(absl::Span<const int64_t> indices) const = 0;
  AnyBatch GetAny(absl::Span<const int64_t> indices) const final { return AnyBatch(Get(indices)); }
};

using Dataset = DatasetOf<Batch>;

}  // namespace ddp::data
