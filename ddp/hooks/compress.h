// Hooks fp16_compress and bf16_compress: gradients are sent in 16 bits.
//
//   model->register_comm_hook(std::make_unique<hooks::CompressHook>(group, at::kBFloat16));
//
// They work as PyTorch's hooks of these names: each bucket is rounded to 16 bits, averaged, and
// widened in place. Over backends on the callers' cores (shm) the backend averages, with sums in
// fp32; over others each rank divides its 16-bit values and the backend adds up: hier in fp32, gloo
// in 16 bits. fp16 overflows beyond 65504 and then gives infinities; bf16 has fp32's range and 8
// bits of precision.
#pragma once

#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ddp/hooks/rounds.h"

namespace ddp::hooks {

// Keeps a 16-bit copy of each bucket, where possible in the backend's memory, from the first
// backward on. Gradients that have this dtype already are averaged as without a hook.
class CompressHook final : public RoundsHook {
 public:
  CompressHook(c10::intrusive_ptr<c10d::ProcessGroup> group, at::ScalarType dtype)
      : RoundsHook(std::move(group)), dtype_(dtype) {}

 protected:
  std::unique_ptr<BucketRounds> Begin(c10d::GradBucket& bucket) override;

 private:
  class Bucket;

  const at::ScalarType dtype_;
  std::vector<at::Tensor> compressed_;  // by the bucket's index
};

}  // namespace ddp::hooks
