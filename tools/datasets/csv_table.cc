#include "tools/datasets/csv_table.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "base/option_error.h"
#include "base/status.h"
#include "tools/datasets/csv_reader.h"
#include "tools/datasets/plain_file.h"

namespace ddp::tools::datasets {
namespace {

// Of a column whose type is not given: more than these are names or ids rather than categories.
constexpr size_t kMostFound = 1000;
constexpr size_t kMostValues = 1 << 16;

constexpr absl::string_view kTypes = "float, category, target or ignore";

absl::Status CsvError(absl::string_view option, absl::string_view value,
                      const std::string& problem) {
  return OptionError(absl::StrCat("dataset.csv.", option), value, problem);
}

absl::Status FieldError(const std::string& path, int64_t line, const std::string& column,
                        const std::string& problem) {
  return absl::InvalidArgumentError(
      absl::StrCat(path, ", line ", line, ", column '", column, "': ", problem));
}

absl::Status NoRows(const std::string& path) {
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": has no row after its first line, which must have the names"));
}

// What pandas.read_csv reads as NaN, and what printf may make of one, which would else let a column
// of numbers be one of categories.
bool IsMissing(absl::string_view text) {
  static constexpr std::array<absl::string_view, 24> kMissing = {
      "",         "#N/A", "#N/A N/A", "#NA",  "+NAN",   "+NaN",    "+nan", "-1.#IND",
      "-1.#QNAN", "-NAN", "-NaN",     "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A",
      "NA",       "NAN",  "NULL",     "NaN",  "None",   "n/a",     "nan",  "null"};
  return std::binary_search(kMissing.begin(), kMissing.end(), text);
}

// Not hexadecimal ones, which pandas takes for text: they are names.
std::optional<double> NumberIn(absl::string_view text) {
  if (absl::StrContainsIgnoreCase(text, "0x")) return std::nullopt;
  double number = 0;
  if (!absl::SimpleAtod(text, &number) || std::isnan(number)) return std::nullopt;
  return number;
}

bool IsFloat(double number) {
  return std::abs(number) <= static_cast<double>(std::numeric_limits<float>::max());
}
std::string NoFloat(absl::string_view text) {
  return absl::StrCat("'", text, "' is infinite, or too large for a float");
}
std::string NoNumber(absl::string_view text) { return absl::StrCat("'", text, "' is no number"); }

// Whether `text`, which is `number`, is a whole number that a double does not hold.
bool IsRounded(absl::string_view text, double number) {
  constexpr size_t kHeld = 15;  // digits, in any case
  if (text.size() <= kHeld || number == 0) return false;
  if (text[0] == '+' || text[0] == '-') text.remove_prefix(1);
  text.remove_prefix(std::min(text.find_first_not_of('0'), text.size()));
  return text.find_first_not_of("0123456789") == absl::string_view::npos &&
         absl::StrFormat("%.0f", std::abs(number)) != text;
}

// "1,5", of a program that writes numbers so.
bool HasDecimalComma(absl::string_view text) {
  const size_t comma = text.find(',');
  if (comma == absl::string_view::npos || comma == 0 || comma + 1 == text.size()) return false;
  return NumberIn(absl::StrCat(text.substr(0, comma), ".", text.substr(comma + 1))).has_value();
}

// A whole number as the model's classes have it: 1 of +1 and 01; other texts as they are.
std::string WholeIn(absl::string_view text) {
  int64_t whole = 0;
  return absl::SimpleAtoi(text, &whole) ? absl::StrCat(whole) : std::string(text);
}

// A class as others write it: pandas writes 1 as 1.0 where a value is missing in the column.
absl::string_view ClassIn(absl::string_view text) {
  const size_t dot = text.find('.');
  int64_t whole = 0;
  if (dot == absl::string_view::npos || !absl::SimpleAtoi(text.substr(0, dot), &whole)) return text;
  const absl::string_view fraction = text.substr(dot + 1);
  return fraction.find_first_not_of('0') == absl::string_view::npos ? text.substr(0, dot) : text;
}

absl::StatusOr<char> DelimiterOf(const CsvOptions& options) {
  if (options.delimiter == "tab" || options.delimiter == "\t") return '\t';
  if (options.delimiter.size() != 1 || absl::StrContains("\"\r\n", options.delimiter) ||
      options.delimiter[0] == '\0') {
    return CsvError("delimiter", options.delimiter, "must be one character, such as ; or tab");
  }
  return options.delimiter[0];
}

