// The communication hook for backends that work on the caller's own cores.
#pragma once

#include "c10/core/Device.h"
#include "c10/util/intrusive_ptr.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/comm.hpp"

namespace ddp {

// True where a collective on tensors of `device` is work for the cores that also run backward, done
// by whoever waits, with no link whose time backward could hide: the shm backend.
bool AveragesInline(c10d::ProcessGroup& group, c10::DeviceType device);

// Averages each bucket with one all-reduce, as the Reducer does without a hook, and has the thread
// that runs backward wait for the last of them when it is through. Without that it would only look
// at futures, each of which another thread of this rank would have to be woken up for.
//
// Not for backends without ReduceOp::AVG.
class InlineAverage : public c10d::CppCommHookInterface<c10::intrusive_ptr<c10d::ProcessGroup>> {
 public:
  using CppCommHookInterface::CppCommHookInterface;
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override;
};

}  // namespace ddp
