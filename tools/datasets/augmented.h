// The transforms of DatasetOptions::augment.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ddp/data/dataset.h"
#include "tools/datasets/registry.h"

namespace ddp::tools::datasets {

// OptionError for dataset.augment, if it names no transform of images that are normalised already,
// as those of the data sets here are.
absl::Status ValidateAugment(const DatasetOptions& options);

// The training set with the transforms of options.augment; itself, if there are none. OptionError
// for a data set without images.
absl::StatusOr<std::shared_ptr<const data::AnyDataset>> Augmented(const Splits& splits,
                                                                  const DatasetOptions& options);

}  // namespace ddp::tools::datasets
