// For tests and benchmarks: counts allocations of CPU tensors in torch's allocator.
//
//   CountingAllocator& allocator = CountingAllocator::Install();   // for the life of the process
//   const int64_t before = allocator.bytes();
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "c10/core/Allocator.h"

namespace ddp {

// Thread-safe. Does not count memory of backends (shm's arena).
class CountingAllocator : public c10::Allocator {
 public:
  static CountingAllocator& Install() {
    static CountingAllocator* const allocator = [] {
      auto* counting = new CountingAllocator(c10::GetAllocator(c10::kCPU));
      c10::SetAllocator(c10::kCPU, counting, /*priority=*/100);
      return counting;
    }();
    return *allocator;
  }

  int64_t bytes() const { return bytes_; }
  int64_t allocations() const { return allocations_; }
  int64_t peak_bytes() const { return peak_; }
  void ResetPeak() { peak_ = bytes_.load(); }

  c10::DataPtr allocate(size_t size) override {
    c10::DataPtr data = inner_->allocate(size);
    const auto count = static_cast<int64_t>(size);
    const int64_t now = bytes_ += count;
    ++allocations_;
    for (int64_t peak = peak_; now > peak && !peak_.compare_exchange_weak(peak, now);) {
    }
    void* const address = data.get();
    const c10::Device device = data.device();
    if (address != nullptr) {
      const std::lock_guard<std::mutex> lock(mutex_);
      blocks_.emplace(address, std::pair(std::move(data), count));
    }
    // Data and context are one pointer, as raw_allocate wants them.
    return {address, address, &Delete, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Delete; }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }

 private:
  static void Delete(void* address) {
    CountingAllocator& self = Install();
    // The entry goes before the memory: another thread may get the address at once.
    c10::DataPtr data;
    const std::lock_guard<std::mutex> lock(self.mutex_);
    const auto block = self.blocks_.find(address);
    if (block == self.blocks_.end()) return;
    self.bytes_ -= block->second.second;
    data = std::move(block->second.first);
    self.blocks_.erase(block);
  }

  explicit CountingAllocator(c10::Allocator* inner) : inner_(inner) {}

  c10::Allocator* const inner_;
  std::mutex mutex_;
  std::unordered_map<void*, std::pair<c10::DataPtr, int64_t>> blocks_;
  std::atomic<int64_t> bytes_ = 0;
  std::atomic<int64_t> allocations_ = 0;
  std::atomic<int64_t> peak_ = 0;
};

}  // namespace ddp
