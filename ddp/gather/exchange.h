// Collectives on encoded values, which may differ in size by rank: the part of ddp/gather/gather.h
// that does not depend on the values' type.
//
//   auto mine = EncodeTree(value, DirectDevice(group));
//   DDP_ASSIGN_OR_RETURN(auto all, AllGatherEncoded(group, mine));
//
// All functions are collective and block. A null group is a world of one: no communication.
// Thread-compatible. An error in `mine` is the result on every rank, with the number of the lowest
// rank that has one. Errors of communication are those of CatchCollective, and only of this rank.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "c10/core/DeviceType.h"
#include "c10/util/intrusive_ptr.h"
#include "ddp/tree/format.h"

namespace c10d {
class ProcessGroup;
}

namespace ddp {

// The type of accelerator for which the group has a backend; CPU if there is none. Tensors on it
// are sent without a copy to the host. Not collective.
c10::DeviceType DirectDevice(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// Whether this rank is `src`. Not collective.
bool IsSource(const c10::intrusive_ptr<c10d::ProcessGroup>& group, int src);

// All ranks' values, by rank. Two messages: the sizes, 32 bytes per rank, and the bytes. The bytes
// are one all-gather, padded to the largest, if that sends at most twice the data, or at most 64
// KiB per rank; otherwise one broadcast for each rank that has any. One more message (or more) if
// tensors are on an accelerator.
absl::StatusOr<std::vector<EncodedTree>> AllGatherEncoded(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, absl::StatusOr<EncodedTree> mine);

// The same on rank `dst`; nothing on the others. Bytes whose sizes differ much are sent to `dst`
// point to point. On all ranks: FailedPrecondition if they do not name the same `dst`,
// InvalidArgument if the `dst` of any rank is not a rank of the group.
absl::StatusOr<std::vector<EncodedTree>> GatherEncoded(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, absl::StatusOr<EncodedTree> mine, int dst);

// The value of rank `src`, also there. Two broadcasts, three if it has tensors on an accelerator.
// The others' `mine` is ignored.
absl::StatusOr<EncodedTree> BroadcastEncoded(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                             absl::StatusOr<EncodedTree> mine, int src);

}  // namespace ddp
