// A data set that gives single examples, which are collated into batches.
//
//   struct Views : ddp::data::ExampleDatasetOf<std::pair<at::Tensor, int64_t>> {
//     int64_t size() const override { return 100; }
//     std::pair<at::Tensor, int64_t> Get(int64_t index) const override { … }
//   };  // batches: std::pair<at::Tensor, at::Tensor>, of images [n, …] and int64 labels [n]
//
// RandomExampleDatasetOf, with Get(index, random), is one whose examples depend on random numbers.
//
// Collation, type by type (PyTorch's default_collate, with its rules):
//   at::Tensor                    stacked along a new dimension 0; undefined in all or in none
//   number, bool, enum            at::Tensor [n] of its dtype; an enum's is that of its number
//   std::string, bytes            std::vector of them
//   pair, tuple, array, vector    element by element; vectors of one length
//   map, unordered_map            value by value; the same keys
//   optional                      set in all or in none
//   a struct with FieldsOf        itself, if each member collates into its own type: tensors, and
//                                 arrays, vectors, optionals, maps and structs of them
// For other types, and for tensors of unequal shapes, the data set names its type of batch and
// overrides Collate:
//
//   struct Sentences : ddp::data::ExampleDatasetOf<at::Tensor, Padded> {
//     Padded Collate(std::vector<at::Tensor> examples,
//                    absl::Span<const int64_t> indices) const override { … }
//   };
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/stack.h"
#include "absl/types/span.h"
#include "c10/util/Exception.h"
#include "ddp/data/dataset.h"
#include "ddp/tree/tree.h"

namespace ddp::data {

namespace collate_internal {

// The type into which examples of type E are collated; void: there is none.
template <typename E>
struct Collated {
  using Type = void;
};

template <typename E>
using TypeOf = typename Collated<E>::Type;
template <typename E>
inline constexpr bool kCollates = !std::is_void_v<TypeOf<E>>;

template <>
struct Collated<at::Tensor> {
  using Type = at::Tensor;
};
template <TreeNumber N>
struct Collated<N> {
  using Type = at::Tensor;
};
template <>
struct Collated<std::string> {
  using Type = std::vector<std::string>;
};
template <typename E>
requires tree_internal::kIsBytes<E>
struct Collated<E> {
  using Type = std::vector<E>;
};
// Elements of std::vector<bool> cannot be pointed to.
template <typename E>
requires(kCollates<E> && !std::is_same_v<E, bool> &&
         !tree_internal::kIsBytes<std::vector<E>>) struct Collated<std::vector<E>> {
  using Type = std::vector<TypeOf<E>>;
};
template <typename E, size_t N>
requires kCollates<E>
struct Collated<std::array<E, N>> {
  using Type = std::array<TypeOf<E>, N>;
};
template <typename A, typename B>
requires(kCollates<A>&& kCollates<B>) struct Collated<std::pair<A, B>> {
  using Type = std::pair<TypeOf<A>, TypeOf<B>>;
};
template <typename... E>
requires(kCollates<E>&&...) struct Collated<std::tuple<E...>> {
  using Type = std::tuple<TypeOf<E>...>;
};
template <typename E>
requires kCollates<E>
struct Collated<std::optional<E>> {
  using Type = std::optional<TypeOf<E>>;
};
template <typename K, typename E, typename Less>
requires kCollates<E>
struct Collated<std::map<K, E, Less>> {
  using Type = std::map<K, TypeOf<E>, Less>;
};
template <typename K, typename E, typename Hash, typename Equal>
requires kCollates<E>
struct Collated<std::unordered_map<K, E, Hash, Equal>> {
  using Type = std::unordered_map<K, TypeOf<E>, Hash, Equal>;
};

template <typename... T>
constexpr bool AllCollateIntoThemselves(tree_internal::TypeList<T...>) {
  return (std::is_same_v<TypeOf<T>, T> && ...);
}
template <tree_internal::HasFields S>
struct Collated<S> {
  using Type =
      std::conditional_t<AllCollateIntoThemselves(typename tree_internal::Parts<S>::Types()), S,
                         void>;
};

template <typename N>
constexpr c10::ScalarType DtypeOf() {
  if constexpr (std::is_enum_v<N>) {
    return DtypeOf<std::underlying_type_t<N>>();
  } else if constexpr (std::is_same_v<N, bool>) {
    return at::kBool;
  } else if constexpr (std::is_integral_v<N>) {
    return sizeof(N) == 8        ? at::kLong
           : sizeof(N) == 4      ? at::kInt
           : sizeof(N) == 2      ? at::kShort
           : std::is_signed_v<N> ? at::kChar
                                 : at::kByte;
  } else if constexpr (std::is_same_v<N, std::complex<float>>) {
    return at::kComplexFloat;
  } else if constexpr (std::is_same_v<N, std::complex<double>>) {
    return at::kComplexDouble;
  } else {
    return c10::CppTypeToScalarType<N>::value;
  }
}

class Collator {
 public:
  explicit Collator(absl::Span<const int64_t> indices) : indices_(indices) {}

