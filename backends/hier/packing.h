// Lossless compression of floating-point numbers, for links that are slower than a core can
// compress.
//
//   std::vector<uint8_t> wire(MaxPackedBytes(count, 4));
//   size_t size = Pack(numbers, count, 4, wire.data());       // about 7/8 of the fp32 bytes
//   bool ok = Unpack(wire.data(), size, count, 4, copy);      // bit for bit
//
// Neighbouring numbers of a gradient have similar magnitudes, so that few of the eight bits of an
// exponent carry information. Blocks of 256 numbers are packed one after another (the last one is
// padded with zeros), each as
//
//   1 byte             the block's largest exponent
//   256 x 3 bytes      sign and mantissa, in planes: all low bytes first (bf16: 256 x 1 byte)
//   128 bytes          a code of 4 bits per number; number i in the low half of byte i, number
//                      i + 128 in its high half. 0 to 13: the largest exponent minus that of the
//                      number; 14: the exponent is stored at the end of the block; 15: the exponent
//                      is zero (zeros and denormal numbers)
//   1 byte each        the exponents of code 14, in the order of the numbers
//
// fp32 is packed to 7/8, bf16 to 3/4 of its size, except blocks whose magnitudes differ by more
// than 2^13. Thread-safe: no state.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ddp::backends::hier {

// Upper bound of the packed size of `count` numbers, in bytes. In all three functions
// `number_bytes` is 4 for fp32 and 2 for bf16, and pointers need no alignment.
size_t MaxPackedBytes(size_t count, int number_bytes);

// Writes at most MaxPackedBytes bytes to `out`; returns the number of bytes.
size_t Pack(const void* numbers, size_t count, int number_bytes, uint8_t* out);

// False if `packed` is not a result of Pack for `count` numbers.
bool Unpack(const uint8_t* packed, size_t packed_bytes, size_t count, int number_bytes,
            void* numbers);

}  // namespace ddp::backends::hier
