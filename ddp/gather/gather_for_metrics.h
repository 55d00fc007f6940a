// The examples that the ranks have evaluated, as one value in dataset order, each example once.
//
//   struct Predictions { at::Tensor logits; std::vector<std::string> names; };  // with a FieldsOf
//   std::vector<int64_t> indices = sampler.Indices();      // of this rank's examples, in its order
//   Predictions mine = Evaluate(indices);                  // [n, 10] and n names
//   DDP_ASSIGN_OR_RETURN(Predictions all, GatherForMetrics(group, indices, mine));
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/status.h"
#include "c10/util/intrusive_ptr.h"
#include "ddp/gather/gather.h"
#include "ddp/tree/tree.h"

namespace ddp {

// Maps each example of the result to a rank and a row. Immutable; made from the ranks' indices.
class ExampleOrder {
 public:
  // InvalidArgument for a negative index.
  static absl::StatusOr<ExampleOrder> Create(std::vector<std::vector<int64_t>> indices_of_rank);

  struct Source {
    size_t part;  // position in ranks()
    int64_t row;
  };

  // The ranks that have examples, ascending, and how many each has.
  const std::vector<int>& ranks() const { return ranks_; }
  const std::vector<int64_t>& counts() const { return counts_; }
  // The result has one source per example. That of duplicates is the first one of the lowest rank.
  const std::vector<Source>& sources() const { return sources_; }

 private:
  std::vector<int> ranks_;
  std::vector<int64_t> counts_;
  std::vector<Source> sources_;
};

namespace gather_internal {

// Parts of several ranks, in the order of ExampleOrder::ranks(), become one.
class ExampleMerger {
 public:
  explicit ExampleMerger(const ExampleOrder& order) : order_(order) {}

  template <typename T>
  void Merge(const std::vector<T*>& parts, T& result, const TreePath& path);

  const absl::Status& status() const { return status_; }

 private:
  void Tensors(const std::vector<at::Tensor*>& parts, at::Tensor& result, const TreePath& path);
  void IValues(const std::vector<c10::IValue*>& parts, c10::IValue& result, const TreePath& path);
  bool CheckCount(size_t part, int64_t count, const char* what, const TreePath& path);
  void Differ(size_t part, const char* what, const TreePath& path);
  void Fail(const TreePath& path, const std::string& problem);

  // `parts` seen through `of`.
  template <typename T, typename Of>
  static auto Through(const std::vector<T*>& parts, Of&& of) {
    std::vector<std::remove_reference_t<decltype(of(*parts[0]))>*> seen;
    for (T* part : parts) seen.push_back(&of(*part));
    return seen;
  }

  template <size_t I, typename V>
  void MergeAlternative(const std::vector<V*>& parts, V& result, const TreePath& path);

