#include "checkpoint/large_tensor.h"

#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Storage.h>
#include <sys/mman.h>

#include <cstdint>
#include <utility>

namespace ddp::checkpoint {
namespace {

constexpr size_t kHugePage = 2 << 20;

// A mapping of whole huge pages; munmap wants its size.
struct Mapping {
  void* address;
  size_t size;
};

void Unmap(void* context) {
  auto* const mapping = static_cast<Mapping*>(context);
  (void)::munmap(mapping->address, mapping->size);
  delete mapping;
}

// Null if there is no memory.
c10::DataPtr Map(size_t bytes) {
  const size_t size = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* const all =
      ::mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) return {};
  // Huge pages are aligned.
  const auto begin = reinterpret_cast<uintptr_t>(all);
  const uintptr_t aligned = (begin + kHugePage - 1) / kHugePage * kHugePage;
  if (aligned > begin) (void)::munmap(all, aligned - begin);
  (void)::munmap(reinterpret_cast<void*>(aligned + size), begin + kHugePage - aligned);
  void* const address = reinterpret_cast<void*>(aligned);
  // Not the last one if it is needed in part: it would take memory that nobody uses.
  (void)::madvise(address, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
  return {address, new Mapping{address, size}, &Unmap, c10::Device(c10::kCPU)};
}

}  // namespace

at::Tensor EmptyLarge(at::IntArrayRef sizes, at::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype);
  const at::Tensor meta = at::empty(sizes, options.device(c10::DeviceType::Meta));
  const size_t bytes = meta.nbytes();
  c10::DataPtr data = bytes >= kLarge ? Map(bytes) : c10::DataPtr();
  if (!data) return at::empty(sizes, options);
  const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(data),
                             c10::GetCPUAllocator(), /*resizable=*/true);
  return at::empty({0}, options).set_(storage, 0, sizes);
}

}  // namespace ddp::checkpoint
