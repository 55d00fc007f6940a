#include "ddp/hooks/compress.h"

#include <utility>

#include "ddp/collective_memory.h"
#include "ddp/hooks/comm_hook.h"

namespace ddp::hooks {

class CompressHook::Bucket final : public BucketRounds {
 public:
  Bucket(CompressHook* hook, at::Tensor buffer, at::Tensor compressed)
      : hook_(hook), buffer_(std::move(buffer)), compressed_(std::move(compressed)) {}

  WorkPtr Next() override {
    if (std::exchange(sent_, true)) {
      buffer_.copy_(compressed_);
      return nullptr;
    }
    compressed_.copy_(buffer_);
    return hook_->Mean(compressed_);
  }

 private:
  CompressHook* const hook_;
  at::Tensor buffer_, compressed_;
  bool sent_ = false;
};

std::unique_ptr<BucketRounds> CompressHook::Begin(c10d::GradBucket& bucket) {
  const at::Tensor& buffer = bucket.getBuffer();
  if (buffer.scalar_type() == dtype_) return nullptr;
  const size_t index = bucket.getIndex();
  if (index >= compressed_.size()) compressed_.resize(index + 1);
  at::Tensor& compressed = compressed_[index];
  // Buckets are rebuilt after the first backward.
  if (!compressed.defined() || compressed.numel() != buffer.numel()) {
    compressed = AllocateForCollectives(&group(), buffer.numel(), buffer.options().dtype(dtype_));
  }
  return std::make_unique<Bucket>(this, buffer, compressed);
}

namespace {

template <at::ScalarType dtype>
absl::StatusOr<HookPtr> Create(const CommHookOptions&, const GroupPtr& group) {
  return std::make_unique<CompressHook>(group, dtype);
}

const Registration<HookRegistry> kFp16("fp16_compress", HookEntry{.create = &Create<at::kHalf>,
                                                                  .wire_dtype = at::kHalf});
const Registration<HookRegistry> kBf16("bf16_compress", HookEntry{.create = &Create<at::kBFloat16>,
                                                                  .wire_dtype = at::kBFloat16});

}  // namespace
}  // namespace ddp::hooks
