// Datasets by name, for `--dataset=NAME` of //tools:train.
//
//   DDP_ASSIGN_OR_RETURN(Splits splits, Load({.name = "fashion_mnist", .train_size = 1000}));
//   Loader::Create(*splits.train, …);
//
// docs/data.md shows how to add one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/implementation_options.h"
#include "base/option_error.h"
#include "base/options.h"
#include "base/registry.h"
#include "base/status.h"
#include "ddp/data/dataset.h"

namespace ddp::tools::datasets {

// A classification dataset: inputs are float32 of shape [n] + input_shape, targets int64 of shape
// [n] in [0, num_classes). Or one of sequences: inputs and targets are int64 of shape [n] +
// input_shape; the target of a token is the next one, or -100 where there is none.
struct Splits {
  std::shared_ptr<const data::Dataset> train;
  std::shared_ptr<const data::Dataset> test;
  int64_t num_classes = 0;
  std::vector<int64_t> input_shape;
  // For sequences, it says what a token is: "byte" of text, or "token" of a tokenizer; else empty.
  std::string token = "";
  // It tells the user, in whole lines, what was found in the files; or it is empty.
  std::string about = "";
};

// Returns how many of the `all` examples in files a split has: `wanted`, or all for 0.
// OptionError of `option` (train_size, test_size); `what` names the examples.
inline absl::StatusOr<int64_t> SizeOfSplit(const std::string& option, int64_t wanted, int64_t all,
                                           absl::string_view what) {
  if (wanted >= 0 && wanted <= all) return wanted > 0 ? wanted : all;
  return OptionError(option, absl::StrCat(wanted),
                     absl::StrCat("must be from 0 (all) to ", all, ", ", what));
}

struct DatasetOptions;

// Loads or generates a dataset. Errors name the file and the remedy.
using DatasetFactory = absl::StatusOr<Splits> (*)(const DatasetOptions& options);

struct DatasetTag {
  static constexpr absl::string_view kWhat = "dataset";
};
struct DatasetEntry {
  DatasetFactory load = nullptr;
  // &AnyOptions::Of<…> for the data set's own options, "dataset.NAME.…"; null: it has none.
  AnyOptions (*options)() = nullptr;
};
using DatasetRegistry = Registry<DatasetEntry, DatasetTag>;

struct DatasetOptions {
  std::string name = "synthetic";
  // These are options of the data sets themselves.
  ImplementationOptions implementations = ImplementationOptions::From<DatasetRegistry>();
  // Folder with the dataset's files; empty: the dataset's own default (Bazel's data dependency).
  std::string data_dir = "";

  // Number of examples per split. A dataset from files yields its first ones, at most as many as
  // there are. 0 means the default, which for a dataset from files is all.
  int64_t train_size = 0;
  int64_t test_size = 0;

  // Random transforms of the images of the training set (ddp/data/augment.h): crop, flip. The
  // program applies them.
  std::vector<std::string> augment = {};

  // Tokens of an example of a sequence. The program sets it, from the model; 0: that takes none.
  int64_t context = 128;

  // The members below are for generated datasets. The program sets the seed.
  int64_t seed = 0;
  std::vector<int64_t> input_shape = {1, 28, 28};
  int64_t num_classes = 10;
};

constexpr auto OptionsOf(const DatasetOptions&) {
  constexpr double kMost = 1e12;
  return Options(
      Option("name", &DatasetOptions::name, "data set to train on")
          .OneOfThese(&DatasetRegistry::Names),
      Option("data_dir", &DatasetOptions::data_dir,
             "folder of the data set's files; empty: the files that Bazel fetched")
          .Incidental()
          .OnAllRanksOrNone(),
      Option("augment", &DatasetOptions::augment,
             "random transforms of the training set's images: crop, flip"),
      Option("train_size", &DatasetOptions::train_size, "maximum training examples; 0: all")
          .AtLeast(0)
          .AtMost(kMost),
      Option("test_size", &DatasetOptions::test_size, "maximum test examples; 0: all")
          .AtLeast(0)
          .AtMost(kMost),
      Inline(&DatasetOptions::implementations));
}

// Loads the dataset options.name. NotFound, listing the linked ones, for an unknown name; errors of
// the dataset's factory.
inline absl::StatusOr<Splits> Load(const DatasetOptions& options) {
  DDP_ASSIGN_OR_RETURN(const DatasetEntry entry, DatasetRegistry::Find(options.name));
  return entry.load(options);
}

}  // namespace ddp::tools::datasets
