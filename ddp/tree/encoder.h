// Writes nested values as bytes (ddp/tree/format.h). Users call EncodeTree (ddp/tree/codec.h).
//
//   TreeEncoder encoder(c10::DeviceType::CPU);
//   VisitTree(value, encoder);
//   DDP_ASSIGN_OR_RETURN(EncodedTree encoded, encoder.Finish());
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "c10/core/DeviceType.h"
#include "ddp/tree/format.h"
#include "ddp/tree/tree.h"

namespace ddp {

// A visitor that encodes what it is given. The first error is kept and ends the rest.
// Thread-compatible.
class TreeEncoder {
 public:
  // Tensors on a device of type `direct` go into `device`, all others into `host`.
  explicit TreeEncoder(c10::DeviceType direct) : direct_(direct) {}

  void operator()(const at::Tensor& tensor, const TreePath& path);
  template <TreeNumber T>
  void operator()(const T& number, const TreePath&) {
    Number(NumberTypeOf<T>(), &number);
  }
  void operator()(std::string_view text, const TreePath&);
  void operator()(const std::vector<uint8_t>& bytes, const TreePath&);
  void operator()(const std::vector<std::byte>& bytes, const TreePath&);
  void operator()(std::monostate, const TreePath&);
  void operator()(std::nullopt_t, const TreePath&);
  void Enter(TreeNode node, const TreePath& path);
  template <typename K>
  void Key(const K& key, const TreePath& path) {
    static_assert(!HoldsTensors<K>(), "keys of a map must not contain tensors");
    VisitTree(key, *this, path);
  }
  template <typename T, typename A>
  void Numbers(const std::vector<T, A>& numbers, const TreePath&) {
    if constexpr (std::is_same_v<T, bool>) {
      const std::vector<uint8_t> bytes(numbers.begin(), numbers.end());
      NumberArray(NumberTypeOf<bool>(), bytes.data(), bytes.size());
    } else {
      NumberArray(NumberTypeOf<T>(), numbers.data(), numbers.size());
    }
  }
  void Dynamic(const c10::IValue& value, const TreePath& path);

  // InvalidArgument, with a path, if something cannot be encoded. Call it once.
  absl::StatusOr<EncodedTree> Finish();

 private:
  void Number(NumberType type, const void* bytes);
  void NumberArray(NumberType type, const void* bytes, size_t count);
  void Text(uint8_t tag, const void* bytes, size_t size);
  void Varint(uint64_t value);
  void DynamicType(const c10::Type& type, const TreePath& path);
  bool CheckDepth(const TreePath& path);
  void Fail(const TreePath& path, std::string_view problem);

  c10::DeviceType direct_;
  absl::Status status_;
  std::string nodes_;
  std::vector<at::Tensor> host_, device_;  // contiguous
};

}  // namespace ddp
