#include "backends/watch/record.h"

#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"

namespace ddp::backends::watch {
namespace {

absl::string_view Name(Op op) {
  switch (op) {
    case Op::kBroadcast:
      return "broadcast";
    case Op::kAllReduce:
      return "allreduce";
    case Op::kAllReduceCoalesced:
      return "allreduce_coalesced";
    case Op::kAllReduceSparse:
      return "allreduce_sparse";
    case Op::kReduce:
      return "reduce";
    case Op::kAllGather:
      return "allgather";
    case Op::kAllGatherIntoTensor:
      return "allgather_into_tensor";
    case Op::kAllGatherCoalesced:
      return "allgather_coalesced";
    case Op::kAllGatherIntoTensorCoalesced:
      return "allgather_into_tensor_coalesced";
    case Op::kGather:
      return "gather";
    case Op::kScatter:
      return "scatter";
    case Op::kReduceScatter:
      return "reduce_scatter";
    case Op::kReduceScatterTensor:
      return "reduce_scatter_tensor";
    case Op::kReduceScatterTensorCoalesced:
      return "reduce_scatter_tensor_coalesced";
    case Op::kAllToAll:
      return "alltoall";
    case Op::kAllToAllBase:
      return "alltoall_base";
    case Op::kBarrier:
      return "barrier";
    case Op::kMonitoredBarrier:
      return "monitored_barrier";
    case Op::kSend:
      return "send";
    case Op::kRecv:
      return "recv";
    case Op::kRecvAnySource:
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

bool Agree(const Record& a, const Record& b) {
  if (a.op != b.op || a.reduce_op != b.reduce_op || a.dtype != b.dtype || a.root != b.root) {
    return false;
  }
  if (NumelIsSigned(a.op)) return a.layout == b.layout && a.tensors == b.tensors;
  return !a.same_numel || !b.same_numel || a.numel == b.numel;
}

std::string ToString(const Record& record) {
  std::string text(Name(record.op));
  std::string details;
  if (record.reduce_op != kNoReduceOp) details = ReduceOpName(record.reduce_op);
  if (record.op == Op::kSend) {
    absl::StrAppend(&details, "to rank ", record.root);
  } else if (record.op == Op::kRecv) {
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
