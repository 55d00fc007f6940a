// Whether all ranks hold the same tensors, bit for bit.
//
//   NamedTensors weights;
//   for (const auto& p : module.named_parameters()) weights.emplace_back(p.key(), p.value());
//   DDP_RETURN_IF_ERROR(AllAgree(group, weights));
//   // "tensor 'fc.bias' (Float [10]) differs between ranks: ranks 1, 3 do not have rank 0's bits"
#pragma once

#include "absl/status/status.h"
#include "c10/util/intrusive_ptr.h"
#include "ddp/model_tensors.h"

namespace ddp {

// Collective, and blocks. OK if all ranks have the same tensors as rank 0: number, order, names,
// dtypes, shapes, layouts (dense, or sparse COO with the same indices in the same order), kind of
// device, and the bits of all elements. Exact: bytes are compared, not hashes, and not numbers:
// -0.0 is not 0.0, and a NaN is itself. Strides are not compared.
//
// FailedPrecondition, the same on all ranks, names the first tensor that differs, in rank 0's
// order, and the ranks where it does; with three ranks or more also whether rank 0 is the only one
// that has other bits. InvalidArgument, the same on all ranks, for a tensor that is
// quantized, nested, of another sparse layout, or without memory. Statuses of communication as
// CatchCollective.
//
// Cost: three small exchanges (ddp/gather/gather.h), and one broadcast per 16 MiB of rank 0's
// tensors on devices of one type; memory of that size, and copies of at most two larger tensors
// that are not contiguous. A null group or one rank: nothing to compare, always OK.
// Thread-compatible.
absl::Status AllAgree(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                      const NamedTensors& tensors);

}  // namespace ddp
