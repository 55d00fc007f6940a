#include "base/utf8.h"

#include <cstddef>
#include <cstdint>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace ddp {
namespace {

// Bytes of the code point at the start of `text`; 0 if there is none.
size_t SizeOfFirst(absl::string_view text, Surrogates surrogates) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  if (byte(0) < 0x80) return 1;
  const size_t size = byte(0) < 0xc0 ? 0 : byte(0) < 0xe0 ? 2 : byte(0) < 0xf0 ? 3 : 4;
  if (size == 0 || byte(0) > 0xf4 || text.size() < size) return 0;
  uint32_t point = byte(0) & (0x7f >> size);
  for (size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    point = point << 6 | (byte(i) & 0x3f);
  }
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  if (point < kLeast[size] || point > 0x10ffff) return 0;
  const bool is_surrogate = point >= 0xd800 && point < 0xe000;
  return is_surrogate && surrogates == Surrogates::kRefuse ? 0 : size;
}

}  // namespace

bool IsUtf8(absl::string_view text, Surrogates surrogates) {
  while (!text.empty()) {
    const size_t size = SizeOfFirst(text, surrogates);
    if (size == 0) return false;
    text.remove_prefix(size);
  }
  return true;
}

std::string Printable(absl::string_view text) {
  std::string escaped;
  while (!text.empty()) {
    const size_t size = SizeOfFirst(text, Surrogates::kRefuse);
    if (size > 0 && text[0] != '\0') {
      escaped.append(text.data(), size);
    } else {
      absl::StrAppend(&escaped, "\\x",
                      absl::Hex(static_cast<unsigned char>(text[0]), absl::kZeroPad2));
    }
    text.remove_prefix(size > 0 ? size : 1);
  }
  return escaped;
}

absl::Status CheckText(absl::string_view text, bool any_bytes) {
  if (!any_bytes && !IsUtf8(text)) {
    return absl::InvalidArgumentError("is not UTF-8, as text in logs and checkpoints must be");
  }
  if (absl::StrContains(text, '\0')) return absl::InvalidArgumentError("has a zero byte");
  return absl::OkStatus();
}

}  // namespace ddp
