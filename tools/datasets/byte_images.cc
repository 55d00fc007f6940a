#include "tools/datasets/byte_images.h"

#include <ATen/ops/empty.h>

#include <functional>
#include <numeric>
#include <utility>

#include "absl/log/absl_check.h"
#include "ddp/data/contents_digest.h"

namespace ddp::tools::datasets {
namespace {

int64_t Product(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

}  // namespace

ByteImages::ByteImages(ByteImagesContent content)
    : content_(std::move(content)), image_size_(Product(content_.shape)) {
  ABSL_CHECK_EQ(static_cast<int64_t>(content_.pixels.size()), size() * image_size_);
}

data::Batch ByteImages::Get(absl::Span<const int64_t> indices) const {
  const int64_t n = static_cast<int64_t>(indices.size());
  std::vector<int64_t> sizes = {n};
  sizes.insert(sizes.end(), content_.shape.begin(), content_.shape.end());
  data::Batch batch{at::empty(sizes, at::kFloat), at::empty({n}, at::kLong)};
  const float mean = content_.mean, std = content_.std;
  float* input = batch.input.mutable_data_ptr<float>();
  int64_t* target = batch.target.mutable_data_ptr<int64_t>();
  for (int64_t index : indices) {
    const uint8_t* image = content_.pixels.data() + index * image_size_;
    // Arithmetic instead of a table of 256 values: it is vectorised and twice as fast.
    for (int64_t i = 0; i < image_size_; ++i) {
      *input++ = (static_cast<float>(image[i]) / 255.0f - mean) / std;
    }
    *target++ = content_.labels[index];
  }
  return batch;
}

std::string ByteImages::Fingerprint() const {
  data::ContentsDigest digest;
  digest.AddSamples(absl::MakeConstSpan(content_.shape));
  digest.AddSamples(content_.pixels);
  digest.AddSamples(absl::MakeConstSpan(content_.labels));
  return digest.Text();
}

}  // namespace ddp::tools::datasets