// The types that the options give, by name.
absl::StatusOr<std::map<std::string, CsvType>> GivenTypes(const CsvOptions& options) {
  std::map<std::string, CsvType> types;
  std::string target;
  for (const std::string& entry : options.columns) {
    const size_t colon = entry.rfind(':');
    const std::string type = colon == std::string::npos ? "" : entry.substr(colon + 1);
    const std::string name = entry.substr(0, colon);
    CsvType given = CsvType::kIgnore;
    if (type == "float") {
      given = CsvType::kFloat;
    } else if (type == "category") {
      given = CsvType::kCategory;
    } else if (type == "target") {
      given = CsvType::kTarget;
      if (!target.empty()) {
        return CsvError(
            "columns", entry,
            absl::StrCat("is a second target, besides '", target, "'; there can be one"));
      }
      target = name;
    } else if (type != "ignore") {
      return CsvError("columns", entry, absl::StrCat("must be NAME:TYPE, with TYPE ", kTypes));
    }
    if (!types.emplace(name, given).second) {
      return CsvError("columns", entry,
                      absl::StrCat("gives a second type to the column '", name, "'"));
    }
  }
  return types;
}

// A column of the training file, while that is read.
struct Found {
  std::optional<CsvType> type;  // as given
  bool numbers = true;          // all values that are not missing
  int64_t other_line = 0;       // of the first that is no number
  std::string other;
  int64_t infinite_line = 0;  // of the first number that is no float
  std::string infinite;
  bool whole = true;                                    // all are whole numbers
  std::map<std::string, int64_t, std::less<>> lines{};  // of the values, with their first lines
  bool too_many = false;
  int64_t count = 0;
  double mean = 0, squares = 0;  // Welford's algorithm
  int64_t rounded = 0;           // of CsvColumn

  void Add(absl::string_view text, int64_t line) {
    if (type == CsvType::kTarget) text = ClassIn(text);
    const std::optional<double> number = NumberIn(text);
    ++count;
    if (number && !IsFloat(*number)) {
      if (infinite_line == 0) infinite = std::string(text), infinite_line = line;
    } else if (number && numbers) {
      const double delta = *number - mean;
      mean += delta / static_cast<double>(count);
      squares += delta * (*number - mean);
      if (IsRounded(text, *number)) ++rounded;
    } else if (!number && numbers) {
      numbers = false;
      other_line = line;
      other = std::string(text);
    }
    int64_t integer = 0;
    whole = whole && absl::SimpleAtoi(text, &integer);
    if (type == CsvType::kFloat || too_many) return;
    if (lines.contains(text)) return;
    too_many = lines.size() >= (type ? kMostValues : kMostFound);
    if (!too_many) lines.emplace(text, line);
  }
};

std::vector<std::string> Sorted(const Found& found) {
  std::vector<std::string> values;
  for (const auto& [value, line] : found.lines) values.push_back(value);
  if (found.whole) {
    const auto number = [](const std::string& text) {
      int64_t value = 0;
      return absl::SimpleAtoi(text, &value) ? value : 0;
    };
    std::stable_sort(values.begin(), values.end(), [&](const std::string& a, const std::string& b) {
      return number(a) < number(b);
    });
  }
  return values;
}

absl::Status Decide(const std::string& path, const Found& found, CsvColumn& column) {
  const auto error = [&](int64_t line, const std::string& problem) {
    return FieldError(path, line, column.name, problem);
  };
  column.type = found.type.value_or(found.numbers ? CsvType::kFloat : CsvType::kCategory);
  if (column.type == CsvType::kIgnore) return absl::OkStatus();
  if (found.count == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, ", column '", column.name, "': has no value in any row; give it the type ignore"));
  }
  if (column.type == CsvType::kFloat) {
    if (!found.numbers) return error(found.other_line, NoNumber(found.other));
    if (found.infinite_line > 0) return error(found.infinite_line, NoFloat(found.infinite));
    column.mean = found.mean;
    column.rounded = found.rounded;
    column.deviation = std::sqrt(found.squares / static_cast<double>(found.count));
    return absl::OkStatus();
  }
  if (!found.type && HasDecimalComma(found.other)) {
    return error(found.other_line,
                 absl::StrCat(NoNumber(found.other),
                              ": numbers have a point and no comma; change "
                              "it, or give the column the type category (dataset.csv.columns)"));
  }
  if (found.too_many && !found.type) {
    return error(found.other_line,
                 absl::StrCat(NoNumber(found.other), ", and the column has more than ", kMostFound,
                              " different values; give its type (dataset.csv.columns): ",
                              "category, ignore, or float"));
  }
  if (column.type == CsvType::kTarget && found.numbers && !found.whole) {
    for (const auto& [value, line] : found.lines) {
      int64_t integer = 0;
      if (absl::SimpleAtoi(value, &integer)) continue;
      return error(line, absl::StrCat("'", value,
                                      "' is no class: a target is a text or a whole number, since "
                                      "the models here classify"));
    }
  }
  if (found.too_many) {
    return absl::InvalidArgumentError(absl::StrCat(path, ", column '", column.name,
                                                   "': has more than ", kMostValues,
                                                   " different values, too many for categories"));
  }
  column.values = Sorted(found);
  if (column.type == CsvType::kTarget && found.whole) {
    for (std::string& value : column.values) value = WholeIn(value);
    column.values.erase(std::unique(column.values.begin(), column.values.end()),
                        column.values.end());
  }
  for (size_t i = 0; i < column.values.size(); ++i) {
    column.codes.emplace(column.values[i], static_cast<int32_t>(i));
  }
  return absl::OkStatus();
}

