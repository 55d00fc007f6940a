#include "tools/datasets/augmented.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/option_error.h"
#include "base/status.h"
#include "ddp/data/augment.h"

namespace ddp::tools::datasets {
namespace {

absl::Status Refuse(const DatasetOptions& options, absl::string_view why) {
  return OptionError("dataset.augment", absl::StrJoin(options.augment, ","), why);
}

}  // namespace

absl::Status ValidateAugment(const DatasetOptions& options) {
  absl::Status valid = data::Validate({.transforms = options.augment});
  if (valid.ok() && std::count(options.augment.begin(), options.augment.end(), "normalise") > 0) {
    valid = absl::InvalidArgumentError("the images of the data sets here are normalised already");
  }
  if (valid.ok()) return valid;
  return Refuse(options, absl::StrCat("cannot be used: ", valid.message()));
}

absl::StatusOr<std::shared_ptr<const data::AnyDataset>> Augmented(const Splits& splits,
                                                                  const DatasetOptions& options) {
  if (options.augment.empty()) return splits.train;
  DDP_RETURN_IF_ERROR(ValidateAugment(options));
  if (splits.input_shape.size() != 3) {
    return Refuse(options,
                  absl::StrCat("is for images, but the examples of data set ", options.name,
                               " have ", splits.input_shape.size(), " dimensions"));
  }
  return data::AugmentedDataset::Create(splits.train, {.transforms = options.augment});
}

}  // namespace ddp::tools::datasets
