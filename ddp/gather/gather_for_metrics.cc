#include "ddp/gather/gather_for_metrics.h"

#include <algorithm>
#include <numeric>

#include "ATen/core/jit_type.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/index_select.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ddp {

absl::StatusOr<ExampleOrder> ExampleOrder::Create(
    std::vector<std::vector<int64_t>> indices_of_rank) {
  struct Example {
    int64_t index;
    Source source;
  };
  ExampleOrder order;
  std::vector<Example> examples;
  for (size_t rank = 0; rank < indices_of_rank.size(); ++rank) {
    const std::vector<int64_t>& indices = indices_of_rank[rank];
    if (indices.empty()) continue;
    for (size_t row = 0; row < indices.size(); ++row) {
      if (indices[row] < 0) {
        return absl::InvalidArgumentError(
            absl::StrCat("rank ", rank, ": index ", indices[row], " is negative"));
      }
      examples.push_back({indices[row], {order.ranks_.size(), static_cast<int64_t>(row)}});
    }
    order.ranks_.push_back(static_cast<int>(rank));
    order.counts_.push_back(static_cast<int64_t>(indices.size()));
  }
  // Stable: of duplicates the first comes first.
  std::stable_sort(examples.begin(), examples.end(),
                   [](const Example& a, const Example& b) { return a.index < b.index; });
  for (size_t i = 0; i < examples.size(); ++i) {
    if (i > 0 && examples[i].index == examples[i - 1].index) continue;
    order.sources_.push_back(examples[i].source);
  }
  return order;
}

namespace gather_internal {
namespace {

std::string Describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return "an undefined tensor";
  return absl::StrCat(c10::toString(tensor.scalar_type()), " rows of [",
                      absl::StrJoin(tensor.sizes().slice(1), ", "), "]",
                      tensor.is_cpu() ? "" : absl::StrCat(" on ", c10::str(tensor.device())));
}

}  // namespace

void ExampleMerger::Fail(const TreePath& path, const std::string& problem) {
  if (status_.ok()) status_ = absl::InvalidArgumentError(absl::StrCat(path.Text(), " ", problem));
}

void ExampleMerger::Differ(size_t part, const char* what, const TreePath& path) {
  Fail(path, absl::StrCat("differs: rank ", order_.ranks()[part], " has ", what, ", unlike rank ",
                          order_.ranks()[0]));
}

bool ExampleMerger::CheckCount(size_t part, int64_t count, const char* what, const TreePath& path) {
  if (count != order_.counts()[part]) {
    Fail(path, absl::StrCat("has ", count, " ", what, " on rank ", order_.ranks()[part], " for ",
                            order_.counts()[part], " indices"));
  }
  return status_.ok();
}

void ExampleMerger::Tensors(const std::vector<at::Tensor*>& parts, at::Tensor& result,
                            const TreePath& path) {
  std::vector<at::Tensor> rows;
  for (size_t p = 0; p < parts.size(); ++p) {
    const at::Tensor& tensor = *parts[p];
    if (tensor.defined()) {
      if (tensor.dim() == 0) return Fail(path, "has no examples: it is a tensor of no dimensions");
      if (!CheckCount(p, tensor.size(0), "rows", path)) return;
    }
    const std::string ours = Describe(*parts[0]), theirs = Describe(tensor);
    if (ours != theirs) {
      return Fail(path, absl::StrCat("differs: ", ours, " on rank ", order_.ranks()[0], ", ",
                                     theirs, " on rank ", order_.ranks()[p]));
    }
    rows.push_back(tensor);
  }
  result = at::Tensor();
  if (!rows[0].defined()) return;
  std::vector<int64_t> starts(parts.size(), 0);
  std::partial_sum(order_.counts().begin(), order_.counts().end() - 1, starts.begin() + 1);
  const auto n = static_cast<int64_t>(order_.sources().size());
  at::Tensor order = at::empty({n}, at::kLong);
  int64_t* positions = order.data_ptr<int64_t>();
  bool in_order = n == starts.back() + order_.counts().back();
  for (int64_t i = 0; i < n; ++i) {
    const auto& [part, row] = order_.sources()[i];
    positions[i] = starts[part] + row;
    in_order &= positions[i] == i;
  }
  std::vector<int64_t> sizes = rows[0].sizes().vec();
  sizes[0] = n;
  if (rows[0].numel() == 0) {
    result = at::empty(sizes, rows[0].options());
    return;
  }
  // Rows as bytes: at::cat and index_select lack some dtypes.
  const c10::ScalarType dtype = rows[0].scalar_type();
  for (at::Tensor& tensor : rows) {
    tensor = tensor.view({tensor.size(0), tensor.numel() / tensor.size(0)}).view(at::kByte);
  }
  at::Tensor bytes = rows.size() == 1 ? rows[0] : at::cat(rows);
  if (!in_order) bytes = at::index_select(bytes, 0, order.to(bytes.device()));
  result = bytes.view(dtype).view(sizes);
}

