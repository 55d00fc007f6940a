// Nested values ("trees"): what they are made of, and one way to visit their parts. Outputs of a
// forward, arguments that move to a device, and gather (ddp/gather/gather.h) use it.
//
//   struct Cameras { at::Tensor rotation; std::vector<std::string> names; };
//   constexpr auto FieldsOf(const Cameras&) {
//     return ddp::Fields(ddp::Field("rotation", &Cameras::rotation),
//                        ddp::Field("names", &Cameras::names));
//   }
//   std::vector<at::Tensor> tensors;
//   ddp::CollectTensors(cameras, tensors);  // any tree: std::map<std::string, Cameras>, …
//
// Leaves: at::Tensor; numbers (bool, integers, float, double, complex, Half, BFloat16, enums);
// std::string; bytes (std::vector of uint8_t or std::byte); none (std::monostate, std::nullopt_t).
// Inner nodes: std::vector, array, pair, tuple, optional, variant, map and unordered_map of trees;
// c10::IValue; a struct with a function FieldsOf, which is in the struct's namespace and lists all
// members that belong to the value. A struct may contain vectors of itself. A class derived from a
// struct with FieldsOf is a tree only if it has its own FieldsOf.
//
// Functions are thread-safe for different values.
#pragma once

#include <complex>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/ivalue.h"
#include "ATen/core/jit_type.h"
#include "c10/core/Device.h"
#include "ddp/tree/kind.h"
#include "ddp/tree/path.h"

namespace ddp {

// An inner node, as a visitor's Enter sees it.
struct TreeNode {
  TreeKind kind;
  // Sequence or map: its size. Members (array, pair, tuple, struct): their number. Optional: 0
  // or 1. Variant: the index, or SIZE_MAX if it is valueless.
  size_t count;
};

namespace tree_internal {

template <typename Visitor>
concept TensorsOnly = std::remove_cvref_t<Visitor>::kTensorsOnly;

template <typename Visitor, typename T>
constexpr bool Skips() {
  if constexpr (TensorsOnly<Visitor>) {
    return !AnyPart<CanBeTensor, T>() && !AnyPart<IsUnknown, T>();
  } else {
    return false;
  }
}

template <typename Visitor>
void Enter(Visitor& visitor, TreeKind kind, size_t count, const TreePath& path) {
  if constexpr (requires { visitor.Enter(TreeNode{kind, count}, path); }) {
    visitor.Enter(TreeNode{kind, count}, path);
  }
}

// `call(member, step)` for each member of an array, pair, tuple or struct. `member` is a function
// from such a value to its member, so that several values can be traversed in parallel.
template <typename T, typename Call>
void ForEachMember(const T& value, Call&& call) {
  if constexpr (kIsArray<T>) {
    for (size_t i = 0; i < value.size(); ++i) {
      call(
          [i](auto& whole) -> auto& { return whole[i]; }, TreeStep{.index = i});
    }
  } else if constexpr (HasFields<T>) {
    std::apply(
        [&](const auto&... field) {
          (call(
               [&field](auto& whole) -> auto& { return whole.*field.member; },
               TreeStep{.name = field.name}),
           ...);
        },
        FieldsOf(value));
  } else {
    [&]<size_t... I>(std::index_sequence<I...>) {
      (call(
           [](auto& whole) -> auto& { return std::get<I>(whole); }, TreeStep{.index = I}),
       ...);
    }
    (std::make_index_sequence<std::tuple_size_v<T>>());
  }
}

template <typename T>
constexpr bool IsVectorOfNumbers() {
  if constexpr (kIsVector<T>) {
    return TreeNumber<typename T::value_type>;
  } else {
    return false;
  }
}

template <typename T>
constexpr size_t NumMembers() {
  if constexpr (HasFields<T>) {
    return std::tuple_size_v<decltype(FieldsOf(std::declval<const T&>()))>;
  } else {
    return std::tuple_size_v<T>;
  }
}

inline TreePath OfIValueKey(const TreePath& path, const c10::IValue& key) {
  return key.isString() ? TreePath::OfKey(path, key.toStringRef())
         : key.isInt()  ? TreePath::OfKey(path, key.toInt())
                        : TreePath::OfKey(path, key);
}

// Null for a tuple without names. The type of such a tuple is inferred from its elements, which
// throws for an undefined tensor; and it has their devices, which may change.
inline c10::TupleTypePtr NamedType(const c10::ivalue::Tuple& tuple) {
  try {
    c10::TupleTypePtr type = tuple.type();
    return type->schema() ? type : nullptr;
  } catch (const c10::Error&) {
    return nullptr;
  }
}

// Whether a value of this type may be a tensor, or hold one. The keys of dicts do not count.
inline bool MayHoldTensors(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::IntType:
    case c10::TypeKind::FloatType:
    case c10::TypeKind::NumberType:
    case c10::TypeKind::ComplexType:
    case c10::TypeKind::BoolType:
    case c10::TypeKind::StringType:
    case c10::TypeKind::NoneType:
    case c10::TypeKind::DeviceObjType:
      return false;
    case c10::TypeKind::OptionalType:
    case c10::TypeKind::ListType:
      return MayHoldTensors(*type.containedTypes()[0]);
    case c10::TypeKind::DictType:
      return MayHoldTensors(*type.containedTypes()[1]);
    default:
      return true;
  }
}

// Visits an IValue, for visitors without `Dynamic`. A changed value gets new lists, tuples and
// dicts, since IValues share them.
template <typename Value, typename Visitor>
void VisitIValue(Value& value, Visitor& visitor, const TreePath& path);

}  // namespace tree_internal

