#include "tools/datasets/csv_table.h"

#include <cmath>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tools/datasets/csv_reader.h"

namespace ddp::tools::datasets {
namespace {

using Fields = std::vector<std::string>;

// The records of a text; the error, if there is one, is the last record.
std::vector<Fields> Records(absl::string_view text, char delimiter = ',') {
  CsvReader reader("a.csv", text, delimiter);
  std::vector<Fields> records;
  Fields fields;
  while (true) {
    const absl::StatusOr<bool> is_record = reader.Next(fields);
    if (!is_record.ok()) records.push_back({std::string(is_record.status().message())});
    if (!is_record.value_or(false)) return records;
    records.push_back(fields);
  }
}

TEST(CsvReaderTest, Rfc4180) {
  const std::vector<Fields> expected = {{"a", "b", "c"}, {"1", "", "x, \"y\"\r\nz"}, {"", "", ""}};
  EXPECT_EQ(Records("a,b,c\r\n1,,\"x, \"\"y\"\"\r\nz\"\r\n,,\r\n"), expected);
  EXPECT_EQ(Records("a,b,c\n1,,\"x, \"\"y\"\"\r\nz\"\n,,"), expected);
  EXPECT_EQ(Records("\xef\xbb\xbf\"a\",b,c\r1,,\"x, \"\"y\"\"\r\nz\"\r,,\r"), expected);
  EXPECT_EQ(Records("a;b;c\n\n1;;\"x, \"\"y\"\"\r\nz\"\n\n;;\n\n", ';'), expected);
  EXPECT_EQ(Records(""), std::vector<Fields>{});
  EXPECT_EQ(Records("\n\r\n"), std::vector<Fields>{});
  EXPECT_EQ(Records("\"\""), std::vector<Fields>{{""}});
  // An unquoted field keeps its blanks.
  EXPECT_EQ(Records(" a , b"), (std::vector<Fields>{{" a ", " b"}}));
}

TEST(CsvReaderTest, LinesWithinQuotesCount) {
  CsvReader reader("a.csv", "a\n\"1\r\n2\n3\"\n\nb");
  Fields fields;
  std::vector<int64_t> lines;
  while (reader.Next(fields).value()) lines.push_back(reader.line());
  EXPECT_EQ(lines, (std::vector<int64_t>{1, 2, 6}));
}

TEST(CsvReaderTest, ErrorsNameTheLine) {
  EXPECT_EQ(Records("a\n\"b\n\nc\n").back()[0],
            "a.csv, line 2: a quote is opened and never closed");
  EXPECT_TRUE(absl::StartsWith(Records("a\nb\n\"c\" d\n").back()[0],
                               "a.csv, line 3: text follows a closing quote"));
  EXPECT_TRUE(
      absl::StartsWith(Records("a\n5\" pipe\n").back()[0], "a.csv, line 2: a quote stands within"));
  EXPECT_TRUE(absl::StartsWith(Records(absl::string_view("a\n\0b\n", 5)).back()[0],
                               "a.csv, line 2: has a zero byte"));
}

struct Read {
  CsvSchema schema;
  CsvTable train, test;
};

absl::StatusOr<Read> ReadBoth(absl::string_view train, absl::string_view test,
                              const CsvOptions& options = {}) {
  Read read;
  absl::StatusOr<CsvSchema> schema = FindCsvSchema("train.csv", train, options);
  if (!schema.ok()) return schema.status();
  absl::StatusOr<CsvTable> first = CsvTable::Read("train.csv", train, *schema, options);
  if (!first.ok()) return first.status();
  absl::StatusOr<CsvTable> second = CsvTable::Read("test.csv", test, *schema, options);
  if (!second.ok()) return second.status();
  return Read{*schema, *std::move(first), *std::move(second)};
}

std::vector<float> Row(const Read& read, const CsvTable& table, int64_t row) {
  std::vector<float> features(read.schema.num_features());
  table.Features(row, features.data());
  return features;
}

std::string ErrorOf(absl::string_view train, absl::string_view test,
                    const CsvOptions& options = {}) {
  return std::string(ReadBoth(train, test, options).status().message());
}

constexpr absl::string_view kTrain =
    ",age,city,target\n"
    "0,1,Ulm,yes\n"
    "1,3,Bonn,no\n"
    "2,5,Ulm,yes\n";

TEST(CsvTableTest, TypesAreFound) {
  // The columns of another file may stand in another order, among others.
  const auto read = ReadBoth(kTrain, "more,target,city,age\nx,no, Bonn , 7 \n");
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(
      read->schema.Describe(),
      "columns: float age; category city (2); ignored without a name; target target (no, yes)");
  EXPECT_EQ(read->train.rows(), 3);
  const double unit = std::sqrt(8.0 / 3);  // of 1, 3, 5; over n, not n - 1
  EXPECT_EQ(Row(*read, read->train, 0), (std::vector<float>{static_cast<float>(-2 / unit), 0, 1}));
  EXPECT_EQ(Row(*read, read->train, 1), (std::vector<float>{0, 1, 0}));
  EXPECT_EQ(read->train.Target(0), 1);
  EXPECT_EQ(read->train.Target(1), 0);
  EXPECT_EQ(Row(*read, read->test, 0), (std::vector<float>{static_cast<float>(4 / unit), 1, 0}));
  EXPECT_EQ(read->test.Target(0), 0);
}

TEST(CsvTableTest, TypesAreGiven) {
  const CsvOptions options = {.columns = {"city:target", "target:category", "age:ignore"},
                              .normalise = false};
  const auto read = ReadBoth(kTrain, "city,target\nUlm,no\n", options);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->schema.Describe(),
            "columns: category target (2); ignored without a name, age; target city (Bonn, Ulm)");
  EXPECT_EQ(Row(*read, read->test, 0), (std::vector<float>{1, 0}));
  EXPECT_EQ(read->test.Target(0), 1);