// The records of a file after its first line, with their numbers of fields checked.
class Rows {
 public:
  static absl::StatusOr<Rows> Open(const std::string& path, absl::string_view text,
                                   const CsvOptions& options) {
    DDP_ASSIGN_OR_RETURN(const char delimiter, DelimiterOf(options));
    if (const absl::string_view problem = NoPlainFile(path, text, /*is_text=*/true);
        !problem.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": ", problem));
    }
    Rows rows(path, text, delimiter);
    DDP_ASSIGN_OR_RETURN(const bool has_names, rows.reader_.Next(rows.names_));
    if (!has_names) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": is empty; its first line must have the names of the columns"));
    }
    // No data set has a single column: the file has another delimiter.
    if (const size_t at = rows.names_[0].find_first_of(",;|\t");
        rows.names_.size() == 1 && at != std::string::npos) {
      const std::string found = rows.names_[0][at] == '\t' ? "tab" : rows.names_[0].substr(at, 1);
      return CsvError("delimiter", options.delimiter,
                      absl::StrCat("makes one column of the first line of ", path, ", '",
                                   rows.names_[0], "'; is it ", found, "?"));
    }
    std::set<absl::string_view> seen;
    for (std::string& name : rows.names_) {
      absl::StripAsciiWhitespace(&name);
      if (!name.empty() && !seen.insert(name).second) {
        return FieldError(path, rows.line(), name, "is the name of two columns");
      }
    }
    return rows;
  }

  const std::vector<std::string>& names() const { return names_; }
  const std::vector<std::string>& fields() const { return fields_; }
  int64_t line() const { return reader_.line(); }

  absl::StatusOr<bool> Next() {
    DDP_ASSIGN_OR_RETURN(const bool is_record, reader_.Next(fields_));
    if (is_record && fields_.size() != names_.size()) {
      const std::string where =
          fields_.size() < names_.size()
              ? absl::StrCat("there is none for column '", names_[fields_.size()], "'")
              : absl::StrCat("'", fields_[names_.size()], "' has no column");
      return absl::InvalidArgumentError(absl::StrCat(path_, ", line ", line(), ": has ",
                                                     fields_.size(), " fields, but the first line ",
                                                     names_.size(), ": ", where));
    }
    return is_record;
  }

 private:
  Rows(const std::string& path, absl::string_view text, char delimiter)
      : path_(path), reader_(path, text, delimiter) {}

  std::string path_;
  CsvReader reader_;
  std::vector<std::string> names_, fields_;
};

// "a, b (2 missing) and 3 more"
std::string Names(const CsvSchema& schema, CsvType type) {
  constexpr size_t kShown = 20;
  std::vector<std::string> names;
  size_t more = 0;
  for (const CsvColumn& column : schema.columns) {
    if (column.type != type) continue;
    if (names.size() == kShown) {
      ++more;
      continue;
    }
    std::vector<std::string> notes;
    if (type == CsvType::kCategory) notes.push_back(absl::StrCat(column.values.size()));
    if (column.missing > 0) notes.push_back(absl::StrCat(column.missing, " missing"));
    if (column.rounded > 0) notes.push_back(absl::StrCat(column.rounded, " rounded"));
    names.push_back(absl::StrCat(column.name.empty() ? "without a name" : column.name,
                                 notes.empty() ? "" : " (", absl::StrJoin(notes, ", "),
                                 notes.empty() ? "" : ")"));
  }
  return absl::StrCat(absl::StrJoin(names, ", "),
                      more > 0 ? absl::StrCat(" and ", more, " more") : "");
}

}  // namespace

