#include "backends/watch/call_record.h"

#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"

namespace ddp::backends::watch {
namespace {

absl::string_view Name(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::kBroadcast:
      return "broadcast";
    case CollectiveKind::kAllReduce:
      return "allreduce";
    case CollectiveKind::kAllReduceCoalesced:
      return "allreduce_coalesced";
    case CollectiveKind::kAllReduceSparse:
      return "allreduce_sparse";
    case CollectiveKind::kReduce:
      return "reduce";
    case CollectiveKind::kAllGather:
      return "allgather";
    case CollectiveKind::kAllGatherSingle:
      return "all_gather_single";
    case CollectiveKind::kAllGatherCoalesced:
      return "allgather_coalesced";
    case CollectiveKind::kAllGatherSingleCoalesced:
      return "all_gather_single_coalesced";
    case CollectiveKind::kGather:
      return "gather";
    case CollectiveKind::kScatter:
      return "scatter";
    case CollectiveKind::kReduceScatter:
      return "reduce_scatter";
    case CollectiveKind::kReduceScatterSingle:
      return "reduce_scatter_single";
    case CollectiveKind::kReduceScatterSingleCoalesced:
      return "reduce_scatter_single_coalesced";
    case CollectiveKind::kAllToAll:
      return "alltoall";
    case CollectiveKind::kAllToAllSingle:
      return "all_to_all_single";
    case CollectiveKind::kBarrier:
      return "barrier";
    case CollectiveKind::kMonitoredBarrier:
      return "monitored_barrier";
    case CollectiveKind::kSend:
      return "send";
    case CollectiveKind::kRecv:
      return "recv";
    case CollectiveKind::kRecvAnySource:
      return "recv_anysource";
  }
  return "unknown operation";
}

std::string ReduceOpName(uint8_t op) {
  constexpr absl::string_view kNames[] = {"sum",  "avg", "product", "min",       "max",
                                          "band", "bor", "bxor",    "premul_sum"};
  return op < std::size(kNames) ? std::string(kNames[op]) : absl::StrCat("reduce op ", op);
}

std::string DtypeName(int8_t dtype) {
  constexpr absl::string_view kNames[] = {
      "uint8",     "int8",      "int16",      "int32", "int64", "float16", "float32", "float64",
      "complex32", "complex64", "complex128", "bool",  "qint8", "quint8",  "qint32",  "bfloat16"};
  if (dtype >= 0 && static_cast<size_t>(dtype) < std::size(kNames)) {
    return std::string(kNames[dtype]);
  }
  return absl::StrCat("dtype ", dtype);
}

}  // namespace

bool Agree(const CallRecord& a, const CallRecord& b) {
  if (a.kind != b.kind || a.reduce_op != b.reduce_op || a.dtype != b.dtype || a.root != b.root) {
    return false;
  }
  if (SignatureIncludesNumel(a.kind)) return a.layout == b.layout && a.tensors == b.tensors;
  return !a.same_numel || !b.same_numel || a.numel == b.numel;
}

std::string ToString(const CallRecord& record) {
  std::string text(Name(record.kind));
  std::string details;
  if (record.reduce_op != kNoReduceOp) details = ReduceOpName(record.reduce_op);
  if (record.kind == CollectiveKind::kSend) {
    absl::StrAppend(&details, "to rank ", record.root);
  } else if (record.kind == CollectiveKind::kRecv) {
    absl::StrAppend(&details, "from rank ", record.root);
  } else if (record.root != kNoRoot) {
    absl::StrAppend(&details, details.empty() ? "" : ", ", "root ", record.root);
  }
  if (!details.empty()) absl::StrAppend(&text, "(", details, ")");
  if (record.dtype != kNoDtype) absl::StrAppend(&text, " ", DtypeName(record.dtype));
  if (record.tensors == 1) absl::StrAppend(&text, " [", record.numel, "]");
  if (record.tensors > 1) {
    absl::StrAppend(&text, " [", record.numel, " in ", record.tensors, " tensors]");
  }
  return text;
}

}  // namespace ddp::backends::watch