// Calls visitor(leaf, path) for each leaf of a tree, in order: members as listed, vectors by index,
// maps in their own order. With a mutable `value` the visitor may change leaves. An optional and a
// variant add nothing to the path.
//
// An IValue's leaves are at::Tensor, int64_t, double, c10::complex<double>, bool, std::string and
// std::monostate; the keys of its dicts are not visited.
//
// Optional members of a visitor, in addition to operator():
//   static constexpr bool kTensorsOnly = true;   leaves out parts whose type holds no tensor
//   void Enter(TreeNode, const TreePath&);       before the children of an inner node
//   void Key(const K& key, const TreePath&);     before the value of each entry of a map
//   void Numbers(const std::vector<N>&, const TreePath&);  all of a vector of numbers at once
//   void Dynamic(c10::IValue&, const TreePath&); an IValue as a whole (const, if the tree is)
//   void Other(T& part, const TreePath&);        parts that are not trees, and IValues of any other
//                                                type. Without it the former do not compile, and
//                                                the latter are left out.
template <typename Value, typename Visitor>
void VisitTree(Value& value, Visitor&& visitor, const TreePath& path = TreePath()) {
  using T = std::remove_cv_t<Value>;
  constexpr TreeKind kKind = KindOf<T>();
  namespace internal = tree_internal;
  if constexpr (internal::Skips<Visitor, T>()) {
    return;
  } else if constexpr (kKind == TreeKind::kNotATree) {
    if constexpr (requires { visitor.Other(value, path); }) {
      visitor.Other(value, path);
    } else {
      static_assert(internal::kNever<T>,
                    "this type is not a tree of values: give it a function FieldsOf in its "
                    "namespace (see ddp/tree/tree.h), or use a type that is one");
    }
  } else if constexpr (IsLeaf(kKind)) {
    visitor(value, path);
  } else if constexpr (kKind == TreeKind::kIValue) {
    if constexpr (requires { visitor.Dynamic(value, path); }) {
      visitor.Dynamic(value, path);
    } else {
      internal::VisitIValue(value, visitor, path);
    }
  } else if constexpr (kKind == TreeKind::kSequence) {
    using Element = typename T::value_type;
    if constexpr (requires { visitor.Numbers(value, path); } && internal::IsVectorOfNumbers<T>()) {
      visitor.Numbers(value, path);
    } else {
      internal::Enter(visitor, kKind, value.size(), path);
      for (size_t i = 0; i < value.size(); ++i) {
        const TreePath child(path, TreeStep{.index = i});
        if constexpr (std::is_same_v<Element, bool>) {
          std::conditional_t<std::is_const_v<Value>, const bool, bool> element = value[i];
          VisitTree(element, visitor, child);
          if constexpr (!std::is_const_v<Value>) value[i] = element;
        } else {
          VisitTree(value[i], visitor, child);
        }
      }
    }
  } else if constexpr (kKind == TreeKind::kMembers) {
    internal::Enter(visitor, kKind, internal::NumMembers<T>(), path);
    internal::ForEachMember(value, [&](const auto& member, TreeStep step) {
      VisitTree(member(value), visitor, TreePath(path, step));
    });
  } else if constexpr (kKind == TreeKind::kMap) {
    internal::Enter(visitor, kKind, value.size(), path);
    for (auto& [key, mapped] : value) {
      const TreePath child = TreePath::OfKey(path, key);
      if constexpr (requires { visitor.Key(key, child); }) visitor.Key(key, child);
      VisitTree(mapped, visitor, child);
    }
  } else if constexpr (kKind == TreeKind::kOptional) {
    internal::Enter(visitor, kKind, value.has_value() ? 1 : 0, path);
    if (value.has_value()) VisitTree(*value, visitor, path);
  } else {
    static_assert(kKind == TreeKind::kVariant);
    internal::Enter(visitor, kKind, value.index(), path);
    if (value.valueless_by_exception()) return;
    std::visit([&](auto& held) { VisitTree(held, visitor, path); }, value);
  }
}

