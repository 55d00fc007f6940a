#include "ddp/hooks/comm_hook.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/option_error.h"
#include "base/status.h"
#include "checkpoint/stateful.h"
#include "ddp/comm_bytes.h"
#include "ddp/model_wrapper.h"
#include "ddp/reducer.h"

namespace ddp::hooks {
namespace {

using c10::ivalue::Future;

// DistributedDataParallel itself.
const Registration<HookRegistry> kAllReduce("allreduce", HookEntry{});

// Hook noop: each rank keeps its own gradients, neither summed nor divided, and nothing is sent.
// For measurements: the difference to a step with allreduce is what communication costs. Ranks
// drift apart. PyTorch: noop_hook.
class NoopHook final : public c10d::CppCommHookInterface<GroupPtr>, public ByteCounter {
 public:
  using CppCommHookInterface::CppCommHookInterface;
  c10::intrusive_ptr<Future> runHook(c10d::GradBucket& bucket) override {
    c10::intrusive_ptr<Future> future = NewFuture(bucket.getBuffer());
    future->markCompleted(c10::IValue(bucket.getBuffer()));
    return future;
  }
};

absl::StatusOr<HookPtr> CreateNoop(const CommHookOptions&, const GroupPtr& group) {
  return std::make_unique<NoopHook>(group);
}

const Registration<HookRegistry> kNoop("noop", HookEntry{.create = &CreateNoop});

}  // namespace

absl::Status Validate(const CommHookOptions& options) {
  DDP_RETURN_IF_ERROR(ValidateOptions(options));
  DDP_ASSIGN_OR_RETURN(const HookEntry entry, HookRegistry::Find(options.name));
  return entry.validate == nullptr ? absl::OkStatus() : entry.validate(options);
}

absl::Status Register(const CommHookOptions& options, const GroupPtr& group, ModelWrapper& parallel,
                      checkpoint::Stateful** state) {
  DDP_RETURN_IF_ERROR(Validate(options));
  DDP_ASSIGN_OR_RETURN(const HookEntry entry, HookRegistry::Find(options.name));
  if (entry.create == nullptr) return absl::OkStatus();
  if (parallel.has_comm_hook()) {
    return OptionError("name", options.name,
                       "cannot be registered: the wrapped module has a communication hook already "
                       "(register_comm_hook); use allreduce, or a wrapper without a hook");
  }
  if (parallel.world_size() == 1) return absl::OkStatus();
  DDP_ASSIGN_OR_RETURN(HookPtr hook, entry.create(options, group));
  auto* stateful = dynamic_cast<checkpoint::Stateful*>(hook.get());
  DDP_RETURN_IF_ERROR(parallel.register_comm_hook(std::move(hook), options.name));
  if (state != nullptr) *state = stateful;
  return absl::OkStatus();
}

absl::StatusOr<std::optional<c10::ScalarType>> WireDtypeOf(const CommHookOptions& options) {
  DDP_RETURN_IF_ERROR(Validate(options));
  std::vector<std::string> names;
  for (const auto& [name, entry] : HookRegistry::All()) {
    if (entry.create != nullptr && !entry.wire_dtype) continue;
    if (name == options.name) return entry.wire_dtype;
    names.push_back(name);
  }
  return OptionError("name", options.name,
                     absl::StrCat("does not go with zero.stage=2, which reduces gradients itself "
                                  "and takes ",
                                  absl::StrJoin(names, ", ")));
}

}  // namespace ddp::hooks
