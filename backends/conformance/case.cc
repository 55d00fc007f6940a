#include "backends/conformance/case.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ddp::backends::conformance {
namespace {

using c10::ScalarType;

constexpr std::pair<Op, absl::string_view> kOps[] = {
    {Op::kAllreduce, "allreduce"},
    {Op::kAllreduceCoalesced, "allreduce_coalesced"},
    {Op::kReduce, "reduce"},
    {Op::kReduceScatter, "reduce_scatter"},
    {Op::kReduceScatterBase, "reduce_scatter_base"},
    {Op::kReduceScatterCoalesced, "reduce_scatter_single_coalesced"},
    {Op::kAllgather, "allgather"},
    {Op::kAllgatherUnequal, "allgather_unequal"},
    {Op::kAllgatherBase, "allgather_base"},
    {Op::kAllgatherIntoTensorCoalesced, "all_gather_single_coalesced"},
    {Op::kAllgatherCoalesced, "allgather_coalesced"},
    {Op::kBroadcast, "broadcast"},
    {Op::kGather, "gather"},
    {Op::kScatter, "scatter"},
    {Op::kAlltoall, "alltoall"},
    {Op::kAlltoallBase, "all_to_all_single"},
    {Op::kAlltoallBaseUnequal, "alltoall_base_unequal"},
    {Op::kSendRecv, "send_recv"},
    {Op::kRecvAnysource, "recv_anysource"},
    {Op::kBarrier, "barrier"},
    {Op::kMonitoredBarrier, "monitored_barrier"},
};

constexpr std::pair<ReductionOp, absl::string_view> kReductions[] = {
    {ReductionOp::kSum, "sum"}, {ReductionOp::kAvg, "avg"},   {ReductionOp::kProduct, "product"},
    {ReductionOp::kMin, "min"}, {ReductionOp::kMax, "max"},   {ReductionOp::kBand, "band"},
    {ReductionOp::kBor, "bor"}, {ReductionOp::kBxor, "bxor"}, {ReductionOp::kPremulSum, "premul"}};

constexpr std::pair<TensorLayout, absl::string_view> kLayouts[] = {
    {TensorLayout::kContiguous, "contiguous"},
    {TensorLayout::kOffset, "offset"},
    {TensorLayout::kPermuted, "permuted"},
    {TensorLayout::kStrided, "strided"}};

constexpr std::pair<Mode, absl::string_view> kModes[] = {
    {Mode::kSync, "sync"}, {Mode::kAsync, "async"}, {Mode::kInFlight, "inflight"}};

constexpr std::pair<Scope, absl::string_view> kScopes[] = {{Scope::kWorld, "world"},
                                                           {Scope::kNewGroup, "newgroup"},
                                                           {Scope::kSplit, "split"},
                                                           {Scope::kTwoThreads, "twothreads"}};

constexpr std::pair<ScalarType, absl::string_view> kDtypes[] = {
    {ScalarType::Float, "fp32"},
    {ScalarType::Double, "fp64"},
    {ScalarType::Half, "fp16"},
    {ScalarType::BFloat16, "bf16"},
    {ScalarType::Byte, "u8"},
    {ScalarType::Char, "i8"},
    {ScalarType::Int, "i32"},
    {ScalarType::Long, "i64"},
    {ScalarType::Bool, "bool"},
    {ScalarType::Short, "i16"},
    {ScalarType::ComplexFloat, "c64"},
    {ScalarType::ComplexDouble, "c128"},
    {ScalarType::UInt16, "u16"},
    {ScalarType::UInt32, "u32"},
    {ScalarType::UInt64, "u64"},
    {ScalarType::Float8_e4m3fn, "fp8e4m3"},
    {ScalarType::Float8_e5m2, "fp8e5m2"},
};

template <typename T, size_t n>
absl::string_view Lookup(const std::pair<T, absl::string_view> (&table)[n], T value) {
  for (const auto& [key, name] : table) {
    if (key == value) return name;
  }
  return "unknown";
}

template <typename T, size_t n>
std::vector<T> Keys(const std::pair<T, absl::string_view> (&table)[n]) {
  std::vector<T> keys;
  for (const auto& [key, name] : table) keys.push_back(key);
  return keys;
}

}  // namespace

