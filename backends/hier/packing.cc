#include "backends/hier/packing.h"

#include <algorithm>
#include <cstring>

namespace ddp::backends::hier {
namespace {

constexpr size_t kBlock = 256;
constexpr int kFollows = 14, kZero = 15;

// The loops over a block have a constant length and no branches, so that compilers vectorise them.
template <typename Bits>  // uint32_t: fp32, uint16_t: bf16
struct Format {
  static constexpr int kPlanes = sizeof(Bits) - 1;
  static constexpr int kSignShift = 8 * sizeof(Bits) - 1;
  static constexpr int kExponentShift = kSignShift - 8;
  static constexpr Bits kMantissa = static_cast<Bits>((Bits{1} << kExponentShift) - 1);
  // The sign is stored above the mantissa, in place of the lowest bit of the exponent.
  static constexpr size_t kFixedBytes = 1 + kPlanes * kBlock + kBlock / 2;

  static size_t PackBlock(const Bits* numbers, uint8_t* out) {
    uint8_t exponents[kBlock], codes[kBlock];
    uint8_t largest = 0;
    for (size_t i = 0; i < kBlock; ++i) {
      exponents[i] = static_cast<uint8_t>(numbers[i] >> kExponentShift);
    }
    for (size_t i = 0; i < kBlock; ++i) largest = std::max(largest, exponents[i]);
    int follow = 0;
    for (size_t i = 0; i < kBlock; ++i) {
      const auto below = static_cast<uint8_t>(largest - exponents[i]);
      const uint8_t code = std::min<uint8_t>(below, kFollows);
      codes[i] = exponents[i] == 0 ? uint8_t{kZero} : code;
    }
    for (size_t i = 0; i < kBlock; ++i) follow += codes[i] == kFollows;
    *out++ = largest;
    for (int plane = 0; plane < kPlanes; ++plane) {
      for (size_t i = 0; i < kBlock; ++i) {
        const Bits rest = (numbers[i] & kMantissa) |
                          static_cast<Bits>(numbers[i] >> kSignShift << kExponentShift);
        out[i] = static_cast<uint8_t>(rest >> (8 * plane));
      }
      out += kBlock;
    }
    for (size_t i = 0; i < kBlock / 2; ++i) {
      out[i] = static_cast<uint8_t>(codes[i] | codes[i + kBlock / 2] << 4);
    }
    out += kBlock / 2;
    if (follow > 0) {
      for (size_t i = 0; i < kBlock; ++i) {
        if (codes[i] == kFollows) *out++ = exponents[i];
      }
    }
    return kFixedBytes + follow;
  }

  // Returns the number of bytes read; 0 if there are too few.
  static size_t UnpackBlock(const uint8_t* in, size_t bytes, Bits* numbers) {
    if (bytes < kFixedBytes) return 0;
    const uint8_t largest = *in++;
    const uint8_t* const half_codes = in + kPlanes * kBlock;
    uint8_t exponents[kBlock], codes[kBlock];
    for (size_t i = 0; i < kBlock / 2; ++i) {
      codes[i] = half_codes[i] & 15;
      codes[i + kBlock / 2] = half_codes[i] >> 4;
    }
    size_t follow = 0;
    for (size_t i = 0; i < kBlock; ++i) follow += codes[i] == kFollows;
    if (bytes < kFixedBytes + follow) return 0;
    for (size_t i = 0; i < kBlock; ++i) {
      const auto exponent = static_cast<uint8_t>(largest - codes[i]);
      exponents[i] = codes[i] == kZero ? uint8_t{0} : exponent;
    }
    if (follow > 0) {
      const uint8_t* next = half_codes + kBlock / 2;
      for (size_t i = 0; i < kBlock; ++i) {
        if (codes[i] == kFollows) exponents[i] = *next++;
      }
    }
    for (size_t i = 0; i < kBlock; ++i) {
      Bits rest = 0;
      for (int plane = 0; plane < kPlanes; ++plane) {
        rest |= static_cast<Bits>(static_cast<Bits>(in[plane * kBlock + i]) << (8 * plane));
      }
      numbers[i] =
          static_cast<Bits>((rest & kMantissa) | static_cast<Bits>(exponents[i]) << kExponentShift |
                            rest >> kExponentShift << kSignShift);
    }
    return kFixedBytes + follow;
  }

  static size_t Pack(const uint8_t* numbers, size_t count, uint8_t* out) {
    uint8_t* const begin = out;
    for (size_t i = 0; i < count; i += kBlock) {
      Bits block[kBlock] = {};
      std::memcpy(block, numbers + i * sizeof(Bits), std::min(kBlock, count - i) * sizeof(Bits));
      out += PackBlock(block, out);
    }
    return out - begin;
  }

  static bool Unpack(const uint8_t* packed, size_t bytes, size_t count, uint8_t* numbers) {
    for (size_t i = 0; i < count; i += kBlock) {
      Bits block[kBlock];
      const size_t read = UnpackBlock(packed, bytes, block);
      if (read == 0) return false;
      packed += read;
      bytes -= read;
      std::memcpy(numbers + i * sizeof(Bits), block, std::min(kBlock, count - i) * sizeof(Bits));
    }
    return bytes == 0;
  }
};

}  // namespace

size_t MaxPackedBytes(size_t count, int number_bytes) {
  const size_t blocks = (count + kBlock - 1) / kBlock;
  return blocks * (kBlock + (number_bytes == 4 ? Format<uint32_t>::kFixedBytes
                                               : Format<uint16_t>::kFixedBytes));
}

size_t Pack(const void* numbers, size_t count, int number_bytes, uint8_t* out) {
  const auto* bytes = static_cast<const uint8_t*>(numbers);
  return number_bytes == 4 ? Format<uint32_t>::Pack(bytes, count, out)
                           : Format<uint16_t>::Pack(bytes, count, out);
}

bool Unpack(const uint8_t* packed, size_t packed_bytes, size_t count, int number_bytes,
            void* numbers) {
  auto* bytes = static_cast<uint8_t*>(numbers);
  return number_bytes == 4 ? Format<uint32_t>::Unpack(packed, packed_bytes, count, bytes)
                           : Format<uint16_t>::Unpack(packed, packed_bytes, count, bytes);
}

}  // namespace ddp::backends::hier
