// Says what a file is that is no checkpoint, from its first bytes: people pass the wrong file more
// often than a damaged one.
//
//   return absl::DataLossError(absl::StrCat(path, " ", DescribeForeign(head, size)));
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace ddp::checkpoint {

// The longest head that DescribeForeign looks at, in bytes.
inline constexpr uint64_t kForeignHead = 512;

// Says what a file of `size` bytes that starts with `head` is, as the rest of a sentence: "is an
// HTML page, …", with what to do. Empty if it is nothing that this function knows. Thread-safe.
std::string DescribeForeign(absl::string_view head, uint64_t size);

}  // namespace ddp::checkpoint
