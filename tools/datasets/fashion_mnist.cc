#include "tools/datasets/fashion_mnist.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/option_error.h"
#include "base/runfiles.h"
#include "base/status.h"
#include "tools/datasets/byte_images.h"
#include "tools/datasets/idx.h"

namespace ddp::tools::datasets {
namespace {

constexpr int64_t kSide = 28;
constexpr int kClasses = 10;
// Mean and standard deviation of the training split's pixels, as fractions of 255.
constexpr float kMean = 0.2860f;
constexpr float kStd = 0.3530f;

const Registration<DatasetRegistry> kFashionMnist("fashion_mnist",
                                                  DatasetEntry{.load = &LoadFashionMnist});

absl::StatusOr<std::string> Folder(const DatasetOptions& options) {
  if (!options.data_dir.empty()) return options.data_dir;
  absl::StatusOr<std::string> folder = Runfile("fashion_mnist/data/fashion");
  if (folder.ok()) return folder;
  return Annotate(folder.status(),
                  "fashion_mnist: start the program with bazel run or from bazel-bin, or set "
                  "dataset.data_dir to the folder with its four files");
}

absl::StatusOr<std::string> FindFile(const std::string& folder, const std::string& name) {
  // Uncompressed files are mapped, and the ranks of a host share them.
  for (const char* suffix : {"", ".gz"}) {
    std::string path = absl::StrCat(folder, "/", name, suffix);
    std::error_code ignored;
    if (std::filesystem::exists(path, ignored)) return path;
  }
  return OptionError("data_dir", folder,
                     absl::StrCat("has neither ", name, ".gz nor ", name,
                                  "; it must be the folder with fashion_mnist's four original "
                                  "files, or be left out to use Bazel's"),
                     absl::StatusCode::kNotFound);
}

// Loads `wanted` examples, or all if that is 0; `option` is its name.
absl::StatusOr<std::shared_ptr<const data::Dataset>> LoadSplit(const std::string& folder,
                                                               const std::string& prefix,
                                                               const std::string& option,
                                                               int64_t wanted) {
  DDP_ASSIGN_OR_RETURN(std::string images_path, FindFile(folder, prefix + "-images-idx3-ubyte"));
  DDP_ASSIGN_OR_RETURN(std::string labels_path, FindFile(folder, prefix + "-labels-idx1-ubyte"));
  DDP_ASSIGN_OR_RETURN(IdxArray labels, ReadIdx(labels_path, 1));
  DDP_ASSIGN_OR_RETURN(IdxArray images, ReadIdx(images_path, 3));

  const int64_t count = labels.sizes[0];
  if (images.sizes != std::vector<int64_t>{count, kSide, kSide}) {
    return absl::DataLossError(absl::StrCat(
        images_path, ": holds ", absl::StrJoin(images.sizes, "x"), " pixels, not ", count, "x",
        kSide, "x", kSide, " as the ", count, " labels of ", labels_path, " demand"));
  }
  const auto bad = std::find_if(labels.values.begin(), labels.values.end(),
                                [](uint8_t label) { return label >= kClasses; });
  if (bad != labels.values.end()) {
    return absl::DataLossError(absl::StrCat(labels_path, ": label ", *bad, " of example ",
                                            bad - labels.values.begin(), " is not in [0, ",
                                            kClasses - 1, "]"));
  }
  DDP_ASSIGN_OR_RETURN(
      const int64_t used,
      SizeOfSplit(option, wanted, count, absl::StrCat("the examples of ", images_path)));
  return std::make_shared<ByteImages>(
      ByteImagesContent{.shape = {1, kSide, kSide},
                        .pixels = images.values.first(used * kSide * kSide),
                        .owner = std::move(images.owner),
                        .labels = {labels.values.begin(), labels.values.begin() + used},
                        .mean = kMean,
                        .std = kStd});
}

}  // namespace

absl::StatusOr<Splits> LoadFashionMnist(const DatasetOptions& options) {
  DDP_ASSIGN_OR_RETURN(std::string folder, Folder(options));
  Splits splits;
  DDP_ASSIGN_OR_RETURN(splits.test, LoadSplit(folder, "t10k", "test_size", options.test_size));
  DDP_ASSIGN_OR_RETURN(splits.train, LoadSplit(folder, "train", "train_size", options.train_size));
  splits.num_classes = kClasses;
  splits.input_shape = {1, kSide, kSide};
  return splits;
}

}  // namespace ddp::tools::datasets
