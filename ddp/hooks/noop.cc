// Hook noop: each rank keeps its own gradients, neither summed nor divided, and nothing is sent.
// For measurements: the difference to a step with allreduce is what communication costs. Ranks
// drift apart. PyTorch: noop_hook.

#include "ddp/comm_bytes.h"
#include "ddp/comm_hook.h"
#include "ddp/hooks/comm_hook.h"

namespace ddp::hooks {
namespace {

using c10::ivalue::Future;

class NoopHook final : public c10d::CppCommHookInterface<GroupPtr>, public ByteCounter {
 public:
  using CppCommHookInterface::CppCommHookInterface;
  c10::intrusive_ptr<Future> runHook(c10d::GradBucket& bucket) override {
    c10::intrusive_ptr<Future> future = NewFuture(bucket.getBuffer());
    future->markCompleted(c10::IValue(bucket.getBuffer()));
    return future;
  }
};

absl::StatusOr<HookPtr> Create(const CommHookOptions&, const GroupPtr& group) {
  return std::make_unique<NoopHook>(group);
}

const Registration<HookRegistry> kNoop("noop", HookEntry{.create = &Create});

}  // namespace
}  // namespace ddp::hooks
