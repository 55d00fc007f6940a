// Random augmentation of images: crop, flip, normalise. It applies to a data set, or to a batch
// alone.
//
//   DDP_ASSIGN_OR_RETURN(auto train, AugmentedDataset::Create(
//       images, {.transforms = {"crop", "flip"}}));
//   DDP_ASSIGN_OR_RETURN(auto loader, Loader::Create(*train, {.batch_size = 64}));
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ddp/data/batch.h"
#include "ddp/data/dataset.h"
#include "ddp/data/for_evaluation.h"
#include "ddp/data/random.h"

namespace ddp::data {

struct AugmentOptions {
  // Any of these, each once; the random numbers of an image are drawn in this order.
  //   crop       a window of the image's own size, at a random place of the image with `padding`
  //              zeros around it (torchvision's RandomCrop with padding)
  //   flip       left and right change places, with probability 1/2
  //   normalise  (x - mean) / std, after the others; bytes become fractions of 255 before
  std::vector<std::string> transforms = {"crop", "flip"};
  int64_t padding = 4;  // pixels on each side, >= 0
  // They have one number for each channel, or one for all.
  std::vector<float> mean = {0};
  std::vector<float> std = {1};
};

// InvalidArgument names a transform that there is not, or that stands there twice, and a number out
// of range.
absl::Status Validate(const AugmentOptions& options);

// Returns new images [n, channels, height, width], or [n, height, width] of one channel; random[i]
// is that of image i. `images` have any dtype of 1, 2, 4 or 8 bytes; normalise takes float32 and
// bytes, and returns float32. Throws c10::Error for others. One thread; thread-safe.
at::Tensor Augment(const at::Tensor& images, const AugmentOptions& options,
                   absl::Span<Random> random);

// `images` with Augment applied to Batch::input. Immutable; thread-safe.
class AugmentedDataset final : public RandomDatasetOf<Batch>, public EvaluatedOtherwise {
 public:
  // `images` has batches of type Batch. It may draw random numbers itself; Augment's come after
  // them. Errors of Validate.
  static absl::StatusOr<std::shared_ptr<const AugmentedDataset>> Create(
      std::shared_ptr<const AnyDataset> images, const AugmentOptions& options);

  int64_t size() const override { return images_->size(); }
  std::string dataset_name() const override { return images_->dataset_name(); }
  bool random_access() const override { return images_->random_access(); }
  std::string Fingerprint() const override { return images_->Fingerprint(); }
  const AnyDataset& for_evaluation() const override { return ForEvaluation(*images_); }
  Batch Get(absl::Span<const int64_t> indices, absl::Span<Random> random) const override;

 private:
  AugmentedDataset(std::shared_ptr<const AnyDataset> images, const AugmentOptions& options)
      : images_(std::move(images)), options_(options) {}

  const std::shared_ptr<const AnyDataset> images_;
  const AugmentOptions options_;
};

}  // namespace ddp::data
