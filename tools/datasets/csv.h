// Classes by the columns of CSV files.
//
//   DatasetOptions options = {.data_dir = "wine"};  // train.csv and test.csv
//   options.implementations.Mutable<CsvOptions>("csv").columns = {"quality:target", "id:ignore"};
//   DDP_ASSIGN_OR_RETURN(Splits splits, LoadCsv(options));
//
// docs/data.md says how columns become numbers.
#pragma once

#include "absl/status/statusor.h"
#include "tools/datasets/csv_table.h"
#include "tools/datasets/registry.h"

namespace ddp::tools::datasets {

// input_shape is {features}: those of the columns, in the order of the training file. Each process
// has the numbers of both files in memory. Errors: those of FindCsvSchema and CsvTable::Read, of
// MappedFile::Open, and OptionError of a size that exceeds the split. Registered as "csv".
// Thread-safe.
absl::StatusOr<Splits> LoadCsv(const DatasetOptions& options);

}  // namespace ddp::tools::datasets