void ExampleMerger::IValues(const std::vector<c10::IValue*>& parts, c10::IValue& result,
                            const TreePath& path) {
  const c10::IValue& first = *parts[0];
  const auto each = [&](auto&& child_of, const TreePath& child) {
    std::vector<c10::IValue> children;
    for (const c10::IValue* part : parts) children.push_back(child_of(*part));
    std::vector<c10::IValue*> pointers;
    for (c10::IValue& value : children) pointers.push_back(&value);
    c10::IValue merged;
    Merge(pointers, merged, child);
    return merged;
  };
  for (size_t p = 1; p < parts.size(); ++p) {
    if (parts[p]->tagKind() != first.tagKind()) return Differ(p, "another type", path);
  }
  if (first.isTensor()) {
    std::vector<at::Tensor> tensors;
    for (const c10::IValue* part : parts) tensors.push_back(part->toTensor());
    std::vector<at::Tensor*> pointers;
    for (at::Tensor& tensor : tensors) pointers.push_back(&tensor);
    at::Tensor merged;
    Tensors(pointers, merged, path);
    result = merged;
  } else if (first.isList()) {
    std::vector<c10::List<c10::IValue>> lists;
    for (size_t p = 0; p < parts.size(); ++p) {
      lists.push_back(parts[p]->toList());
      if (!CheckCount(p, static_cast<int64_t>(lists[p].size()), "elements", path)) return;
      if (*lists[p].elementType() != *lists[0].elementType()) {
        return Differ(p, "a list of another type", path);
      }
    }
    c10::impl::GenericList merged(lists[0].elementType());
    for (const auto& [part, row] : order_.sources()) merged.push_back(lists[part].get(row));
    result = merged;
  } else if (first.isTuple()) {
    std::vector<c10::IValue> merged;
    const size_t size = first.toTupleRef().size();
    for (size_t p = 1; p < parts.size(); ++p) {
      if (parts[p]->toTupleRef().size() != size)
        return Differ(p, "another number of elements", path);
    }
    for (size_t i = 0; i < size; ++i) {
      merged.push_back(
          each([i](const c10::IValue& part) { return part.toTupleRef().elements()[i]; },
               TreePath(path, TreeStep{.index = i})));
    }
    result = c10::ivalue::Tuple::create(std::move(merged));
  } else if (first.isGenericDict()) {
    const auto dict = first.toGenericDict();
    c10::impl::GenericDict merged(dict.keyType(), dict.valueType());
    for (size_t p = 1; p < parts.size(); ++p) {
      if (parts[p]->toGenericDict().size() != dict.size()) {
        return Differ(p, "another number of keys", path);
      }
    }
    for (const auto& entry : dict) {
      const TreePath child = tree_internal::OfIValueKey(path, entry.key());
      for (size_t p = 1; p < parts.size(); ++p) {
        if (!parts[p]->toGenericDict().contains(entry.key())) {
          return Differ(p, "no such key", child);
        }
      }
      merged.insert(
          entry.key(),
          each([&](const c10::IValue& part) { return part.toGenericDict().at(entry.key()); },
               child));
    }
    result = merged;
  } else if (!first.isNone()) {
    Fail(path, "has no examples: put it into a tensor or list with one row or element each");
  }
}

}  // namespace gather_internal
}  // namespace ddp
