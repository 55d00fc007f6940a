// A case of the conformance suite: the full description of one collective. plan.h computes which
// elements move where, start.h makes the call.
//
//   Case c{.op = Op::kReduceScatter, .dtype = at::kBFloat16, .count = 1001, .world_size = 4};
//   CaseName(c) == "reduce_scatter_sum_bf16_1001_contiguous_sync_world_w4"
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "c10/core/ScalarType.h"

namespace ddp::backends::conformance {

enum class Op {
  // These take a reduction.
  kAllreduce,
  kAllreduceCoalesced,
  kReduce,
  kReduceScatter,
  kReduceScatterBase,
  kReduceScatterCoalesced,
  // These only move data.
  kAllgather,
  kAllgatherUnequal,
  kAllgatherBase,
  kAllgatherIntoTensorCoalesced,
  kAllgatherCoalesced,
  kBroadcast,
  kGather,
  kScatter,
  kAlltoall,
  kAlltoallBase,
  kAlltoallBaseUnequal,
  kSendRecv,
  kRecvAnysource,
  // These move no data.
  kBarrier,
  kMonitoredBarrier,
};

enum class ReductionOp { kSum, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor, kPremulSum };

// Memory layout of the tensors.
enum class TensorLayout {
  kContiguous,
  kOffset,    // contiguous, at an unaligned offset, with guard elements around it
  kPermuted,  // two columns, transposed: dense, but not contiguous
  kStrided,   // every second element, with guard elements in the gaps
};

enum class Mode {
  kSync,
  kAsync,
  kInFlight,  // several at once, waited for in reverse order
};

// The group that runs the case. Subgroups (kNewGroup, kSplit): the even ranks and the odd ranks.
enum class Scope {
  kWorld,
  kNewGroup,    // a group of its own over a sub-set of the ranks
  kSplit,       // Backend::split; a new group where the backend cannot split
  kTwoThreads,  // two groups of all ranks, each used by its own thread at the same time
};

struct Case {
  Op op = Op::kAllreduce;
  ReductionOp reduction = ReductionOp::kSum;
  c10::ScalarType dtype = c10::ScalarType::Float;
  int64_t count = 1;  // elements of one message; see plan.h
  TensorLayout layout = TensorLayout::kContiguous;
  Mode mode = Mode::kSync;
  Scope scope = Scope::kWorld;
  int world_size = 2;  // of the whole, not of the sub-group
};

// A rank's own multiplier in ReductionOp::kPremulSum: exact in every floating-point type.
inline double PremulFactor(int rank) { return rank % 2 == 0 ? 0.25 : 0.5; }

bool HasReduction(Op op);
bool MovesData(Op op);
// Whether the operation needs at least two ranks.
bool NeedsPeer(Op op);
// False for send, recv and monitoredBarrier, for which c10d's own backends return no future.
bool HasFuture(Op op);

// Whether c10d defines the case. Bitwise reductions: integers and bool. Premul-sum: floating point.
// Avg: not bool. All reductions: the dtypes that both of c10d's own backends reduce, and int16.
bool IsMeaningful(const Case& c);

absl::Span<const Op> AllOps();
absl::Span<const ReductionOp> AllReductions();
absl::Span<const TensorLayout> AllLayouts();
absl::Span<const Mode> AllModes();
absl::Span<const Scope> AllScopes();
// Dtypes of reductions, and dtypes that are only moved.
absl::Span<const c10::ScalarType> AllDtypes();

absl::string_view Name(Op op);
absl::string_view Name(ReductionOp reduction);
absl::string_view Name(TensorLayout layout);
absl::string_view Name(Mode mode);
absl::string_view Name(Scope scope);
absl::string_view DtypeName(c10::ScalarType dtype);

// Letters, digits and underscores; unique among cases.
std::string CaseName(const Case& c);

}  // namespace ddp::backends::conformance
