// Reads nested values from bytes (ddp/tree/format.h). Users call DecodeTree (ddp/tree/codec.h).
//
//   TreeDecoder decoder(encoded);
//   decoder.Read(cameras, TreePath());
//   DDP_RETURN_IF_ERROR(decoder.Finish());
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "ddp/tree/format.h"
#include "ddp/tree/tree.h"

namespace ddp {

// Reads the nodes of a tree one by one. After an error all reads do nothing. Thread-compatible.
class TreeDecoder {
 public:
  // `encoded` must outlive the decoder.
  explicit TreeDecoder(const EncodedTree& encoded);

  template <typename T>
  void Read(T& value, const TreePath& path);

  bool ok() const { return status_.ok(); }
  // InvalidArgument if the bytes are malformed or of another type. Call it last.
  absl::Status Finish();

 private:
  // The next node must have this tag.
  bool Expect(uint8_t tag, const TreePath& path);
  // Reads a number of children, each of which needs a byte at least. It must be `expected`, unless
  // that is negative.
  size_t Count(uint8_t tag, const TreePath& path, int64_t expected = -1);
  uint64_t Varint(const TreePath& path);
  bool Bytes(void* to, size_t size, const TreePath& path);
  void Tensor(at::Tensor& tensor, const TreePath& path);
  void Number(NumberType type, void* number, const TreePath& path);
  // Calls `resize(n)`, which returns where the bytes go.
  void NumberArray(NumberType type, absl::FunctionRef<void*(size_t)> resize, const TreePath& path);
  void Text(uint8_t tag, absl::FunctionRef<void*(size_t)> resize, const TreePath& path);
  bool OptionalHasValue(const TreePath& path);
  c10::IValue Dynamic(const TreePath& path);
  c10::TypePtr DynamicType(const TreePath& path, int depth);
  c10::TypePtr KeyType(const TreePath& path, int depth);
  void Fail(const TreePath& path, std::string_view problem);
  bool CheckDepth(const TreePath& path);

  template <size_t I, typename V>
  void ReadAlternative(size_t index, V& variant, const TreePath& path);

  absl::Status status_;
  std::string_view nodes_;
  const at::Tensor& host_;
  const at::Tensor& device_;
  size_t host_offset_ = 0, device_offset_ = 0;
};

template <size_t I, typename V>
void TreeDecoder::ReadAlternative(size_t index, V& variant, const TreePath& path) {
  if constexpr (I < std::variant_size_v<V>) {
    if (index == I) {
      Read(variant.template emplace<I>(), path);
    } else {
      ReadAlternative<I + 1>(index, variant, path);
    }
  } else {
    Fail(path, "is not an alternative of the variant");
  }
}

template <typename T>
void TreeDecoder::Read(T& value, const TreePath& path) {
  namespace internal = tree_internal;
  constexpr TreeKind kKind = KindOf<T>();
  if (!ok()) return;
  // The encoder does the same: leaves and vectors of numbers have no nested values.
  if constexpr (!IsLeaf(kKind) && !internal::IsVectorOfNumbers<T>()) {
    if (!CheckDepth(path)) return;
  }
  if constexpr (kKind == TreeKind::kTensor) {
    Tensor(value, path);
  } else if constexpr (kKind == TreeKind::kNumber) {
    Number(NumberTypeOf<T>(), &value, path);
  } else if constexpr (kKind == TreeKind::kString) {
    static_assert(std::is_same_v<T, std::string>, "only a std::string can be decoded: it owns");
    Text(
        internal::kTagString, [&](size_t n) { return value.resize(n), value.data(); }, path);
  } else if constexpr (kKind == TreeKind::kBytes) {
    Text(
        internal::kTagBytes, [&](size_t n) { return value.resize(n), value.data(); }, path);
  } else if constexpr (kKind == TreeKind::kNone) {
    Expect(internal::kTagNone, path);
  } else if constexpr (kKind == TreeKind::kSequence) {
    using Element = typename T::value_type;
    value.clear();
    if constexpr (std::is_same_v<Element, bool>) {
      std::vector<uint8_t> bytes;
      NumberArray(
          NumberTypeOf<bool>(), [&](size_t n) { return bytes.resize(n), bytes.data(); }, path);
      value.assign(bytes.begin(), bytes.end());
    } else if constexpr (TreeNumber<Element>) {
      NumberArray(
          NumberTypeOf<Element>(), [&](size_t n) { return value.resize(n), value.data(); }, path);
    } else {
      // Nothing is reserved: a hostile count must not cost more memory than there are bytes.
      const size_t count = Count(internal::kTagSequence, path);
      for (size_t i = 0; i < count && ok(); ++i) {
        Read(value.emplace_back(), TreePath(path, TreeStep{.index = i}));
      }
    }
  } else if constexpr (kKind == TreeKind::kMembers) {
    Count(internal::kTagMembers, path, internal::NumMembers<T>());
    internal::ForEachMember(value, [&](const auto& member, TreeStep step) {
      Read(member(value), TreePath(path, step));
    });
  } else if constexpr (kKind == TreeKind::kMap) {
    value.clear();
    const size_t count = Count(internal::kTagMap, path);
    for (size_t i = 0; i < count && ok(); ++i) {
      typename T::key_type key{};
      Read(key, path);
      if (!ok()) return;
      const auto [entry, added] = value.try_emplace(std::move(key));
      const TreePath child = TreePath::OfKey(path, entry->first);
      if (!added) return Fail(child, "is there twice");
      Read(entry->second, child);
    }
  } else if constexpr (kKind == TreeKind::kOptional) {
    value.reset();
    if (OptionalHasValue(path)) Read(value.emplace(), path);
  } else if constexpr (kKind == TreeKind::kVariant) {
    if (Expect(internal::kTagVariant, path)) ReadAlternative<0>(Varint(path), value, path);
  } else if constexpr (kKind == TreeKind::kIValue) {
    value = Dynamic(path);
  } else {
    static_assert(internal::kNever<T>,
                  "this type is not a tree of values: give it a function FieldsOf in its "
                  "namespace (see ddp/tree/tree.h), or use a type that is one");
  }
}

}  // namespace ddp
