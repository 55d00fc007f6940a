// Fuzz target: CSV files.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "base/fuzz_testing.h"
#include "tools/datasets/csv_reader.h"
#include "tools/datasets/csv_table.h"

namespace {

using namespace ddp::tools::datasets;  // NOLINT

// The records of a text; fewer, if it is damaged.
std::vector<std::vector<std::string>> Records(absl::string_view text) {
  CsvReader reader("fuzz.csv", text);
  std::vector<std::vector<std::string>> records;
  std::vector<std::string> fields;
  while (reader.Next(fields).value_or(false)) {
    if (fields.empty()) std::abort();
    records.push_back(fields);
  }
  return records;
}

std::string Quoted(const std::vector<std::vector<std::string>>& records) {
  std::string text;
  for (const std::vector<std::string>& fields : records) {
    for (size_t i = 0; i < fields.size(); ++i) {
      absl::StrAppend(&text, i == 0 ? "" : ",", "\"",
                      absl::StrReplaceAll(fields[i], {{"\"", "\"\""}}), "\"");
    }
    text += "\r\n";
  }
  return text;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const auto records = Records(text);
  if (Records(Quoted(records)) != records) std::abort();
  for (const CsvMissing missing : {CsvMissing::kError, CsvMissing::kNan}) {
    const CsvOptions options = {.missing = missing, .unknown = CsvUnknown::kIgnore};
    const auto schema = FindCsvSchema("fuzz.csv", text, options);
    if (!schema.ok()) continue;
    (void)schema->Describe();
    const auto table = CsvTable::Read("fuzz.csv", text, *schema, options);
    if (!table.ok()) continue;
    // Every value of the training file is known.
    if (table->unknown() != 0) std::abort();
    // One more behind the end must not be written.
    std::vector<float> features(schema->num_features() + 1, 77.0f);
    for (int64_t row = 0; row < table->rows(); ++row) {
      table->Features(row, features.data());
      if (table->Target(row) < 0 || table->Target(row) >= schema->num_classes()) std::abort();
    }
    if (features.back() != 77.0f) std::abort();
  }
  return 0;
}