const CsvColumn& CsvSchema::target() const {
  return *std::find_if(columns.begin(), columns.end(),
                       [](const CsvColumn& each) { return each.type == CsvType::kTarget; });
}

int64_t CsvSchema::num_features() const {
  int64_t count = 0;
  for (const CsvColumn& column : columns) {
    if (column.type == CsvType::kFloat) ++count;
    if (column.type == CsvType::kCategory) count += static_cast<int64_t>(column.values.size());
  }
  return count;
}

std::string CsvSchema::Describe() const {
  std::string text = "columns";
  absl::string_view separator = ": ";
  for (const auto& [type, what] :
       {std::pair(CsvType::kFloat, "float"), std::pair(CsvType::kCategory, "category"),
        std::pair(CsvType::kIgnore, "ignored")}) {
    const std::string names = Names(*this, type);
    if (names.empty()) continue;
    absl::StrAppend(&text, separator, what, " ", names);
    separator = "; ";
  }
  const std::vector<std::string>& classes = target().values;
  constexpr size_t kShown = 10;
  absl::StrAppend(
      &text, "; target ", target().name, " (",
      absl::StrJoin(classes.begin(), classes.begin() + std::min(kShown, classes.size()), ", "),
      classes.size() > kShown ? absl::StrCat(", …: ", classes.size(), " classes") : "", ")");
  return text;
}

void CsvSchema::AddTo(data::ContentsDigest& digest) const {
  for (const CsvColumn& column : columns) {
    if (column.type == CsvType::kIgnore) continue;
    digest.Add(column.name);
    digest.Add(static_cast<int64_t>(column.type));
    digest.Add(static_cast<int64_t>(column.values.size()));
    for (const std::string& value : column.values) digest.Add(value);
    // Without the last digits, in which other machines may round otherwise.
    digest.Add(absl::StrFormat("%.9g %.9g", column.mean, column.deviation));
  }
}

absl::StatusOr<CsvSchema> FindCsvSchema(const std::string& path, absl::string_view text,
                                        const CsvOptions& options) {
  DDP_ASSIGN_OR_RETURN(const auto given, GivenTypes(options));
  DDP_ASSIGN_OR_RETURN(Rows rows, Rows::Open(path, text, options));
  const std::vector<std::string>& names = rows.names();
  for (const auto& [name, type] : given) {
    if (std::find(names.begin(), names.end(), name) != names.end()) continue;
    return CsvError(
        "columns", absl::StrJoin(options.columns, ","),
        absl::StrCat("names '", name, "', but ", path, " has: ", absl::StrJoin(names, ", ")));
  }
  bool has_target = false;
  for (const auto& [name, type] : given) has_target = has_target || type == CsvType::kTarget;
  CsvSchema schema;
  bool has_rows = false;
  std::vector<Found> found;
  for (const std::string& name : names) {
    schema.columns.push_back({.name = name});
    Found& column = found.emplace_back();
    if (const auto type = given.find(name); type != given.end()) {
      column.type = type->second;
    } else if (name == "target" && !has_target) {
      column.type = CsvType::kTarget;
      has_target = true;
    } else if (name.empty()) {
      column.type = CsvType::kIgnore;  // the numbers of the rows, as pandas writes them
    }
  }
  if (!has_target) {
    return CsvError("columns", absl::StrJoin(options.columns, ","),
                    absl::StrCat("must say which column has the classes, as in NAME:target, since "
                                 "none is named target; ",
                                 path, " has: ", absl::StrJoin(names, ", ")));
  }
  while (true) {
    DDP_ASSIGN_OR_RETURN(const bool is_row, rows.Next());
    if (!is_row) break;
    has_rows = true;
    for (size_t i = 0; i < found.size(); ++i) {
      if (found[i].type == CsvType::kIgnore) continue;
      const absl::string_view field = absl::StripAsciiWhitespace(rows.fields()[i]);
      if (!IsMissing(field)) {
        found[i].Add(field, rows.line());
      } else if (found[i].type == CsvType::kTarget) {
        return FieldError(path, rows.line(), names[i], "the class is missing");
      } else {
        ++schema.columns[i].missing;
      }
    }
  }
  if (!has_rows) return NoRows(path);
  for (size_t i = 0; i < found.size(); ++i) {
    DDP_RETURN_IF_ERROR(Decide(path, found[i], schema.columns[i]));
  }
  if (schema.num_features() == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": has no column besides the target and those that are ignored"));
  }
  return schema;
}