  const auto numbers = ReadBoth(
      "n\tk:l\tclass\n1\t10\t10\n2\t9\t9\n", "n\tk:l\tclass\n-1e3\t10\t9.0\n",
      {.columns = {"class:target", "k:l:category"}, .delimiter = "tab", .normalise = false});
  ASSERT_TRUE(numbers.ok()) << numbers.status();
  // Whole numbers ascend, as categories and as classes.
  EXPECT_EQ(Row(*numbers, numbers->train, 0), (std::vector<float>{1, 0, 1}));
  EXPECT_EQ(numbers->train.Target(0), 1);
  EXPECT_EQ(Row(*numbers, numbers->test, 0), (std::vector<float>{-1000, 0, 1}));
  EXPECT_EQ(numbers->test.Target(0), 0);
}

TEST(CsvTableTest, MissingValues) {
  constexpr absl::string_view kHoles = "age,city,target\n1,Ulm,0\nNA,Bonn,1\n3,\"\",1\n";
  constexpr absl::string_view kTest = "age,city,target\n,Ulm,0\n";
  EXPECT_TRUE(absl::StartsWith(ErrorOf(kHoles, kTest),
                               "train.csv, line 3, column 'age': 'NA' is missing; fill it"));
  auto read = ReadBoth(kHoles, kTest, {.missing = CsvMissing::kMean, .normalise = false});
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->schema.Describe(),
            "columns: float age (1 missing); category city (2, 1 missing); target target (0, 1)");
  EXPECT_EQ(read->train.missing(), 2);
  EXPECT_EQ(read->test.missing(), 1);
  EXPECT_EQ(Row(*read, read->train, 1), (std::vector<float>{2, 1, 0}));
  EXPECT_EQ(Row(*read, read->train, 2), (std::vector<float>{3, 0, 0}));
  EXPECT_EQ(Row(*read, read->test, 0), (std::vector<float>{2, 0, 1}));
  read = ReadBoth(kHoles, kTest, {.missing = CsvMissing::kMean});
  EXPECT_EQ(Row(*read, read->train, 1)[0], 0);
  read = ReadBoth(kHoles, kTest, {.missing = CsvMissing::kNan});
  EXPECT_TRUE(std::isnan(Row(*read, read->train, 1)[0]));
  EXPECT_EQ(ErrorOf("a,target\n1,0\n2,\n", kTest),
            "train.csv, line 3, column 'target': the class is missing");
  EXPECT_TRUE(absl::StrContains(
      ErrorOf("a,b,target\n1,,0\n2,NA,1\n", kTest, {.missing = CsvMissing::kMean}),
      "train.csv, column 'b': has no value in any row"));
}

