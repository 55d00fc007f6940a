// A 128-bit digest of bytes, for names of contents: equal bytes have equal digests, on every
// machine and in every release. FNV-1a: not resistant to deliberate collisions.
//
//   Digester digester;
//   for (absl::string_view piece : pieces) digester.Add(piece);
//   std::string name = digester.Hex();  // that of all pieces joined, 32 hexadecimal digits
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace ddp {

// A value. Thread-compatible.
class Digester {
 public:
  void Add(absl::string_view bytes);

  // Adds the length as well, so that fields ("ab", "c") and ("a", "bc") differ.
  void AddField(absl::string_view bytes);

  // Digest of all bytes so far: 32 hexadecimal digits in lower case.
  std::string Hex() const;

 private:
  // Offset basis of 128-bit FNV, from "The FNV Non-Cryptographic Hash Algorithm"
  // (draft-eastlake-fnv).
  unsigned __int128 state_ =
      (static_cast<unsigned __int128>(0x6c62272e07bb0142) << 64) | 0x62b821756295c58d;
};

}  // namespace ddp
