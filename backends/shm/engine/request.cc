#include "backends/shm/engine/request.h"

#include "absl/strings/str_cat.h"

namespace ddp::backends::shm {
namespace {

struct CallSignature {
  Kind kind;
  uint8_t op;
  uint8_t dtype;
  int root;
};

uint64_t Pack(const CallSignature& what) {
  return uint64_t(what.kind) | uint64_t(what.op) << 8 | uint64_t(what.dtype) << 16 |
         uint64_t(uint32_t(what.root)) << 32;
}

CallSignature Unpack(uint64_t packed) {
  return {Kind(packed & 0xff), uint8_t(packed >> 8), uint8_t(packed >> 16),
          int(uint32_t(packed >> 32))};
}

bool Reduces(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter;
}

bool HasRoot(Kind kind) {
  return kind == Kind::kReduce || kind == Kind::kBroadcast || kind == Kind::kGather ||
         kind == Kind::kScatter;
}

// A hash of sizes: 0 if all are equal; otherwise nearly always different for different sizes.
uint32_t PartsHash(const std::vector<Buffer>& parts) {
  uint64_t hash = 0;
  bool equal = true;
  for (const Buffer& part : parts) {
    equal &= part.bytes == parts[0].bytes;
    hash = (hash ^ part.bytes) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
  }
  return equal ? 0 : static_cast<uint32_t>(hash) | 1;
}

}  // namespace

const char* Name(Kind kind) {
  switch (kind) {
    case Kind::kBarrier:
      return "barrier";
    case Kind::kAllReduce:
      return "allreduce";
    case Kind::kReduce:
      return "reduce";
    case Kind::kReduceScatter:
      return "reduce_scatter";
    case Kind::kAllGather:
      return "allgather";
    case Kind::kBroadcast:
      return "broadcast";
    case Kind::kGather:
      return "gather";
    case Kind::kScatter:
      return "scatter";
    case Kind::kAllToAll:
      return "alltoall";
    case Kind::kSend:
      return "send";
    case Kind::kRecv:
      return "recv";
  }
  return "unknown";
}

Signature SignatureOf(const Request& request) {
  CallSignature what{request.kind, 0, 0, HasRoot(request.kind) ? request.root : 0};
  if (request.kind != Kind::kBarrier) what.dtype = uint8_t(request.reduction.dtype);
  size_t bytes = 0;
  if (Reduces(request.kind)) {
    what.op = uint8_t(request.reduction.op);
    bytes = request.count * ElementSize(request.reduction.dtype);
  } else if (request.kind == Kind::kBroadcast) {
    bytes = request.count;
  } else if (request.kind == Kind::kAllGather) {
    for (const Buffer& part : request.recv) bytes += part.bytes;
    what.root = static_cast<int>(PartsHash(request.recv));
  }
  return {Pack(what), bytes};
}

std::string ToString(const Signature& signature) {
  const CallSignature what = Unpack(signature.what);
  const DType dtype = DType(what.dtype);
  std::string text = Name(what.kind);
  if (Reduces(what.kind)) {
    absl::StrAppend(&text, "(", Name(ReduceOp(what.op)));
    if (HasRoot(what.kind)) absl::StrAppend(&text, ", root ", what.root);
    absl::StrAppend(&text, ") of ", signature.bytes / ElementSize(dtype), " x ", Name(dtype));
    return text;
  }
  if (HasRoot(what.kind)) absl::StrAppend(&text, "(root ", what.root, ")");
  if (what.kind == Kind::kBroadcast || what.kind == Kind::kAllGather) {
    absl::StrAppend(&text, " of ", signature.bytes, " bytes");
  }
  if (what.kind != Kind::kBarrier) absl::StrAppend(&text, " of ", Name(dtype));
  if (what.kind == Kind::kAllGather && what.root != 0) {
    absl::StrAppend(&text, " in unequal parts (#", absl::Hex(what.root), ")");
  }
  return text;
}

std::string ToString(const Request& request) {
  if (request.kind == Kind::kSend || request.kind == Kind::kRecv) {
    return absl::StrCat(
        Name(request.kind), request.kind == Kind::kSend ? " to " : " from ",
        request.root == kAnySource ? "any rank" : absl::StrCat("rank ", request.root), " of ",
        request.count, " bytes, tag ", request.tag);
  }
  return ToString(SignatureOf(request));
}

}  // namespace ddp::backends::shm
