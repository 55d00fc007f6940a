// Decides at compile time which types are nested values, and how a struct becomes one. Part of
// ddp/tree/tree.h, which describes the types.
//
//   static_assert(Tree<std::map<std::string, std::vector<at::Tensor>>>);
//   static_assert(!HoldsTensors<std::vector<int>>());
#pragma once

#include <array>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/ivalue.h"

namespace ddp {

// One member of a struct. Made by Field.
template <typename S, typename T>
struct FieldSpec {
  std::string_view name;
  T S::*member;
};

template <typename S, typename T>
constexpr FieldSpec<S, T> Field(std::string_view name, T S::*member) {
  return {name, member};
}

// The result of FieldsOf.
template <typename... Specs>
constexpr std::tuple<Specs...> Fields(Specs... fields) {
  return {fields...};
}

enum class TreeKind {
  kTensor,
  kNumber,
  kString,
  kBytes,
  kNone,
  kSequence,  // std::vector, except of bytes
  kMembers,   // array, pair, tuple, struct with FieldsOf
  kOptional,
  kVariant,
  kMap,
  kIValue,
  kNotATree,
};

constexpr bool IsLeaf(TreeKind kind) { return kind <= TreeKind::kNone; }

namespace tree_internal {

template <typename>
inline constexpr bool kNever = false;

// Complex types with a torch dtype. std::complex<long double> is not portable.
template <typename T>
inline constexpr bool kIsComplex =
    std::is_same_v<T, std::complex<float>> || std::is_same_v<T, std::complex<double>> ||
    std::is_same_v<T, c10::complex<c10::Half>> || std::is_same_v<T, c10::complex<float>> ||
    std::is_same_v<T, c10::complex<double>>;

template <typename T>
inline constexpr bool kIsVector = false;
template <typename T, typename A>
inline constexpr bool kIsVector<std::vector<T, A>> = true;
template <typename A>
inline constexpr bool kIsBytes = false;
template <>
inline constexpr bool kIsBytes<std::vector<uint8_t>> = true;
template <>
inline constexpr bool kIsBytes<std::vector<std::byte>> = true;
template <typename T>
inline constexpr bool kIsArray = false;
template <typename T, size_t N>
inline constexpr bool kIsArray<std::array<T, N>> = true;
template <typename T>
inline constexpr bool kIsTuple = false;
template <typename... T>
inline constexpr bool kIsTuple<std::tuple<T...>> = true;
template <typename A, typename B>
inline constexpr bool kIsTuple<std::pair<A, B>> = true;
template <typename T>
inline constexpr bool kIsOptional = false;
template <typename T>
inline constexpr bool kIsOptional<std::optional<T>> = true;
template <typename T>
inline constexpr bool kIsVariant = false;
template <typename... T>
inline constexpr bool kIsVariant<std::variant<T...>> = true;
template <typename T>
inline constexpr bool kIsMap = false;
template <typename K, typename V, typename... Rest>
inline constexpr bool kIsMap<std::map<K, V, Rest...>> = true;
template <typename K, typename V, typename... Rest>
inline constexpr bool kIsMap<std::unordered_map<K, V, Rest...>> = true;

// Converts to T and to no base class of it: a FieldsOf of a base would lose the other members.
template <typename T>
struct Exactly {
  template <typename U>
  requires std::is_same_v<U, T>
  operator const U&() const;
};

template <typename T>
concept HasFields = std::is_class_v<T> && requires(const T& value, const Exactly<T>& exactly) {
  FieldsOf(value);
  FieldsOf(exactly);
};

}  // namespace tree_internal

// bool, integers, floating point, complex, enums. Not long double, whose format depends on the
// platform.
template <typename T>
concept TreeNumber = (std::is_arithmetic_v<T> && !std::is_same_v<T, long double>) ||
                     std::is_enum_v<T> || std::is_same_v<T, c10::Half> ||
                     std::is_same_v<T, c10::BFloat16> || tree_internal::kIsComplex<T>;

// Kind of the outermost level of T.
template <typename T>
constexpr TreeKind KindOf() {
  namespace internal = tree_internal;
  if constexpr (std::is_same_v<T, at::Tensor>) {
    return TreeKind::kTensor;
  } else if constexpr (TreeNumber<T>) {
    return TreeKind::kNumber;
  } else if constexpr (std::is_same_v<T, std::string> || std::is_same_v<T, std::string_view> ||
                       std::is_same_v<T, const char*>) {
    return TreeKind::kString;
  } else if constexpr (internal::kIsBytes<T>) {
    return TreeKind::kBytes;
  } else if constexpr (std::is_same_v<T, std::monostate> || std::is_same_v<T, std::nullopt_t>) {
    return TreeKind::kNone;
  } else if constexpr (internal::kIsVector<T>) {
    return TreeKind::kSequence;
  } else if constexpr (internal::kIsArray<T> || internal::kIsTuple<T> || internal::HasFields<T>) {
    return TreeKind::kMembers;
  } else if constexpr (internal::kIsOptional<T>) {
    return TreeKind::kOptional;
  } else if constexpr (internal::kIsVariant<T>) {
    return TreeKind::kVariant;
  } else if constexpr (internal::kIsMap<T>) {
    return TreeKind::kMap;
  } else if constexpr (std::is_same_v<T, c10::IValue>) {
    return TreeKind::kIValue;
  } else {
    return TreeKind::kNotATree;
  }
}

namespace tree_internal {

template <typename... T>
struct TypeList {};

// The types of which T is made, one level down. Those of FieldSpecs are the members'.
template <typename T>
struct Parts {
  using Types = TypeList<>;
};
template <typename T, typename A>
struct Parts<std::vector<T, A>> {
  using Types = TypeList<T>;
};
template <typename T, size_t N>
struct Parts<std::array<T, N>> {
  using Types = TypeList<T>;
};
template <typename T>
struct Parts<std::optional<T>> {
  using Types = TypeList<T>;
};
template <typename A, typename B>
struct Parts<std::pair<A, B>> {
  using Types = TypeList<A, B>;
};
template <typename... T>
struct Parts<std::tuple<T...>> {
  using Types = TypeList<T...>;
};
template <typename... T>
struct Parts<std::variant<T...>> {
  using Types = TypeList<T...>;
};
template <typename K, typename V, typename... Rest>
struct Parts<std::map<K, V, Rest...>> {
  using Types = TypeList<K, V>;
};
template <typename K, typename V, typename... Rest>
struct Parts<std::unordered_map<K, V, Rest...>> {
  using Types = TypeList<K, V>;
};
template <typename... S, typename... T>
TypeList<T...> MemberTypes(const std::tuple<FieldSpec<S, T>...>&);
template <HasFields T>
struct Parts<T> {
  using Types = decltype(MemberTypes(FieldsOf(std::declval<const T&>())));
};

// A struct counts as a tree whatever its members are: it may contain itself, and a member that is
// no tree is the compile error of VisitTree, not a struct that is silently passed over.
template <typename... T>
constexpr bool AreTrees(TypeList<T...>);
template <typename T>
constexpr bool IsTree() {
  if constexpr (KindOf<T>() == TreeKind::kNotATree) {
    return false;
  } else if constexpr (HasFields<T>) {
    return true;
  } else {
    return AreTrees(typename Parts<T>::Types());
  }
}
template <typename... T>
constexpr bool AreTrees(TypeList<T...>) {
  return (IsTree<T>() && ...);
}

// Whether `Test<X>` is true for a type X that T is made of. `Seen` are the types that contain this
// one: they add nothing a second time.
template <template <typename> typename Test, typename... Seen, typename... T>
constexpr bool AnyOfParts(TypeList<T...>);
template <template <typename> typename Test, typename T, typename... Seen>
constexpr bool AnyPart() {
  if constexpr (Test<T>::value) {
    return true;
  } else if constexpr ((std::is_same_v<T, Seen> || ...)) {
    return false;
  } else {
    return AnyOfParts<Test, T, Seen...>(typename Parts<T>::Types());
  }
}
template <template <typename> typename Test, typename... Seen, typename... T>
constexpr bool AnyOfParts(TypeList<T...>) {
  return (AnyPart<Test, T, Seen...>() || ...);
}

template <typename T>
using CanBeTensor =
    std::bool_constant<std::is_same_v<T, at::Tensor> || std::is_same_v<T, c10::IValue>>;
template <typename T>
using IsUnknown = std::bool_constant<KindOf<T>() == TreeKind::kNotATree>;

}  // namespace tree_internal

template <typename T>
concept Tree = tree_internal::IsTree<T>();

// Whether a part of the type can be a tensor. Parts that are not trees hold none.
template <typename T>
constexpr bool HoldsTensors() {
  return tree_internal::AnyPart<tree_internal::CanBeTensor, T>();
}

}  // namespace ddp