absl::StatusOr<CsvTable> CsvTable::Read(const std::string& path, absl::string_view text,
                                        const CsvSchema& schema, const CsvOptions& options) {
  DDP_ASSIGN_OR_RETURN(Rows rows, Rows::Open(path, text, options));
  CsvTable table;
  const std::vector<std::string>& classes = schema.target().values;
  const bool has_whole_classes =
      std::all_of(classes.begin(), classes.end(), [](const std::string& each) {
        int64_t ignored = 0;
        return absl::SimpleAtoi(each, &ignored);
      });
  // Where the columns of the schema stand in this file.
  std::vector<std::pair<const CsvColumn*, size_t>> columns;
  for (const CsvColumn& column : schema.columns) {
    if (column.type == CsvType::kIgnore) continue;
    const auto at = std::find(rows.names().begin(), rows.names().end(), column.name);
    if (at == rows.names().end()) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ", line ", rows.line(), ": there is no column '", column.name,
                       "', as the training file has, but: ", absl::StrJoin(rows.names(), ", ")));
    }
    columns.emplace_back(&column, at - rows.names().begin());
    if (column.type == CsvType::kTarget) continue;
    table.widths_.push_back(
        column.type == CsvType::kFloat ? 0 : static_cast<int32_t>(column.values.size()));
  }
  while (true) {
    DDP_ASSIGN_OR_RETURN(const bool is_row, rows.Next());
    if (!is_row) break;
    for (const auto& [column, at] : columns) {
      const auto error = [&, column = column](const std::string& problem) {
        return FieldError(path, rows.line(), column->name, problem);
      };
      absl::string_view field = absl::StripAsciiWhitespace(rows.fields()[at]);
      const bool is_target = column->type == CsvType::kTarget;
      if (IsMissing(field)) {
        if (is_target) return error("the class is missing");
        if (options.missing == CsvMissing::kError) {
          return error(absl::StrCat(
              field.empty() ? "the value is missing" : absl::StrCat("'", field, "' is missing"),
              "; fill it, or choose dataset.csv.missing=mean, or give the column the type ignore"));
        }
        ++table.missing_;
        double value = -1;
        if (column->type == CsvType::kFloat) {
          value = options.missing == CsvMissing::kNan ? std::numeric_limits<double>::quiet_NaN()
                  : options.normalise                 ? 0
                                                      : column->mean;
        }
        table.values_.push_back(static_cast<float>(value));
        continue;
      }
      if (column->type == CsvType::kFloat) {
        const std::optional<double> number = NumberIn(field);
        if (!number) return error(NoNumber(field));
        double value = *number;
        if (options.normalise) {
          value = (value - column->mean) / (column->deviation > 0 ? column->deviation : 1);
        }
        if (!IsFloat(*number) || !IsFloat(value)) return error(NoFloat(field));
        table.values_.push_back(static_cast<float>(value));
        continue;
      }
      if (is_target) field = ClassIn(field);
      auto code = column->codes.find(field);
      if (code == column->codes.end() && is_target && has_whole_classes) {
        code = column->codes.find(WholeIn(field));
      }
      if (code != column->codes.end()) {
        if (is_target) {
          table.targets_.push_back(code->second);
        } else {
          table.values_.push_back(static_cast<float>(code->second));
        }
        continue;
      }
      if (is_target) {
        return error(absl::StrCat("'", field, "' is none of the ", schema.num_classes(),
                                  " classes of the training file"));
      }
      if (options.unknown == CsvUnknown::kError) {
        return error(absl::StrCat("'", field,
                                  "' is a category that the training file does not have; "
                                  "dataset.csv.unknown=ignore passes over it"));
      }
      ++table.unknown_;
      table.values_.push_back(-1);
    }
  }
  if (table.rows() == 0) return NoRows(path);
  return table;
}

void CsvTable::AddTo(data::ContentsDigest& digest) const {
  digest.AddSamples(absl::MakeConstSpan(widths_));
  digest.AddSamples(absl::MakeConstSpan(values_));
  digest.AddSamples(absl::MakeConstSpan(targets_));
}

void CsvTable::Features(int64_t row, float* to) const {
  const float* value = values_.data() + row * static_cast<int64_t>(widths_.size());
  for (const int32_t width : widths_) {
    if (width == 0) {
      *to++ = *value;
    } else {
      std::fill_n(to, width, 0.0f);
      if (*value >= 0) to[static_cast<int32_t>(*value)] = 1;
      to += width;
    }
    ++value;
  }
}

}  // namespace ddp::tools::datasets
