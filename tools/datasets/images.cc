#include "tools/datasets/images.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/file.h"
#include "base/option_error.h"
#include "base/status.h"
#include "c10/util/Exception.h"
#include "ddp/data/contents_digest.h"
#include "tools/datasets/image_decode.h"
#include "tools/datasets/image_folder.h"
#include "tools/datasets/image_resize.h"

namespace ddp::tools::datasets {
namespace {

const Registration<DatasetRegistry> kImages(
    "images", DatasetEntry{.load = &LoadImages, .options = &AnyOptions::Of<ImagesOptions>});

class ImageFiles : public data::Dataset {
 public:
  // `size` of `files`, evenly spread: they are sorted by class.
  ImageFiles(std::vector<ImageFolder::File> files, int64_t size, const ImagesOptions& options)
      : files_(std::move(files)), size_(size), side_(options.size) {
    for (size_t channel = 0; channel < 3; ++channel) {
      for (size_t value = 0; value < 256; ++value) {
        normalised_[channel][value] = static_cast<float>(
            (static_cast<double>(value) / 255 - options.mean[channel]) / options.std[channel]);
      }
    }
  }

  int64_t size() const override { return size_; }

  // Of the files' names, not of what is in them, which would have to be opened.
  std::string Fingerprint() const override {
    constexpr int64_t kMostNames = 4096;
    data::ContentsDigest digest;
    for (int64_t i = 0; i < size_; i += size_ / kMostNames + 1) {
      const ImageFolder::File& file = FileOf(i);
      digest.Add(file.label);
      digest.Add(file.path.substr(file.path.rfind('/') + 1));
    }
    return digest.Text();
  }

  data::Batch Get(absl::Span<const int64_t> indices) const override {
    const auto n = static_cast<int64_t>(indices.size());
    data::Batch batch{at::empty({n, 3, side_, side_}, at::kFloat), at::empty({n}, at::kLong)};
    auto* input = batch.input.mutable_data_ptr<float>();
    auto* target = batch.target.mutable_data_ptr<int64_t>();
    for (const int64_t index : indices) {
      const ImageFolder::File& file = FileOf(index);
      const Image image = Read(file.path);
      for (size_t channel = 0; channel < 3; ++channel) {
        const std::array<float, 256>& table = normalised_[channel];
        for (int64_t i = 0; i < side_ * side_; ++i) *input++ = table[image.rgb[i * 3 + channel]];
      }
      *target++ = file.label;
    }
    return batch;
  }

 private:
  const ImageFolder::File& FileOf(int64_t index) const {
    return files_[index * static_cast<int64_t>(files_.size()) / size_];
  }
  Image Read(const std::string& path) const {
    const absl::StatusOr<std::string> bytes = ReadFile(path);
    TORCH_CHECK(bytes.ok(), bytes.status().message());
    const absl::StatusOr<Image> image = DecodeImage(path, *bytes);
    TORCH_CHECK(image.ok(), image.status().message());
    return ResizeAndCrop(*image, side_);
  }

  const std::vector<ImageFolder::File> files_;
  const int64_t size_;
  const int64_t side_;
  std::array<std::array<float, 256>, 3> normalised_;
};

}  // namespace

absl::StatusOr<Splits> LoadImages(const DatasetOptions& options) {
  const auto own = options.implementations.Get<ImagesOptions>("images");
  if (options.data_dir.empty()) {
    return OptionError("data_dir", "", "must name the folder of data set images");
  }
  for (const auto& [name, values] : {std::pair("mean", &own.mean), std::pair("std", &own.std)}) {
    if (values->size() == 3) continue;
    return OptionError(absl::StrCat("dataset.images.", name), FormatOption(*values),
                       "must have three numbers, of red, green and blue");
  }
  const std::string train_path = absl::StrCat(options.data_dir, "/train");
  std::string test_path = absl::StrCat(options.data_dir, "/test");
  std::error_code error;
  if (const std::string val = absl::StrCat(options.data_dir, "/val");
      !std::filesystem::exists(test_path, error) && std::filesystem::exists(val, error)) {
    test_path = val;
  }
  for (const std::string& path : {train_path, test_path}) {
    if (std::filesystem::is_directory(path, error)) continue;
    return OptionError("dataset.data_dir", options.data_dir,
                       absl::StrCat("has no folder ", path.substr(path.rfind('/') + 1),
                                    ", with a folder of images for each class"),
                       absl::StatusCode::kNotFound);
  }
  DDP_ASSIGN_OR_RETURN(ImageFolder train, ImageFolder::Open(train_path));
  DDP_ASSIGN_OR_RETURN(ImageFolder test, ImageFolder::Open(test_path, train.classes));
  const auto size_of = [](const char* option, int64_t wanted, const ImageFolder& folder,
                          const std::string& path) {
    return SizeOfSplit(option, wanted, static_cast<int64_t>(folder.files.size()),
                       absl::StrCat("the images in ", path));
  };
  DDP_ASSIGN_OR_RETURN(const int64_t train_size,
                       size_of("train_size", options.train_size, train, train_path));
  DDP_ASSIGN_OR_RETURN(const int64_t test_size,
                       size_of("test_size", options.test_size, test, test_path));
  Splits splits;
  splits.num_classes = static_cast<int64_t>(train.classes.size());
  splits.input_shape = {3, own.size, own.size};
  splits.train = std::make_shared<ImageFiles>(std::move(train.files), train_size, own);
  splits.test = std::make_shared<ImageFiles>(std::move(test.files), test_size, own);
  return splits;
}

}  // namespace ddp::tools::datasets
