// Floating-point numbers in fewer bits, without loss: for links slower than a core can pack.
//
//   std::vector<uint8_t> wire(MaxPackedBytes(count, 4));
//   size_t size = Pack(numbers, count, 4, wire.data());       // about 7/8 of the fp32 bytes
//   bool ok = Unpack(wire.data(), size, count, 4, copy);      // bit for bit
//
// Neighbouring numbers of a gradient are of like magnitude: of the eight bits of an exponent few
// say something. Blocks of 256 numbers are packed one after the other (the last is filled up with
// zeros), each as
//
//   1 byte             the block's largest exponent
//   256 x 3 bytes      sign and mantissa, in planes: all low bytes first (bf16: 256 x 1 byte)
//   128 bytes          a code of 4 bits per number; number i in the low half of byte i, number
//                      i + 128 in its high half: how far its exponent is below the largest (0 to
//                      13), or 14: it follows, or 15: it is zero (of zeros and denormal numbers)
//   1 byte each        the exponents that follow
//
// Packed, fp32 is 7/8 and bf16 3/4 as large, but for blocks whose magnitudes differ by more than
// 2^13. Thread-safe: no state.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ddp::backends::hier {

// `number_bytes` is 4 for fp32, 2 for bf16. No alignment is needed.
size_t MaxPackedBytes(size_t count, int number_bytes);

// Writes up to MaxPackedBytes to `out`; returns how many.
size_t Pack(const void* numbers, size_t count, int number_bytes, uint8_t* out);

// False if `packed` is not what Pack has made of `count` numbers.
bool Unpack(const uint8_t* packed, size_t packed_bytes, size_t count, int number_bytes,
            void* numbers);

}  // namespace ddp::backends::hier