namespace tree_internal {

template <typename Value, typename Visitor>
void VisitIValueLeaf(Value& value, Visitor& visitor, const TreePath& path) {
  const auto visit = [&](auto leaf) {
    if constexpr (std::is_const_v<Value>) {
      visitor(std::as_const(leaf), path);
    } else {
      visitor(leaf, path);
      if constexpr (std::is_same_v<decltype(leaf), std::monostate>) {
        value = c10::IValue();
      } else {
        value = c10::IValue(std::move(leaf));
      }
    }
  };
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if constexpr (TensorsOnly<Visitor>) {
    return;
  } else if (value.isInt()) {
    visit(value.toInt());
  } else if (value.isDouble()) {
    visit(value.toDouble());
  } else if (value.isBool()) {
    visit(value.toBool());
  } else if (value.isString()) {
    visit(value.toStringRef());
  } else if (value.isNone()) {
    visit(std::monostate());
  } else if (value.isComplexDouble()) {
    visit(value.toComplexDouble());
  } else if constexpr (requires { visitor.Other(value, path); }) {
    visitor.Other(value, path);
  }
}

template <typename Value, typename Visitor>
void VisitIValue(Value& value, Visitor& visitor, const TreePath& path) {
  constexpr bool kConst = std::is_const_v<Value>;
  // Visits a child; returns it, changed if the tree is mutable.
  const auto visit = [&](const c10::IValue& child, const TreePath& child_path) {
    if constexpr (kConst) {
      VisitTree(child, visitor, child_path);
      return &child;
    } else {
      c10::IValue changed = child;
      VisitTree(changed, visitor, child_path);
      return changed;
    }
  };
  if (value.isList()) {
    const c10::List<c10::IValue> list = value.toList();
    if (TensorsOnly<Visitor> && !MayHoldTensors(*list.elementType())) return;
    Enter(visitor, TreeKind::kSequence, list.size(), path);
    std::optional<c10::impl::GenericList> changed;
    if constexpr (!kConst) changed.emplace(list.elementType());
    for (size_t i = 0; i < list.size(); ++i) {
      const auto child = visit(list.get(i), TreePath(path, TreeStep{.index = i}));
      if constexpr (!kConst) changed->push_back(child);
    }
    if constexpr (!kConst) value = *changed;
  } else if (value.isTuple()) {
    const auto tuple = value.toTuple();
    Enter(visitor, TreeKind::kMembers, tuple->size(), path);
    std::vector<c10::IValue> changed;
    for (size_t i = 0; i < tuple->size(); ++i) {
      const auto child = visit(tuple->elements()[i], TreePath(path, TreeStep{.index = i}));
      if constexpr (!kConst) changed.push_back(child);
    }
    if constexpr (!kConst) {
      const c10::TupleTypePtr named = NamedType(*tuple);
      value = named ? c10::ivalue::Tuple::createNamed(std::move(changed), named)
                    : c10::ivalue::Tuple::create(std::move(changed));
    }
  } else if (value.isGenericDict()) {
    const auto dict = value.toGenericDict();
    if (TensorsOnly<Visitor> && !MayHoldTensors(*dict.valueType())) return;
    Enter(visitor, TreeKind::kMap, dict.size(), path);
    std::optional<c10::impl::GenericDict> changed;
    if constexpr (!kConst) changed.emplace(dict.keyType(), dict.valueType());
    for (const auto& entry : dict) {
      const auto child = visit(entry.value(), OfIValueKey(path, entry.key()));
      if constexpr (!kConst) changed->insert(entry.key(), child);
    }
    if constexpr (!kConst) value = *changed;
  } else {
    VisitIValueLeaf(value, visitor, path);
  }
}

struct TensorCollector {
  static constexpr bool kTensorsOnly = true;
  void operator()(const at::Tensor& tensor, const TreePath&) const {
    if (tensor.defined()) tensors.push_back(tensor);
  }
  std::vector<at::Tensor>& tensors;
};

struct DeviceMover {
  static constexpr bool kTensorsOnly = true;
  void operator()(at::Tensor& tensor, const TreePath&) const {
    if (tensor.defined()) tensor = tensor.to(device, /*non_blocking=*/true);
  }
  template <typename T>
  void Other(T&, const TreePath&) const {}
  c10::Device device;
};

}  // namespace tree_internal

// Appends all defined tensors of `tree`, in the order of VisitTree.
template <typename T>
void CollectTensors(const T& tree, std::vector<at::Tensor>& tensors) {
  VisitTree(tree, tree_internal::TensorCollector{tensors});
}

// Moves the tensors of `tree` to `device`, in place and with non-blocking copies. Parts that are
// not trees do not change.
template <typename T>
void MoveToDevice(T& tree, c10::Device device) {
  VisitTree(tree, tree_internal::DeviceMover{device});
}

}  // namespace ddp