  template <typename E>
  void Run(const std::vector<E*>& examples, TypeOf<E>& batch, const TreePath& path) const {
    constexpr TreeKind kKind = KindOf<E>();
    const size_t n = examples.size();
    if constexpr (kKind == TreeKind::kTensor) {
      batch = Stack(examples, path);
    } else if constexpr (kKind == TreeKind::kNumber) {
      batch = at::empty({static_cast<int64_t>(n)}, DtypeOf<E>());
      auto* to = static_cast<E*>(batch.mutable_data_ptr());
      for (size_t i = 0; i < n; ++i) to[i] = *examples[i];
    } else if constexpr (kKind == TreeKind::kString || kKind == TreeKind::kBytes) {
      batch.reserve(n);
      for (E* example : examples) batch.push_back(std::move(*example));
    } else if constexpr (kKind == TreeKind::kSequence) {
      for (size_t i = 1; i < n; ++i) {
        RequireSame(examples[0]->size(), examples[i]->size(), "elements", i, path);
      }
      batch.resize(examples[0]->size());
      for (size_t k = 0; k < batch.size(); ++k) {
        Run(Through(
                examples, [k](E & example) -> auto& { return example[k]; }),
            batch[k], TreePath(path, TreeStep{.index = k}));
      }
    } else if constexpr (kKind == TreeKind::kMembers) {
      tree_internal::ForEachMember(*examples[0], [&](const auto& member, TreeStep step) {
        Run(Through(examples, member), member(batch), TreePath(path, step));
      });
    } else if constexpr (kKind == TreeKind::kMap) {
      for (size_t i = 1; i < n; ++i) {
        RequireSame(examples[0]->size(), examples[i]->size(), "keys", i, path);
      }
      for (auto& [key, unused] : *examples[0]) {
        const TreePath child = TreePath::OfKey(path, key);
        for (size_t i = 1; i < n; ++i) {
          if (!examples[i]->contains(key)) Differ("is set", "is not set", i, child);
        }
        Run(Through(
                examples, [&key = key](E & example) -> auto& { return example.at(key); }),
            batch[key], child);
      }
    } else {
      static_assert(kKind == TreeKind::kOptional);
      for (size_t i = 1; i < n; ++i) {
        if (examples[i]->has_value() == examples[0]->has_value()) continue;
        Differ(examples[0]->has_value() ? "has a value" : "has no value",
               examples[i]->has_value() ? "has one" : "has none", i, path);
      }
      if (!examples[0]->has_value()) return;
      Run(Through(
              examples, [](E & example) -> auto& { return *example; }),
          batch.emplace(), path);
    }
  }

 private:
  // `examples` seen through `of`.
  template <typename E, typename Of>
  static auto Through(const std::vector<E*>& examples, Of&& of) {
    std::vector<std::remove_reference_t<decltype(of(*examples[0]))>*> seen;
    seen.reserve(examples.size());
    for (E* example : examples) seen.push_back(&of(*example));
    return seen;
  }

  at::Tensor Stack(const std::vector<at::Tensor*>& examples, const TreePath& path) const;
  void RequireSame(size_t first, size_t other, const char* what, size_t i,
                   const TreePath& path) const {
    if (first == other) return;
    Differ("has " + std::to_string(first) + " " + what, "has " + std::to_string(other), i, path);
  }
  [[noreturn]] void Differ(const std::string& first, const std::string& other, size_t i,
                           const TreePath& path) const {
    TORCH_CHECK(false, "the examples of a batch do not fit together: '", path.Text("example"), "' ",
                first, " in example ", Number(0), ", but ", other, " in example ", Number(i),
                ": give examples of one form, or override Collate of the data set "
                "(ddp/data/example_dataset.h)");
  }
  int64_t Number(size_t i) const {
    return i < indices_.size() ? indices_[i] : static_cast<int64_t>(i);
  }