  const ExampleOrder& order_;
  absl::Status status_;
};

}  // namespace gather_internal

// Merges parts, with the dataset indices of their examples, into one value: it has each example
// once, in order of its index, the first of duplicates. Not collective. There is at least one part;
// the result is the first part as it is if no part has examples. InvalidArgument as
// GatherForMetrics, with the number of the part in the place of the rank's.
template <typename T>
absl::StatusOr<T> MergeExamples(std::vector<std::pair<std::vector<int64_t>, T>> all) {
  std::vector<std::vector<int64_t>> indices_of_part;
  for (auto& part : all) indices_of_part.push_back(std::move(part.first));
  DDP_ASSIGN_OR_RETURN(const ExampleOrder order, ExampleOrder::Create(std::move(indices_of_part)));
  if (order.ranks().empty()) return std::move(all[0].second);
  std::vector<T*> parts;
  for (const int part : order.ranks()) parts.push_back(&all[part].second);
  T result{};
  gather_internal::ExampleMerger merger(order);
  DDP_RETURN_IF_ERROR(CatchTorch("putting examples in order", [&] {
    merger.Merge(parts, result, TreePath());
    return merger.status();
  }));
  return result;
}

// Collective; costs one AllGather. `indices` are the dataset indices of this rank's examples, in
// the order of `batch`. In it
// - a tensor has one row per example, in dimension 0;
// - a vector (also of bytes), or the list of an IValue, has one element per example, of any type;
// - structs, tuples, pairs, arrays, maps and variants of these have the same keys and alternatives
//   on all ranks; optionals and undefined tensors are set on all ranks or on none.
// The result, on every rank, has each example once, in order of its index: the examples with which
// a DistributedSampler pads are dropped, and those that no rank has are left out. A rank without
// examples passes no indices and any value, for example an empty one.
//
// Errors, besides those of AllGather: InvalidArgument, the same on all ranks, with path and rank,
// if the number of rows or elements is not that of the indices; if shapes of rows, dtypes, keys or
// alternatives differ by rank; for a number, a string or a tensor without dimensions, which have no
// examples.
template <typename T>
absl::StatusOr<T> GatherForMetrics(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                   std::vector<int64_t> indices, T batch) {
  using Part = std::pair<std::vector<int64_t>, T>;
  DDP_ASSIGN_OR_RETURN(std::vector<Part> all,
                       AllGather(group, Part(std::move(indices), std::move(batch))));
  return MergeExamples(std::move(all));
}

// The same of batch after batch: their indices and values, on a rank without examples none.
template <typename T>
absl::StatusOr<T> GatherForMetrics(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                   std::vector<std::pair<std::vector<int64_t>, T>> batches) {
  using Batches = std::vector<std::pair<std::vector<int64_t>, T>>;
  DDP_ASSIGN_OR_RETURN(std::vector<Batches> all, AllGather(group, std::move(batches)));
  Batches flat;
  for (Batches& theirs : all) std::move(theirs.begin(), theirs.end(), std::back_inserter(flat));
  if (flat.empty()) return T{};
  return MergeExamples(std::move(flat));
}

// Only templates below.

namespace gather_internal {

template <size_t I, typename V>
void ExampleMerger::MergeAlternative(const std::vector<V*>& parts, V& result,
                                     const TreePath& path) {
  if constexpr (I < std::variant_size_v<V>) {
    if (parts[0]->index() == I) {
      Merge(Through(
                parts, [](V & part) -> auto& { return std::get<I>(part); }),
            result.template emplace<I>(), path);
    } else {
      MergeAlternative<I + 1>(parts, result, path);
    }
  }
}

template <typename T>
void ExampleMerger::Merge(const std::vector<T*>& parts, T& result, const TreePath& path) {
  constexpr TreeKind kKind = KindOf<T>();
  if (!status_.ok()) return;
  if constexpr (kKind == TreeKind::kTensor) {
    Tensors(parts, result, path);
  } else if constexpr (kKind == TreeKind::kIValue) {
    IValues(parts, result, path);
  } else if constexpr (kKind == TreeKind::kSequence || kKind == TreeKind::kBytes) {
    for (size_t p = 0; p < parts.size(); ++p) {
      if (!CheckCount(p, static_cast<int64_t>(parts[p]->size()), "elements", path)) return;
    }
    result.reserve(order_.sources().size());
    for (const auto& [part, row] : order_.sources()) {
      result.push_back(std::move((*parts[part])[row]));
    }
  } else if constexpr (kKind == TreeKind::kMembers) {
    tree_internal::ForEachMember(result, [&](const auto& member, TreeStep step) {
      Merge(Through(parts, member), member(result), TreePath(path, step));
    });
  } else if constexpr (kKind == TreeKind::kMap) {
    for (size_t p = 1; p < parts.size(); ++p) {
      if (parts[p]->size() != parts[0]->size()) return Differ(p, "another number of keys", path);
    }
    for (const auto& [key, unused] : *parts[0]) {
      const TreePath child = TreePath::OfKey(path, key);
      for (size_t p = 1; p < parts.size(); ++p) {
        if (!parts[p]->contains(key)) return Differ(p, "no such key", child);
      }
      Merge(Through(
                parts, [&key = key](T & part) -> auto& { return part.at(key); }),
            result[key], child);
    }
  } else if constexpr (kKind == TreeKind::kOptional) {
    for (size_t p = 1; p < parts.size(); ++p) {
      if (parts[p]->has_value() != parts[0]->has_value()) {
        return Differ(p, parts[p]->has_value() ? "a value" : "no value", path);
      }
    }
    if (!parts[0]->has_value()) return;
    Merge(Through(
              parts, [](T & part) -> auto& { return *part; }),
          result.emplace(), path);
  } else if constexpr (kKind == TreeKind::kVariant) {
    for (size_t p = 1; p < parts.size(); ++p) {
      if (parts[p]->index() != parts[0]->index()) return Differ(p, "another alternative", path);
    }
    MergeAlternative<0>(parts, result, path);
  } else if constexpr (kKind != TreeKind::kNone) {
    Fail(path, "has no examples: put it into a tensor or vector with one row or element each");
  }
}

}  // namespace gather_internal
}  // namespace ddp
