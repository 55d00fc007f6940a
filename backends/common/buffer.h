// Memory as backends move it: no dtype, no owner.
#pragma once

#include <cstddef>

namespace ddp::backends {

// Borrowed.
struct Buffer {
  std::byte* data = nullptr;
  size_t bytes = 0;
};

}  // namespace ddp::backends
