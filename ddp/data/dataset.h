// The interface of a data set with random access: any set of examples can be read as one batch.
//
//   class Squares : public ddp::data::Dataset {  // of batches with an input and a target
//     int64_t size() const override { return 100; }
//     ddp::data::Batch Get(absl::Span<const int64_t> indices) const override { … }
//   };
//   class Views : public ddp::data::DatasetOf<Cameras> { … };  // batches of any tree
//   class Shaken : public ddp::data::RandomDatasetOf<ddp::data::Batch> {  // draws random numbers
//     ddp::data::Batch Get(absl::Span<const int64_t> indices,
//                          absl::Span<ddp::data::Random> random) const override { … }
//   };
//
// A data set that gives single examples: example_dataset.h. Shards that are read one after the
// other: stream.h.
#pragma once

#include <cstdint>
#include <string>
#include <typeinfo>

#include "absl/types/span.h"
#include "c10/util/Exception.h"
#include "c10/util/Type.h"
#include "ddp/data/batch.h"
#include "ddp/data/random.h"

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
  //
  // random[i] is of example indices[i] at its place in the epoch (random.h); data sets that take no
  // random numbers may be called without. Data sets must not draw
  // from generators that threads share, such as torch's: the numbers would differ from run to run.
  virtual AnyBatch GetAny(absl::Span<const int64_t> indices,
                          absl::Span<Random> random = {}) const = 0;

  // The name in messages.
  virtual std::string dataset_name() const { return c10::demangle(typeid(*this).name()); }

  // Tells the examples from others of the same number, as digits and letters: the same wherever and
  // whenever the same data are read, and most likely another for other data, or another order of
  // them. Empty: not known, and nothing is compared. The trainer requires the ranks to have the
  // same, and goes on within an epoch with the same alone. It may read samples, and should take no
  // more than some milliseconds (contents_digest.h). May throw.
  virtual std::string Fingerprint() const { return ""; }

  // False: examples must be read about in the order of a stream, by one thread. A loader then has
  // at most one worker.
  virtual bool random_access() const { return true; }
};

inline void RequireRandom(absl::Span<const int64_t> indices, absl::Span<Random> random) {
  TORCH_CHECK(random.size() == indices.size(),
              "the data set takes random numbers: ", indices.size(),
              " examples need as many Random, not ", random.size());
}

// A data set that makes whole batches, without random numbers.
template <Tree B>
class DatasetOf : public AnyDataset {
 public:
  // See AnyDataset::GetAny.
  virtual B Get(absl::Span<const int64_t> indices) const = 0;
  AnyBatch GetAny(absl::Span<const int64_t> indices, absl::Span<Random> = {}) const final {
    return AnyBatch(Get(indices));
  }
};

using Dataset = DatasetOf<Batch>;

// A data set that makes whole batches with random numbers.
template <Tree B>
class RandomDatasetOf : public AnyDataset {
 public:
  // See AnyDataset::GetAny.
  virtual B Get(absl::Span<const int64_t> indices, absl::Span<Random> random) const = 0;
  AnyBatch GetAny(absl::Span<const int64_t> indices, absl::Span<Random> random = {}) const final {
    RequireRandom(indices, random);
    return AnyBatch(Get(indices, random));
  }
};

}  // namespace ddp::data