TEST(CsvTableTest, ClassesThatAreNumbersHaveOneForm) {
  const auto read = ReadBoth("a,target\n1,+1\n2,01\n3,0\n4,1.0\n", "a,target\n1,001\n2,-0\n");
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->schema.target().values, (Fields{"0", "1"}));
  for (int64_t row = 0; row < 4; ++row) EXPECT_EQ(read->train.Target(row), row == 2 ? 0 : 1) << row;
  EXPECT_EQ(read->test.Target(0), 1);
  EXPECT_EQ(read->test.Target(1), 0);
  // Texts are what they are.
  const auto texts = ReadBoth("a,target\n1,7\n2,007\n3,x\n", "a,target\n1,7\n");
  ASSERT_TRUE(texts.ok()) << texts.status();
  EXPECT_EQ(texts->schema.num_classes(), 3);
  EXPECT_TRUE(absl::StrContains(ErrorOf("a,target\n1,7\n3,x\n", "a,target\n1,007\n"),
                                "'007' is none of the 2 classes"));
}

TEST(CsvTableTest, NumbersOfAllForms) {
  constexpr absl::string_view kForms =
      "a,target\n1e5,0\n 3,1\n+4,0\n-.5,1\n5.,0\n\"6\n\",1\nNAN,0\n";
  const auto read = ReadBoth(kForms, kForms, {.missing = CsvMissing::kNan, .normalise = false});
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->schema.Describe(), "columns: float a (1 missing); target target (0, 1)");
  const std::vector<float> expected = {1e5f, 3, 4, -0.5f, 5, 6};
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(Row(*read, read->train, static_cast<int64_t>(i))[0], expected[i]);
  }
  EXPECT_TRUE(std::isnan(Row(*read, read->train, 6)[0]));
  // What a double holds, and what it does not.
  constexpr absl::string_view kIds =
      "id,target\n9007199254740993,0\n1700000000000000000,1\n-9007199254740992,0\n"
      "0000000000000000012,1\n+18446744073709551615,0\n0000000000000000000,1\n";
  const auto ids = ReadBoth(kIds, kIds);
  ASSERT_TRUE(ids.ok()) << ids.status();
  EXPECT_EQ(ids->schema.Describe(), "columns: float id (2 rounded); target target (0, 1)");
  constexpr absl::string_view kNames = "id,target\n0x10,0\n2,1\n-0X1p3,0\n";
  const auto names = ReadBoth(kNames, kNames);
  ASSERT_TRUE(names.ok()) << names.status();
  EXPECT_TRUE(absl::StrContains(names->schema.Describe(), "category id"))
      << names->schema.Describe();
}

TEST(CsvTableTest, AColumnOfOneValueHasNoUnit) {
  const auto read = ReadBoth("a,b,target\n3,1,0\n3,2,1\n", "a,b,target\n5,1,0\n");
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(Row(*read, read->train, 0), (std::vector<float>{0, -1}));
  EXPECT_EQ(Row(*read, read->test, 0), (std::vector<float>{2, -1}));
}

TEST(CsvTableTest, UnknownValues) {
  constexpr absl::string_view kTest = "age,city,target\n1,Ulm,no\n2,\"K\nöln\",no\n2,Kiel,no\n";
  EXPECT_TRUE(absl::StartsWith(
      ErrorOf(kTrain, kTest),
      "test.csv, line 3, column 'city': 'K\nöln' is a category that the training file does not"));
  const auto read = ReadBoth(kTrain, kTest, {.unknown = CsvUnknown::kIgnore, .normalise = false});
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->test.unknown(), 2);
  EXPECT_EQ(Row(*read, read->test, 1), (std::vector<float>{2, 0, 0}));
  EXPECT_EQ(ErrorOf(kTrain, "age,city,target\n1,Ulm,maybe\n", {.unknown = CsvUnknown::kIgnore}),
            "test.csv, line 2, column 'target': 'maybe' is none of the 2 classes of the training "
            "file");
  EXPECT_EQ(ErrorOf(kTrain, "age,city,target\n1,Ulm,yes\nx,Ulm,no\n"),
            "test.csv, line 3, column 'age': 'x' is no number");
  EXPECT_TRUE(absl::StartsWith(ErrorOf(kTrain, "age,target\n1,no\n"),
                               "test.csv, line 1: there is no column 'city'"));
}

