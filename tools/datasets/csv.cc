#include "tools/datasets/csv.h"

#include <ATen/ops/empty.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/mapped_file.h"
#include "base/option_error.h"
#include "base/status.h"
#include "ddp/data/contents_digest.h"

namespace ddp::tools::datasets {
namespace {

const Registration<DatasetRegistry> kCsv("csv",
                                         DatasetEntry{.load = &LoadCsv,
                                                      .options = &AnyOptions::Of<CsvOptions>});

class CsvExamples : public data::Dataset {
 public:
  CsvExamples(CsvTable table, const CsvSchema& schema, int64_t size)
      : table_(std::move(table)), features_(schema.num_features()), size_(size) {
    data::ContentsDigest digest;
    schema.AddTo(digest);
    table_.AddTo(digest);
    fingerprint_ = digest.Text();
  }

  int64_t size() const override { return size_; }
  std::string Fingerprint() const override { return fingerprint_; }

  data::Batch Get(absl::Span<const int64_t> indices) const override {
    const auto n = static_cast<int64_t>(indices.size());
    data::Batch batch{at::empty({n, features_}, at::kFloat), at::empty({n}, at::kLong)};
    auto* input = batch.input.mutable_data_ptr<float>();
    auto* target = batch.target.mutable_data_ptr<int64_t>();
    for (const int64_t index : indices) {
      table_.Features(index, input);
      *target++ = table_.Target(index);
      input += features_;
    }
    return batch;
  }

 private:
  const CsvTable table_;
  const int64_t features_;
  const int64_t size_;
  std::string fingerprint_;
};

absl::StatusOr<std::shared_ptr<const MappedFile>> Open(const DatasetOptions& options,
                                                       const std::string& given,
                                                       const std::string& split) {
  if (given.empty() && options.data_dir.empty()) {
    return OptionError(
        absl::StrCat("dataset.csv.", split), "",
        absl::StrCat("must name the file, or data_dir the folder of ", split, ".csv"));
  }
  const std::string path =
      given.empty() ? absl::StrCat(options.data_dir, "/", split, ".csv") : given;
  auto file = MappedFile::Open(path);
  if (file.ok()) return file;
  const auto [option, value] = given.empty()
                                   ? std::pair(std::string("dataset.data_dir"), options.data_dir)
                                   : std::pair(absl::StrCat("dataset.csv.", split), given);
  return OptionError(option, value, absl::StrCat("cannot be read: ", file.status().message()),
                     file.status().code());
}

// `wanted`: examples, 0 for all; of the option `option`.
absl::StatusOr<std::shared_ptr<const CsvExamples>> ReadSplit(const MappedFile& file,
                                                             const CsvSchema& schema,
                                                             const CsvOptions& own,
                                                             const std::string& option,
                                                             int64_t wanted, std::string& about) {
  const absl::string_view text(reinterpret_cast<const char*>(file.bytes().data()),
                               file.bytes().size());
  DDP_ASSIGN_OR_RETURN(CsvTable table, CsvTable::Read(file.path(), text, schema, own));
  const int64_t rows = table.rows();
  DDP_ASSIGN_OR_RETURN(const int64_t size, SizeOfSplit(option, wanted, rows,
                                                       absl::StrCat("the rows of ", file.path())));
  absl::StrAppend(&about, file.path(), ": ", rows, " rows");
  if (table.missing() > 0) absl::StrAppend(&about, ", ", table.missing(), " values missing");
  if (table.unknown() > 0) absl::StrAppend(&about, ", ", table.unknown(), " unknown categories");
  about += "\n";
  return std::make_shared<CsvExamples>(std::move(table), schema, size);
}

}  // namespace

absl::StatusOr<Splits> LoadCsv(const DatasetOptions& options) {
  const auto own = options.implementations.Get<CsvOptions>("csv");
  if (!own.train.empty() && !own.test.empty() && !options.data_dir.empty()) {
    return OptionError("dataset.data_dir", options.data_dir,
                       "has no effect beside dataset.csv.train and dataset.csv.test");
  }
  DDP_ASSIGN_OR_RETURN(const auto train, Open(options, own.train, "train"));
  DDP_ASSIGN_OR_RETURN(const auto test, Open(options, own.test, "test"));
  const absl::string_view text(reinterpret_cast<const char*>(train->bytes().data()),
                               train->bytes().size());
  DDP_ASSIGN_OR_RETURN(const CsvSchema schema, FindCsvSchema(train->path(), text, own));
  Splits splits;
  splits.about = absl::StrCat(schema.Describe(), "\n");
  DDP_ASSIGN_OR_RETURN(
      splits.train, ReadSplit(*train, schema, own, "train_size", options.train_size, splits.about));
  DDP_ASSIGN_OR_RETURN(splits.test,
                       ReadSplit(*test, schema, own, "test_size", options.test_size, splits.about));
  splits.num_classes = schema.num_classes();
  splits.input_shape = {schema.num_features()};
  return splits;
}

}  // namespace ddp::tools::datasets
