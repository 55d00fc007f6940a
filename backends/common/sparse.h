// All-reduce of sparse tensors, for backends whose collectives take dense tensors only.
//
//   if (IsSparse(tensors)) return SparseAllReduce(*this, tensors, options);  // in allreduce()
//
// The same rows on two ranks, such as words of an embedding, are added up; the result has the rows
// of all ranks.
#pragma once

#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/util/intrusive_ptr.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"

namespace ddp::backends {

// Whether the first tensor has the layout COO, which `Embedding(sparse)` gives to its gradient.
bool IsSparse(const std::vector<at::Tensor>& tensors);

// Collective. One sparse CPU tensor per rank, of the same shape, dtype and number of sparse
// dimensions; the number of elements may differ. Afterwards `tensors[0]` is coalesced and holds the
// sum (SUM) or the mean (AVG) over ranks, added up in rank order: the same bits on all ranks. fp16
// and bf16 are added in fp32 and rounded once. Means of integers are truncated.
//
// Blocks: calls two all-gathers of `backend` and waits for them; the returned Work is completed.
// Throws c10::Error, with the rank, for wrong arguments and for tensors that differ between ranks,
// and the exceptions of the backend's all-gather.
c10::intrusive_ptr<c10d::Work> SparseAllReduce(c10d::Backend& backend,
                                               std::vector<at::Tensor>& tensors,
                                               const c10d::AllreduceOptions& options);

}  // namespace ddp::backends
