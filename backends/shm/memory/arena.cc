#include "backends/shm/memory/arena.h"

#include <algorithm>
#include <iterator>

#include "absl/log/absl_check.h"
#include "absl/log/absl_log.h"

namespace ddp::backends::shm {
namespace {

constexpr size_t kPage = 4096;

}  // namespace

Arena::Arena(SharedMemory* memory, size_t begin, size_t bytes)
    : memory_(memory), reserved_until_(begin) {
  if (bytes != 0) free_.emplace(begin, bytes);
}

std::byte* Arena::Allocate(size_t bytes) {
  const size_t size = std::max(kPage, (bytes + kPage - 1) / kPage * kPage);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto fits = std::find_if(free_.begin(), free_.end(),
                                 [size](const auto& block) { return block.second >= size; });
  if (fits == free_.end()) return nullptr;
  const auto [at, room] = *fits;
  if (at + size > reserved_until_) {
    const absl::Status reserved = memory_->Reserve(reserved_until_, at + size - reserved_until_);
    if (!reserved.ok()) {
      ABSL_LOG_FIRST_N(WARNING, 1) << "shm: tensors stay in ordinary memory, where collectives "
                                      "copy them: "
                                   << reserved.message();
      return nullptr;
    }
    reserved_until_ = at + size;
  }
  free_.erase(fits);
  if (room > size) free_.emplace(at + size, room - size);
  taken_.emplace(at, size);
  return memory_->data() + at;
}

void Arena::Free(std::byte* block) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto taken = taken_.find(static_cast<size_t>(block - memory_->data()));
  ABSL_CHECK(taken != taken_.end()) << "a block that the arena did not give";
  size_t at = taken->first;
  size_t size = taken->second;
  taken_.erase(taken);
  auto next = free_.lower_bound(at);
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == at) {
      at = previous->first;
      size += previous->second;
      free_.erase(previous);
    }
  }
  if (next != free_.end() && at + size == next->first) {
    size += next->second;
    free_.erase(next);
  }
  free_.emplace(at, size);
}

}  // namespace ddp::backends::shm
