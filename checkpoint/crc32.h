// CRC-32 as in zip files and gzip (polynomial 0xedb88320), at the speed of memory.
//
//   const uint32_t crc = Crc32(data, size);
//   CombineCrc32(Crc32(data, 100), Crc32(data + 100, size - 100), size - 100) == crc
//
// Functions are thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ddp::checkpoint {

// Returns the CRC-32 of `size` bytes at `data`, which may be null if there are none. `before` is
// the CRC-32 of the bytes in front of them.
uint32_t Crc32(const void* data, size_t size, uint32_t before = 0);

// The CRC-32 of two pieces after each other, from the CRC-32 of each and the bytes of the second.
// Needs about a microsecond, whatever the size.
uint32_t CombineCrc32(uint32_t first, uint32_t second, uint64_t second_size);

}  // namespace ddp::checkpoint
