#include "base/xxh3.h"

#define XXH_INLINE_ALL
#include "xxhash.h"

namespace ddp {

uint64_t Xxh3(const void* data, size_t size) { return XXH3_64bits(data, size); }

std::string HexOf(uint64_t digest) {
  std::string hex(16, '0');
  for (size_t i = 16; i-- > 0; digest >>= 4) hex[i] = "0123456789abcdef"[digest & 15];
  return hex;
}

std::optional<uint64_t> DigestOfHex(absl::string_view hex) {
  if (hex.size() != 16) return std::nullopt;
  uint64_t digest = 0;
  for (const char c : hex) {
    int digit = 0;
    if (c >= '0' && c <= '9') {
      digit = c - '0';
    } else if (c >= 'a' && c <= 'f') {
      digit = c - 'a' + 10;
    } else {
      return std::nullopt;
    }
    digest = digest << 4 | static_cast<uint64_t>(digit);
  }
  return digest;
}

}  // namespace ddp