bool HasReduction(Op op) { return op <= Op::kReduceScatterCoalesced; }
bool MovesData(Op op) { return op < Op::kBarrier; }
bool NeedsPeer(Op op) { return op == Op::kSendRecv || op == Op::kRecvAnysource; }
bool HasFuture(Op op) {
  return op != Op::kSendRecv && op != Op::kRecvAnysource && op != Op::kMonitoredBarrier;
}

bool IsMeaningful(const Case& c) {
  const bool subgroup = c.scope == Scope::kNewGroup || c.scope == Scope::kSplit;
  if (NeedsPeer(c.op) && c.world_size < (subgroup ? 4 : 2)) return false;
  if (MovesData(c.op) && c.layout == TensorLayout::kStrided && c.count < 2) return false;
  if (MovesData(c.op) && c.layout == TensorLayout::kPermuted &&
      (c.count < 4 || c.count % 2 != 0 || c.op == Op::kAlltoallBaseUnequal)) {
    return false;
  }
  if (!HasReduction(c.op)) return true;
  const bool floating = c10::isFloatingType(c.dtype);
  switch (c.dtype) {
    case ScalarType::ComplexFloat:
    case ScalarType::ComplexDouble:
    case ScalarType::UInt16:
    case ScalarType::UInt32:
    case ScalarType::UInt64:
    case ScalarType::Float8_e4m3fn:
    case ScalarType::Float8_e5m2:
      return false;
    default:
      break;
  }
  switch (c.reduction) {
    case ReductionOp::kBand:
    case ReductionOp::kBor:
    case ReductionOp::kBxor:
      return !floating;
    case ReductionOp::kPremulSum:
      return floating;
    case ReductionOp::kAvg:
      return c.dtype != ScalarType::Bool;
    default:
      return true;
  }
}

absl::Span<const Op> AllOps() {
  static const auto* ops = new std::vector<Op>(Keys(kOps));
  return *ops;
}
absl::Span<const ReductionOp> AllReductions() {
  static const auto* reductions = new std::vector<ReductionOp>(Keys(kReductions));
  return *reductions;
}
absl::Span<const TensorLayout> AllLayouts() {
  static const auto* layouts = new std::vector<TensorLayout>(Keys(kLayouts));
  return *layouts;
}
absl::Span<const Mode> AllModes() {
  static const auto* modes = new std::vector<Mode>(Keys(kModes));
  return *modes;
}
absl::Span<const Scope> AllScopes() {
  static const auto* scopes = new std::vector<Scope>(Keys(kScopes));
  return *scopes;
}
absl::Span<const ScalarType> AllDtypes() {
  static const auto* dtypes = new std::vector<ScalarType>(Keys(kDtypes));
  return *dtypes;
}

absl::string_view Name(Op op) { return Lookup(kOps, op); }
absl::string_view Name(ReductionOp reduction) { return Lookup(kReductions, reduction); }
absl::string_view Name(TensorLayout layout) { return Lookup(kLayouts, layout); }
absl::string_view Name(Mode mode) { return Lookup(kModes, mode); }
absl::string_view Name(Scope scope) { return Lookup(kScopes, scope); }
absl::string_view DtypeName(ScalarType dtype) { return Lookup(kDtypes, dtype); }

std::string CaseName(const Case& c) {
  std::vector<std::string> parts = {std::string(Name(c.op))};
  if (HasReduction(c.op)) parts.emplace_back(Name(c.reduction));
  if (MovesData(c.op)) {
    parts.emplace_back(DtypeName(c.dtype));
    parts.push_back(absl::StrCat(c.count));
    parts.emplace_back(Name(c.layout));
  }
  parts.emplace_back(Name(c.mode));
  parts.emplace_back(Name(c.scope));
  parts.push_back(absl::StrCat("w", c.world_size));
  return absl::StrJoin(parts, "_");
}

}  // namespace ddp::backends::conformance
