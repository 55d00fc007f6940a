// CSV files as rows of numbers: the columns have types, which are given or found in the training
// file. Blanks around names and values are left out. Free of torch.
//
//   DDP_ASSIGN_OR_RETURN(CsvSchema schema, FindCsvSchema("train.csv", text, {}));
//   DDP_ASSIGN_OR_RETURN(CsvTable train, CsvTable::Read("train.csv", text, schema, {}));
//   train.Features(/*row=*/17, to);  // to[schema.num_features()]
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/options.h"
#include "ddp/data/contents_digest.h"

namespace ddp::tools::datasets {

enum class CsvMissing {
  kError,
  kMean,  // of the column in the training file; of a category, no category
  kNan,   // pandas' value; of a category, no category
};
constexpr auto OptionNames(CsvMissing) {
  return std::to_array<std::pair<absl::string_view, CsvMissing>>(
      {{"error", CsvMissing::kError}, {"mean", CsvMissing::kMean}, {"nan", CsvMissing::kNan}});
}

enum class CsvUnknown { kError, kIgnore };  // scikit-learn's handle_unknown
constexpr auto OptionNames(CsvUnknown) {
  return std::to_array<std::pair<absl::string_view, CsvUnknown>>(
      {{"error", CsvUnknown::kError}, {"ignore", CsvUnknown::kIgnore}});
}

struct CsvOptions {
  std::string train = "";
  std::string test = "";
  std::vector<std::string> columns = {};
  std::string delimiter = ",";
  CsvMissing missing = CsvMissing::kError;
  CsvUnknown unknown = CsvUnknown::kError;
  bool normalise = true;
};

constexpr auto OptionsOf(const CsvOptions&) {
  return Options(
      Option("train", &CsvOptions::train,
             "the training file, which begins with a line of names; empty: train.csv in data_dir")
          .OnAllRanksOrNone(),
      Option("test", &CsvOptions::test, "the test file; empty: test.csv in data_dir")
          .OnAllRanksOrNone(),
      Option("columns", &CsvOptions::columns,
             "NAME:TYPE of columns, TYPE one of float, category, target, ignore; of others it is "
             "found in the training file"),
      Option("delimiter", &CsvOptions::delimiter,
             "the character between the fields of a line, or tab"),
      Option("missing", &CsvOptions::missing,
             "what becomes of a missing value (empty, NA, and others as in pandas)"),
      Option("unknown", &CsvOptions::unknown,
             "what becomes of a category that the training file does not have: an error, or none"),
      Option("normalise", &CsvOptions::normalise,
             "let numbers have mean 0 and deviation 1 in the training file"));
}

enum class CsvType {
  kFloat,     // one feature
  kCategory,  // a feature for each of its values in the training file: one is 1, the others 0
  kTarget,    // the class: the number of its value among those of the training file
  kIgnore,
};

struct CsvColumn {
  std::string name;
  CsvType type = CsvType::kIgnore;
  // These are of a category or the target, by their codes: numbers ascend, if all are whole, else
  // texts.
  std::vector<std::string> values = {};
  // Mean and deviation are of a float, over the training file, as pandas' mean() and std(ddof=0).
  double mean = 0;
  double deviation = 0;
  int64_t missing = 0;  // values, in the training file
  int64_t rounded = 0;  // whole numbers that a double does not hold, as ids of 64 bits

  std::map<std::string, int32_t, std::less<>> codes = {};  // of `values`
};

// A value; immutable once it is made. Thread-safe.
struct CsvSchema {
  std::vector<CsvColumn> columns;  // in the order of the training file

  const CsvColumn& target() const;
  int64_t num_classes() const { return static_cast<int64_t>(target().values.size()); }
  int64_t num_features() const;
  // The columns by type, the missing and the rounded values of the training file, and the classes;
  // one line.
  std::string Describe() const;
  // Adds the columns, with their categories and classes, means and deviations.
  void AddTo(data::ContentsDigest& digest) const;
};

// Reads the whole training file. `path` is for errors, which name the line and the column: those of
// CsvReader; a compressed file; a row with another number of fields than the first line; no column
// of type target, and none of that name; a target that is missing or no class; a category of too
// many values. OptionError of dataset.csv.columns or .delimiter.
absl::StatusOr<CsvSchema> FindCsvSchema(const std::string& path, absl::string_view text,
                                        const CsvOptions& options);

// The rows of a file, in memory. Immutable; thread-safe.
class CsvTable {
 public:
  // Columns are found by their names; those that the schema has not are passed over. Errors, with
  // line and column: a column that there is not; a value that is no number, that is missing or that
  // the training file does not have, each as the options say; a class that it does not have.
  static absl::StatusOr<CsvTable> Read(const std::string& path, absl::string_view text,
                                       const CsvSchema& schema, const CsvOptions& options);

  int64_t rows() const { return static_cast<int64_t>(targets_.size()); }
  // Fills to[schema.num_features()]; 0 <= row < rows().
  void Features(int64_t row, float* to) const;
  int64_t Target(int64_t row) const { return targets_[row]; }

  // Adds the number of rows, and samples of them.
  void AddTo(data::ContentsDigest& digest) const;

  int64_t missing() const { return missing_; }  // values that were replaced
  int64_t unknown() const { return unknown_; }  // categories that were passed over

 private:
  std::vector<int32_t> widths_;  // of each feature column: 0 for a float, else its categories
  std::vector<float> values_;    // row by row: numbers, and codes of categories, -1 for none
  std::vector<int32_t> targets_;
  int64_t missing_ = 0;
  int64_t unknown_ = 0;
};

}  // namespace ddp::tools::datasets
