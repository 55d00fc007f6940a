// XXH3, 64 bits: a fast checksum that finds damage. Not resistant to deliberate collisions. The
// digest of equal bytes is the same on every machine and in every release.
//
//   uint64_t digest = Xxh3(data, size);
//   std::string text = HexOf(digest);  // 16 hexadecimal digits
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace ddp {

// Seed 0. Functions are thread-safe.
uint64_t Xxh3(const void* data, size_t size);
inline uint64_t Xxh3(absl::string_view text) { return Xxh3(text.data(), text.size()); }

// 16 hexadecimal digits in lower case, the most significant first.
std::string HexOf(uint64_t digest);

// The reverse; nullopt for anything else than 16 hexadecimal digits in lower case.
std::optional<uint64_t> DigestOfHex(absl::string_view hex);

}  // namespace ddp
