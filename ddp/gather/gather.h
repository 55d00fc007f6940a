// Gather and broadcast of nested values (ddp/tree/tree.h): tensors, numbers, text and structs,
// whose shapes, dtypes and lengths may differ by rank.
//
//   // all[r] is rank r's
//   DDP_ASSIGN_OR_RETURN(std::vector<Cameras> all, AllGather(group, cameras));
//   // on rank 0; empty on the others
//   DDP_ASSIGN_OR_RETURN(all, Gather(group, cameras, /*dst=*/0));
//   DDP_ASSIGN_OR_RETURN(Config config, BroadcastObject(group, mine, /*src=*/0));
//   DDP_ASSIGN_OR_RETURN(auto means, ReduceDict(group, {{"loss", loss}}, DictReduction::kMean));
//
// All functions are collective: every rank calls them in the same order, with values of the same
// type. They block. Thread-compatible: one thread per rank uses the group. A null group or a group
// of one rank needs no communication; values are copied in this case, too.
//
// A tensor arrives as a copy: contiguous, without gradient, on a device of the type it came from
// (the current one of that type). Works with any backend: tensors on a device without a backend are
// sent through a device that has one.
//
// Errors. InvalidArgument, the same on all ranks and with the rank's number, if the value of a rank
// cannot be sent, with the path of the part (see EncodeTree in ddp/tree/codec.h). InvalidArgument
// on the ranks that notice it, if the ranks' types differ. A failure of communication is a status,
// too (CatchCollective in ddp/collective_status.h); the group is then unusable, as after any failed
// collective.
//
// Cost: two messages per call, sizes and then bytes; AllGatherEncoded says more.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "c10/core/DeviceType.h"
#include "c10/util/intrusive_ptr.h"
#include "ddp/tree/codec.h"
#include "ddp/tree/format.h"

namespace c10d {
class ProcessGroup;
}

namespace ddp {

// Collectives on encoded values, which may differ in size by rank: the part that does not depend on
// the values' type.
//
//   auto mine = EncodeTree(value, DirectDevice(group));
//   DDP_ASSIGN_OR_RETURN(auto all, AllGatherEncoded(group, mine));
//
// An error in `mine` is the result on every rank, with the number of the lowest rank that has one.
// Errors of communication are those of CatchCollective, and only of this rank.

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

namespace gather_internal {

template <typename T>
absl::StatusOr<std::vector<T>> DecodeAll(std::vector<EncodedTree> encoded) {
  std::vector<T> values;
  values.reserve(encoded.size());
  for (size_t r = 0; r < encoded.size(); ++r) {
    absl::StatusOr<T> value = DecodeTree<T>(encoded[r]);
    if (!value.ok()) return Annotate(value.status(), absl::StrCat("from rank ", r));
    values.push_back(*std::move(value));
    encoded[r] = {};  // at most one value is in memory twice
  }
  return values;
}

}  // namespace gather_internal

// Collective. Every rank's value, by rank, on every rank.
template <typename T>
absl::StatusOr<std::vector<T>> AllGather(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                         const T& value) {
  DDP_ASSIGN_OR_RETURN(std::vector<EncodedTree> all,
                       AllGatherEncoded(group, EncodeTree(value, DirectDevice(group))));
  return gather_internal::DecodeAll<T>(std::move(all));
}

// Collective. Every rank's value, by rank, on rank `dst`; an empty vector on the others. All ranks
// return InvalidArgument if the `dst` of one is not a rank, and FailedPrecondition if they disagree
// on it.
template <typename T>
absl::StatusOr<std::vector<T>> Gather(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                      const T& value, int dst) {
  DDP_ASSIGN_OR_RETURN(std::vector<EncodedTree> all,
                       GatherEncoded(group, EncodeTree(value, DirectDevice(group)), dst));
  return gather_internal::DecodeAll<T>(std::move(all));
}

// Collective. Rank `src`'s value on every rank. The other ranks' values are ignored. `src` is the
// same on all ranks; InvalidArgument if it is not a rank.
template <typename T>
absl::StatusOr<T> BroadcastObject(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                  const T& value, int src) {
  absl::StatusOr<EncodedTree> mine = EncodedTree();
  if (IsSource(group, src)) mine = EncodeTree(value, DirectDevice(group));
  DDP_ASSIGN_OR_RETURN(EncodedTree encoded, BroadcastEncoded(group, std::move(mine), src));
  return DecodeTree<T>(encoded);
}

enum class DictReduction { kMean, kSum };

// Collective. For each name the mean or sum over the ranks, added in rank order: the same bits on
// every rank. FailedPrecondition on all ranks, with the first name, if a rank lacks a name that
// another has.
absl::StatusOr<std::map<std::string, double>> ReduceDict(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const std::map<std::string, double>& scalars, DictReduction reduction);

}  // namespace ddp
