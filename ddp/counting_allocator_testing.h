// For tests and benchmarks: counts what tensors on the CPU take from torch's allocator.
//
//   CountingAllocator& allocator = CountingAllocator::Install();   // for the life of the process
//   const int64_t before = allocator.bytes();
#pragma once

#include <atomic>
#include <cstdint>

#include "c10/core/Allocator.h"

namespace ddp {

// Thread-safe. Memory that backends provide (shm's arena) is not in it.
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
    return {address, new Block{this, std::move(data), count}, &Block::Delete, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }

 private:
  struct Block {
    CountingAllocator* owner;
    c10::DataPtr data;
    int64_t count;
    static void Delete(void* context) {
      auto* block = static_cast<Block*>(context);
      block->owner->bytes_ -= block->count;
      delete block;
    }
  };

  explicit CountingAllocator(c10::Allocator* inner) : inner_(inner) {}

  c10::Allocator* const inner_;
  std::atomic<int64_t> bytes_ = 0;
  std::atomic<int64_t> allocations_ = 0;
  std::atomic<int64_t> peak_ = 0;
};

}  // namespace ddp
