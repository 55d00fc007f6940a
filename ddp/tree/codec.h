// Nested values (ddp/tree/tree.h) as bytes, and back into the same C++ type. No pickle: nothing in
// the bytes chooses a type or is executed. The format: ddp/tree/format.h.
//
//   DDP_ASSIGN_OR_RETURN(EncodedTree encoded, EncodeTree(cameras));
//   DDP_ASSIGN_OR_RETURN(Cameras copy, DecodeTree<Cameras>(encoded));
//
// A tensor arrives detached, contiguous and with storage of its own, on a device of the same type.
//
// Functions are thread-safe.
#pragma once

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/status.h"
#include "c10/core/DeviceType.h"
#include "ddp/tree/decoder.h"
#include "ddp/tree/encoder.h"
#include "ddp/tree/format.h"
#include "ddp/tree/tree.h"

namespace ddp {

// CatchStatus, compiled once per source file. Torch throws for a device that this process lacks,
// and when memory runs out.
inline absl::Status CatchTorch(const char* what, absl::FunctionRef<absl::Status()> call) {
  return CatchStatus(what, call);
}

// Tensors on a device of type `direct`, if that is not the CPU, are stored in EncodedTree::device
// and not copied to the host.
//
// InvalidArgument, with the path, for a leaf that cannot be encoded: a tensor that is sparse,
// quantized, on device meta or otherwise without plain memory; an IValue that is an object, a
// future, a named tuple or anything else the format lacks; a map key that holds a tensor is a
// compile error.
template <typename T>
absl::StatusOr<EncodedTree> EncodeTree(const T& tree,
                                       c10::DeviceType direct = c10::DeviceType::CPU) {
  absl::StatusOr<EncodedTree> result;
  absl::Status status = CatchTorch("encoding", [&] {
    TreeEncoder encoder(direct);
    VisitTree(tree, encoder);
    result = encoder.Finish();
    return result.status();
  });
  if (!status.ok()) return status;
  return result;
}

// The value whose type is T. T and the types it is made of are default-constructible.
// InvalidArgument, with a path, if `encoded` is malformed or was not made from a T: every length is
// checked before it is used. Text and enums are not checked.
template <typename T>
absl::StatusOr<T> DecodeTree(const EncodedTree& encoded) {
  T tree{};
  absl::Status status = CatchTorch("decoding", [&] {
    TreeDecoder decoder(encoded);
    decoder.Read(tree, TreePath());
    return decoder.Finish();
  });
  if (!status.ok()) return status;
  return tree;
}

}  // namespace ddp
