#include "base/digest.h"

#include <cstdint>

#include "absl/strings/str_cat.h"

namespace ddp {
namespace {

// 2^88 + 2^8 + 0x3b
constexpr unsigned __int128 kPrime = (static_cast<unsigned __int128>(1) << 88) | 0x13b;

}  // namespace

void Digester::Add(absl::string_view bytes) {
  unsigned __int128 state = state_;
  for (const char byte : bytes) state = (state ^ static_cast<unsigned char>(byte)) * kPrime;
  state_ = state;
}

void Digester::AddField(absl::string_view bytes) {
  Add(absl::StrCat(bytes.size(), ":"));
  Add(bytes);
}

std::string Digester::Hex() const {
  return absl::StrCat(absl::Hex(static_cast<uint64_t>(state_ >> 64), absl::kZeroPad16),
                      absl::Hex(static_cast<uint64_t>(state_), absl::kZeroPad16));
}

}  // namespace ddp
