#include "checkpoint/crc32.h"

#include <libdeflate.h>

namespace ddp::checkpoint {
namespace {

// A CRC is a polynomial over GF(2), the highest bit being the coefficient of x^0.
constexpr uint32_t kOne = uint32_t{1} << 31;
constexpr uint32_t kPolynomial = 0xedb88320;  // without x^32

uint32_t TimesX(uint32_t a) { return a >> 1 ^ ((a & 1) != 0 ? kPolynomial : 0); }

// a * b modulo the polynomial.
uint32_t Multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = TimesX(b);
  }
  return product;
}

}  // namespace

uint32_t Crc32(const void* data, size_t size, uint32_t before) {
  return size == 0 ? before : libdeflate_crc32(before, data, size);
}

// The first piece is followed by the bits of the second: it is multiplied by x for each of them.
uint32_t CombineCrc32(uint32_t first, uint32_t second, uint64_t second_size) {
  uint32_t power = kOne >> 8;  // x^8, of one byte
  for (uint64_t bytes = second_size; bytes != 0; bytes >>= 1) {
    if ((bytes & 1) != 0) first = Multiply(first, power);
    power = Multiply(power, power);
  }
  return first ^ second;
}

}  // namespace ddp::checkpoint
