// Images in folders, a folder for each class: ROOT/train/CLASS/*.jpg and ROOT/test/CLASS/*.jpg.
//
//   DatasetOptions options = {.data_dir = "photos"};
//   options.implementations.Mutable<ImagesOptions>("images").size = 64;
//   DDP_ASSIGN_OR_RETURN(Splits splits, LoadImages(options));
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "base/options.h"
#include "tools/datasets/registry.h"

namespace ddp::tools::datasets {

struct ImagesOptions {
  int64_t size = 64;
  // They are of red, green and blue; the defaults are those of ImageNet, as torchvision's models
  // take them.
  std::vector<double> mean = {0.485, 0.456, 0.406};
  std::vector<double> std = {0.229, 0.224, 0.225};
};

constexpr auto OptionsOf(const ImagesOptions&) {
  return Options(
      Option("size", &ImagesOptions::size,
             "pixels of a side of the images, which are scaled to it and cut")
          .AtLeast(1)
          .AtMost(4096),
      Option("mean", &ImagesOptions::mean, "of red, green and blue, from 0 to 1; is subtracted")
          .AtLeast(0)
          .AtMost(1),
      Option("std", &ImagesOptions::std,
             "of red, green and blue; the differences are divided by it")
          .Above(0)
          .AtMost(1e6));
}

// The images of options.data_dir, as ImageFolder finds them (image_folder.h), in its folders train
// and test, or val where there is no test. Inputs are [n, 3, size, size]: each image is read and
// decoded when it is asked for (image_decode.h), scaled and cut (image_resize.h), and normalised by
// mean and std. Errors: those of ImageFolder::Open; OptionError of a size that exceeds the split,
// or of no folder. Get throws for a file that cannot be read or decoded, with its path. Registered
// as "images". Thread-safe.
absl::StatusOr<Splits> LoadImages(const DatasetOptions& options);

}  // namespace ddp::tools::datasets
