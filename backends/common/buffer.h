// A range of memory without dtype.
#pragma once

#include <cstddef>

namespace ddp::backends {

// Does not own the memory.
struct Buffer {
  std::byte* data = nullptr;
  size_t bytes = 0;
};

}  // namespace ddp::backends
