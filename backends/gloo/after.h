// A c10d::Work with a function that runs after another Work, such as the copy of Gloo's result to
// the caller's tensor.
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

// Does not block. When `work`, which must have a future, completes, its thread (Gloo's own) runs
// `last`, without autograd. Then the result completes; the value of its future is `outputs` (the
// first list if there is only one, otherwise all lists). It fails with the error of `work` or
// `last`. `work` must not be one whose completion corrupts the heap: see gloo_backend.h.
// Thread-safe.
c10::intrusive_ptr<c10d::Work> After(const c10::intrusive_ptr<c10d::Work>& work, c10d::OpType type,
                                     std::vector<std::vector<at::Tensor>> outputs,
                                     std::function<void()> last);

}  // namespace ddp::backends::gloo