  const absl::Span<const int64_t> indices_;
};

inline at::Tensor Collator::Stack(const std::vector<at::Tensor*>& examples,
                                  const TreePath& path) const {
  const at::Tensor& first = *examples[0];
  std::vector<at::Tensor> tensors;
  tensors.reserve(examples.size());
  for (size_t i = 0; i < examples.size(); ++i) {
    const at::Tensor& tensor = *examples[i];
    if (tensor.defined() != first.defined()) {
      Differ(first.defined() ? "is defined" : "is undefined",
             tensor.defined() ? "defined" : "undefined", i, path);
    }
    if (!tensor.defined()) continue;
    if (tensor.sizes() != first.sizes()) {
      Differ("has shape " + c10::str(first.sizes()), c10::str(tensor.sizes()), i, path);
    }
    if (tensor.scalar_type() != first.scalar_type()) {
      Differ("has dtype " + std::string(c10::toString(first.scalar_type())),
             c10::toString(tensor.scalar_type()), i, path);
    }
    tensors.push_back(tensor);
  }
  return tensors.empty() ? at::Tensor() : at::stack(tensors);
}

}  // namespace collate_internal

// The batch into which examples of type E are collated; void if they are not.
template <typename E>
using CollatedType = collate_internal::TypeOf<E>;

// The batch of `examples`, of which there is at least one. `indices`: their numbers in the data
// set, for messages; empty: their places in the batch. Throws c10::Error, with the path of the part
// and two examples, if they do not fit together.
template <Tree E>
CollatedType<E> Collate(std::vector<E> examples, absl::Span<const int64_t> indices = {}) {
  static_assert(collate_internal::kCollates<E>,
                "examples of this type have no default batch (ddp/data/example_dataset.h): name "
                "the type of batch, ExampleDatasetOf<E, B>, and write Collate");
  TORCH_CHECK(!examples.empty(), "Collate: there are no examples");
  std::vector<E*> pointers;
  for (E& example : examples) pointers.push_back(&example);
  CollatedType<E> batch{};
  collate_internal::Collator(indices).Run(pointers, batch, TreePath());
  return batch;
}

namespace collate_internal {

// Without a default, Collate must be overridden.
template <typename E, typename B, bool kHasDefault = std::is_same_v<B, CollatedType<E>>>
class CollatesInto : public AnyDataset {
 public:
  virtual B Collate(std::vector<E> examples, absl::Span<const int64_t> indices) const = 0;
};

template <typename E, typename B>
class CollatesInto<E, B, true> : public AnyDataset {
 public:
  virtual B Collate(std::vector<E> examples, absl::Span<const int64_t> indices) const {
    return data::Collate(std::move(examples), indices);
  }
};

}  // namespace collate_internal

// Its member Collate makes the batch of `examples`, whose numbers are `indices`; it is pure if B is
// not CollatedType<E>. Get and Collate must be thread-safe.
template <Tree E, typename B = CollatedType<E>>
class ExampleDatasetOf : public collate_internal::CollatesInto<E, B> {
  static_assert(!std::is_void_v<B>,
                "examples of this type have no default batch (ddp/data/example_dataset.h): name "
                "the type of batch, ExampleDatasetOf<E, B>, and write Collate");

 public:
  // Example `index` in [0, size()). May throw: the loader then returns an error.
  virtual E Get(int64_t index) const = 0;

  AnyBatch GetAny(absl::Span<const int64_t> indices, absl::Span<Random> = {}) const final {
    std::vector<E> examples;
    examples.reserve(indices.size());
    for (const int64_t index : indices) examples.push_back(Get(index));
    return AnyBatch(this->Collate(std::move(examples), indices));
  }
};

// The same with random numbers: those of the example at its place in the epoch (random.h).
template <Tree E, typename B = CollatedType<E>>
class RandomExampleDatasetOf : public collate_internal::CollatesInto<E, B> {
  static_assert(!std::is_void_v<B>,
                "examples of this type have no default batch (ddp/data/example_dataset.h): name "
                "the type of batch, RandomExampleDatasetOf<E, B>, and write Collate");

 public:
  virtual E Get(int64_t index, Random& random) const = 0;

  AnyBatch GetAny(absl::Span<const int64_t> indices, absl::Span<Random> random = {}) const final {
    RequireRandom(indices, random);
    std::vector<E> examples;
    examples.reserve(indices.size());
    for (size_t i = 0; i < indices.size(); ++i) examples.push_back(Get(indices[i], random[i]));
    return AnyBatch(this->Collate(std::move(examples), indices));
  }
};

}  // namespace ddp::data