TEST(CsvTableTest, WhatIsRefused) {
  const auto error = [](absl::string_view train, const CsvOptions& options = {}) {
    return ErrorOf(train, train, options);
  };
  EXPECT_EQ(error("a,target\n1,0\n1,0,5\n"),
            "train.csv, line 3: has 3 fields, but the first line 2: '5' has no column");
  EXPECT_EQ(error("a,target\n\n1\n"),
            "train.csv, line 3: has 1 fields, but the first line 2: there is none for column "
            "'target'");
  EXPECT_TRUE(absl::StartsWith(error(""), "train.csv: is empty"));
  EXPECT_EQ(error("\x1f\x8b\x08\x01"),
            "train.csv: is compressed by gzip: decompress it first, with gunzip");
  EXPECT_TRUE(absl::StartsWith(
      error("a;target\n1;0\n1,5;1\n", {.delimiter = ";"}),
      "train.csv, line 3, column 'a': '1,5' is no number: numbers have a point and no comma"));
  EXPECT_EQ(error("a;target\n1;0\n1,5;1\n", {.columns = {"a:category"}, .delimiter = ";"}), "");
  EXPECT_TRUE(absl::StartsWith(error("a,target\n"), "train.csv: has no row"));
  EXPECT_EQ(error("a,a,target\n1,2,3\n"),
            "train.csv, line 1, column 'a': is the name of two columns");
  EXPECT_TRUE(absl::StrContains(error("a,b\n1,2\n"), "NAME:target, since none is named target"));
  EXPECT_TRUE(absl::StartsWith(error("target\n1\n"), "train.csv: has no column besides"));
  EXPECT_EQ(error("a,target\n1,0\nx,1\n", {.columns = {"a:float"}}),
            "train.csv, line 3, column 'a': 'x' is no number");
  EXPECT_EQ(error("a,target\n1,0\n-inf,1\n1e99,1\n"),
            "train.csv, line 3, column 'a': '-inf' is infinite, or too large for a float");
  EXPECT_TRUE(absl::StartsWith(error("a,target\n1,0\n1,0.5\n"),
                               "train.csv, line 3, column 'target': '0.5' is no class"));
  std::string names = "id,target\n1,0\n";
  for (int i = 0; i < 1001; ++i) absl::StrAppend(&names, "n", i, ",1\n");
  EXPECT_TRUE(absl::StartsWith(
      error(names), "train.csv, line 3, column 'id': 'n0' is no number, and the column has more"));
  EXPECT_EQ(error(names, {.columns = {"id:category"}}), "");

  for (const auto& [columns, problem] : std::vector<std::pair<Fields, std::string>>{
           {{"a"}, "must be NAME:TYPE"},
           {{"a:double"}, "with TYPE float, category, target or ignore"},
           {{"b:float"}, "names 'b', but train.csv has: a, target"},
           {{"a:float", "a:ignore"}, "gives a second type to the column 'a'"},
           {{"a:target", "target:target"}, "is a second target"}}) {
    const std::string message = error("a,target\n1,0\n", {.columns = columns});
    EXPECT_TRUE(absl::StartsWith(message, "dataset.csv.columns=")) << message;
    EXPECT_TRUE(absl::StrContains(message, problem)) << message;
  }
  EXPECT_EQ(error("a;b;target\n1;2;0\n"),
            "dataset.csv.delimiter=, makes one column of the first line of train.csv, "
            "'a;b;target'; is it ;?");
  EXPECT_TRUE(absl::EndsWith(error("a\ttarget\n1\t0\n"), "is it tab?"));
  EXPECT_TRUE(absl::EndsWith(error("a,target\n1,0\n", {.delimiter = ";"}), "is it ,?"));
  for (const char* const delimiter : {"", ";;", "\"", "\n"}) {
    EXPECT_TRUE(absl::StrContains(error("a,target\n1,0\n", {.delimiter = delimiter}),
                                  "must be one character"));
  }
}

}  // namespace
}  // namespace ddp::tools::datasets
