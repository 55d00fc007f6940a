// A c10d::Work that goes on where another ends: what Gloo's result still needs to be the caller's.
//
//   return After(ProcessGroupGloo::allreduce(wide), OpType::ALLREDUCE, {tensors},
//                [=]() mutable { tensors[0].copy_(wide[0]); });
#pragma once

#include <functional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/util/intrusive_ptr.h"
#include "torch/csrc/distributed/c10d/Work.hpp"

namespace ddp::backends::gloo {

// Does not block. `work`, which must have a future, is followed by `last`, without gradients, in
// the thread that completes it: Gloo's own. The result then completes; its future holds `outputs`
// (the first list where there is one, otherwise all). An error of either is the result's.
c10::intrusive_ptr<c10d::Work> After(const c10::intrusive_ptr<c10d::Work>& work, c10d::OpType type,
                                     std::vector<std::vector<at::Tensor>> outputs,
                                     std::function<void()> last);

}  // namespace ddp::backends::gloo
