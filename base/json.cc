#include "base/json.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/utf8.h"

namespace ddp {
namespace {

using nlohmann::json;

// Receives the parser's events and builds the value. A handler that returns false ends parsing. The
// parser and the destructor of json keep stacks of their own, so depth costs no stack of ours.
class Builder : public nlohmann::json_sax<json> {
 public:
  explicit Builder(const JsonLimits& limits) : limits_(limits) {}

  bool null() override { return Add(nullptr); }
  bool boolean(bool value) override { return Add(value); }
  bool number_integer(number_integer_t value) override { return Add(value); }
  bool number_unsigned(number_unsigned_t value) override { return Add(value); }
  bool number_float(number_float_t value, const string_t&) override { return Add(value); }
  bool string(string_t& value) override { return Add(std::move(value)); }
  bool binary(binary_t&) override { return Fail("holds binary data"); }
  bool start_object(size_t) override { return Open(json::object()); }
  bool end_object() override { return Close(); }
  bool start_array(size_t) override { return Open(json::array()); }
  bool end_array() override { return Close(); }

  bool key(string_t& name) override {
    const auto [slot, fresh] = open_.back()->get_ref<json::object_t&>().try_emplace(name);
    if (!fresh) return Fail(absl::StrCat("has the key \"", Printable(name), "\" twice"));
    slot_ = &slot->second;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const json::exception&) override {
    return Fail(absl::StrCat("is no JSON at byte ", position));
  }

  json& value() { return value_; }
  const std::string& problem() const { return problem_; }

 private:
  bool Fail(std::string problem) {
    if (problem_.empty()) problem_ = std::move(problem);
    return false;
  }

  // Puts `value` where the parser is. Pointers into `value_` stay valid: an array grows only while
  // none of its items is open, and the nodes of a map do not move.
  json* Put(json value) {
    if (++values_ > limits_.values) {
      Fail(absl::StrCat("has more than ", limits_.values, " values"));
      return nullptr;
    }
    if (open_.empty()) {
      value_ = std::move(value);
      return &value_;
    }
    if (open_.back()->is_object()) {
      *slot_ = std::move(value);
      return slot_;
    }
    auto& items = open_.back()->get_ref<json::array_t&>();
    if (items.size() >= limits_.items) {
      Fail(absl::StrCat("has a list of more than ", limits_.items, " items"));
      return nullptr;
    }
    items.push_back(std::move(value));
    return &items.back();
  }

  bool Add(json value) { return Put(std::move(value)) != nullptr; }

  bool Open(json container) {
    if (open_.size() >= limits_.depth) {
      return Fail(absl::StrCat("is nested more than ", limits_.depth, " levels deep"));
    }
    json* const opened = Put(std::move(container));
    if (opened == nullptr) return false;
    open_.push_back(opened);
    return true;
  }

  bool Close() {
    open_.pop_back();
    return true;
  }

  JsonLimits limits_;
  json value_;
  std::vector<json*> open_;
  json* slot_ = nullptr;  // of the last key
  size_t values_ = 0;
  std::string problem_;
};

}  // namespace

absl::StatusOr<json> ParseJson(absl::string_view text, const JsonLimits& limits) {
  // The parser takes a zero byte for the end of the text.
  const size_t zero = text.find('\0');
  if (zero != absl::string_view::npos) {
    return absl::InvalidArgumentError(absl::StrCat("is no JSON at byte ", zero));
  }
  Builder builder(limits);
  if (!json::sax_parse(text.begin(), text.end(), &builder)) {
    return absl::InvalidArgumentError(builder.problem());
  }
  return std::move(builder.value());
}

}  // namespace ddp
