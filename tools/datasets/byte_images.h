// A dataset of byte images in memory that returns normalised float batches.
//
//   ByteImages train({.shape = {1, 28, 28},
//                     .pixels = images.values,  // of ReadIdx
//                     .owner = images.owner,
//                     .labels = …,
//                     .mean = 0.286f,
//                     .std = 0.353f});
//   Batch batch = train.Get({0, 17});  // input [2, 1, 28, 28] float32, target [2] int64
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "ddp/data/dataset.h"

namespace ddp::tools::datasets {

struct ByteImagesContent {
  std::vector<int64_t> shape;                   // of one image
  absl::Span<const uint8_t> pixels;             // image after image
  std::shared_ptr<const void> owner = nullptr;  // of the pixels; null: they outlive the data set
  std::vector<uint8_t> labels;                  // one per image
  // A pixel p becomes (p / 255 - mean) / std.
  float mean = 0;
  float std = 1;
};

// Keeps bytes, a quarter of the size of floats, and converts the examples of each batch.
// Immutable; thread-safe.
class ByteImages : public data::Dataset {
 public:
  // CHECK-fails if the numbers of pixels and labels do not fit.
  explicit ByteImages(ByteImagesContent content);

  int64_t size() const override { return static_cast<int64_t>(content_.labels.size()); }
  data::Batch Get(absl::Span<const int64_t> indices) const override;
  std::string Fingerprint() const override;

 private:
  const ByteImagesContent content_;
  const int64_t image_size_;
};

}  // namespace ddp::tools::datasets
