// Records of CSV text (RFC 4180): quotes, doubled quotes, line ends within quotes.
//
//   CsvReader reader("train.csv", text);
//   std::vector<std::string> fields;
//   while (true) {
//     DDP_ASSIGN_OR_RETURN(const bool is_record, reader.Next(fields));
//     if (!is_record) break;
//     Use(fields, reader.line());
//   }
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ddp::tools::datasets {

// Reads from front to back. Lines end with LF, CRLF or CR; the last one need not end. A UTF-8 byte
// order mark at the beginning is passed over, as are empty lines. Thread-compatible.
class CsvReader {
 public:
  // `text` must outlive the reader. `path` is for errors. `delimiter`: neither a quote nor the end
  // of a line.
  CsvReader(std::string path, absl::string_view text, char delimiter = ',');

  // Replaces `fields` by those of the next record, of which there is at least one; false, if there
  // is no further record. InvalidArgument, with path and line: a quote that is never closed, text
  // behind a closing quote, a quote within a field that has none around it, a zero byte. After an
  // error the reader is not to be used.
  absl::StatusOr<bool> Next(std::vector<std::string>& fields);

  // The line on which the last record began; the first is 1.
  int64_t line() const { return record_line_; }

 private:
  bool AtLineEnd() const { return text_[at_] == '\n' || text_[at_] == '\r'; }
  void PassLineEnd();
  absl::Status ReadField(std::string& field);
  absl::Status ReadQuoted(std::string& field);
  absl::Status Error(int64_t line, absl::string_view problem) const;

  const std::string path_;
  const absl::string_view text_;
  const char delimiter_;
  size_t at_ = 0;
  int64_t line_ = 1;
  int64_t record_line_ = 0;
};

}  // namespace ddp::tools::datasets
