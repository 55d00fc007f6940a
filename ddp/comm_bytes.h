// The volume of communication: bytes that this rank hands to collectives for its gradients.
//
//   class MyHook : public c10d::CommHookInterface, public ByteCounter {
//     …runHook(…) { … CountBytes(compressed); group->allreduce(…) … }
//   };
//   model->parallel().comm_bytes();  // what MyHook has counted
//
// Counts the input of each collective once, in the dtype that is sent. The number of bytes on the
// wire depends on the backend's algorithm (a ring sends 2 (N - 1) / N of an all-reduce's input per
// rank).
#pragma once

#include <atomic>
#include <cstdint>

#include "ATen/core/Tensor.h"

namespace ddp {

// A second base class of communication hooks that count what they send, besides
// c10d::CommHookInterface. DataParallel finds it by dynamic_cast.
class CommBytesProvider {
 public:
  virtual ~CommBytesProvider() = default;
  // Bytes handed to collectives so far. Thread-safe; not collective.
  virtual int64_t comm_bytes() const = 0;
};

// Counts. Thread-safe: hooks run in autograd's threads.
class ByteCounter : public CommBytesProvider {
 public:
  int64_t comm_bytes() const override { return bytes_.load(std::memory_order_relaxed); }

 protected:
  // `tensor`: the input of a collective. For a sparse tensor, indices and values are counted.
  void CountBytes(const at::Tensor& tensor) {
    const size_t bytes = tensor.is_sparse() ? tensor._indices().nbytes() + tensor._values().nbytes()
                                            : tensor.nbytes();
    bytes_.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
  }

 private:
  std::atomic<int64_t> bytes_ = 0;
};

}  // namespace ddp
