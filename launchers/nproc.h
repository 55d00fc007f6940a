// LaunchOptions::nproc_per_node: unset, a number, or a word of torchrun's.
//
//   Nproc nproc = 4;
//   ParseOption("gpu", nproc);          // Nproc::Kind::kGpu
//   if (nproc.is_number()) Start(*nproc);
#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/options.h"

namespace ddp::launchers {

// A plain value. As an option it is written as a number, a word, or nothing if it is unset.
class Nproc {
 public:
  enum class Kind {
    kUnset,
    kNumber,
    kGpu,   // one rank for each GPU of the machine
    kCpu,   // one for each core that this process may use
    kAuto,  // as kGpu if there are GPUs, else as kCpu
  };

  Nproc() = default;
  Nproc(std::nullopt_t) {}
  Nproc(int number) : kind_(Kind::kNumber), number_(number) {}
  Nproc(const std::optional<int>& number)
      : kind_(number ? Kind::kNumber : Kind::kUnset), number_(number.value_or(0)) {}
  explicit Nproc(Kind word) : kind_(word) {}

  Kind kind() const { return kind_; }
  bool is_number() const { return kind_ == Kind::kNumber; }
  bool is_word() const { return !is_number() && kind_ != Kind::kUnset; }
  // Whether it is a number, and which.
  explicit operator bool() const { return is_number(); }
  int operator*() const { return number_; }
  int value_or(int other) const { return is_number() ? number_ : other; }

 private:
  Kind kind_ = Kind::kUnset;
  int number_ = 0;
};

// Found by base/options.h.
absl::Status ParseOption(absl::string_view text, Nproc& value);
std::string FormatOption(const Nproc& value);
std::string Problem(const OptionBounds& bounds, const Nproc& value);

}  // namespace ddp::launchers

namespace ddp::option_internal {

template <>
constexpr OptionKind KindOf<launchers::Nproc>() {
  return OptionKind::kNumber;
}

}  // namespace ddp::option_internal
