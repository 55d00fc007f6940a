#include "launchers/nproc.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace ddp::launchers {
namespace {

constexpr std::pair<absl::string_view, Nproc::Kind> kWords[] = {
    {"gpu", Nproc::Kind::kGpu}, {"cpu", Nproc::Kind::kCpu}, {"auto", Nproc::Kind::kAuto}};

}  // namespace

absl::Status ParseOption(absl::string_view text, Nproc& value) {
  if (text.empty()) {
    value = Nproc();
    return absl::OkStatus();
  }
  for (const auto& [word, kind] : kWords) {
    if (text != word) continue;
    value = Nproc(kind);
    return absl::OkStatus();
  }
  int number = 0;
  if (absl::Status parsed = ddp::ParseOption(text, number); !parsed.ok()) {
    return absl::Status(parsed.code(), absl::StrCat(parsed.message(), " (or gpu, cpu, auto)"));
  }
  value = number;
  return absl::OkStatus();
}

std::string FormatOption(const Nproc& value) {
  if (value.is_number()) return absl::StrCat(*value);
  for (const auto& [word, kind] : kWords) {
    if (kind == value.kind()) return std::string(word);
  }
  return "";
}

std::string Problem(const OptionBounds& bounds, const Nproc& value) {
  return value.is_number() ? bounds.Problem(static_cast<double>(*value)) : "";
}

}  // namespace ddp::launchers
