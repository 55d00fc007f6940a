#include "tools/datasets/csv_reader.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace ddp::tools::datasets {

CsvReader::CsvReader(std::string path, absl::string_view text, char delimiter)
    : path_(std::move(path)), text_(text), delimiter_(delimiter) {
  if (absl::StartsWith(text_, "\xef\xbb\xbf")) at_ = 3;
}

absl::Status CsvReader::Error(int64_t line, absl::string_view problem) const {
  return absl::InvalidArgumentError(absl::StrCat(path_, ", line ", line, ": ", problem));
}

// At '\n' or '\r'.
void CsvReader::PassLineEnd() {
  if (text_[at_] == '\r' && at_ + 1 < text_.size() && text_[at_ + 1] == '\n') ++at_;
  ++at_;
  ++line_;
}

absl::StatusOr<bool> CsvReader::Next(std::vector<std::string>& fields) {
  while (at_ < text_.size() && AtLineEnd()) PassLineEnd();
  if (at_ == text_.size()) return false;
  record_line_ = line_;
  for (size_t i = 0;; ++i) {
    // The strings of the last record are used again, for their memory.
    if (i == fields.size()) fields.emplace_back();
    DDP_RETURN_IF_ERROR(ReadField(fields[i]));
    const bool is_end = at_ == text_.size() || AtLineEnd();
    if (!is_end) {
      ++at_;  // the delimiter
      continue;
    }
    if (at_ < text_.size()) PassLineEnd();
    fields.resize(i + 1);
    return true;
  }
}

// Until the delimiter or the end of the record, which it does not pass.
absl::Status CsvReader::ReadField(std::string& field) {
  if (at_ < text_.size() && text_[at_] == '"') return ReadQuoted(field);
  const size_t begin = at_;
  for (; at_ < text_.size() && text_[at_] != delimiter_ && !AtLineEnd(); ++at_) {
    if (text_[at_] == '"') {
      return Error(line_,
                   "a quote stands within a field that does not begin with one; put quotes around "
                   "the field, and double those within it");
    }
    if (text_[at_] == '\0') return Error(line_, "has a zero byte: it is no text in UTF-8");
  }
  field.assign(text_.data() + begin, at_ - begin);
  return absl::OkStatus();
}

absl::Status CsvReader::ReadQuoted(std::string& field) {
  const int64_t begin = line_;
  field.clear();
  ++at_;
  while (true) {
    if (at_ == text_.size()) return Error(begin, "a quote is opened and never closed");
    const char c = text_[at_];
    if (c == '"') {
      ++at_;
      if (at_ == text_.size() || text_[at_] != '"') break;
      field.push_back('"');
      ++at_;
    } else if (c == '\n' || c == '\r') {
      const size_t end = at_;
      PassLineEnd();
      field.append(text_.data() + end, at_ - end);
    } else if (c == '\0') {
      return Error(line_, "has a zero byte: it is no text in UTF-8");
    } else {
      field.push_back(c);
      ++at_;
    }
  }
  if (at_ < text_.size() && text_[at_] != delimiter_ && !AtLineEnd()) {
    return Error(line_, "text follows a closing quote; a quote within a field must be doubled");
  }
  return absl::OkStatus();
}

}  // namespace ddp::tools::datasets
