#include "optim/state_dict.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ATen/ops/empty_like.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "optim/kind.h"

namespace ddp::optim {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;

absl::Status CheckKind(const Dict& group, const OptimizerKind& kind) {
  if (kind.MatchesGroup(group)) return absl::OkStatus();
  for (const auto& [name, other] : OptimizerKindRegistry::All()) {
    if (!other()->MatchesGroup(group)) continue;
    return StateError(absl::StrCat("written by ", name, ", but the optimizer is ", kind.name()));
  }
  return StateError(absl::StrCat("written by an optimizer that is not known here, but this one is ",
                                 kind.name()));
}

// Reads `saved`, Python's form of `group`, into `parsed`, and adds its parameters to `numbers`: a
// saved number -> ours.
absl::Status ReadGroup(const OptimizerKind& kind, const OptimizerParamGroup& group,
                       const Dict& saved, ParsedState& parsed,
                       std::unordered_map<int64_t, size_t>& numbers) {
  DDP_RETURN_IF_ERROR(CheckKind(saved, kind));
  const std::optional<c10::IValue> maximize = Find(saved, "maximize");
  if (maximize.has_value() && maximize->isBool() && maximize->toBool()) {
    return StateError("'maximize' is true, which the C++ optimizers cannot do");
  }
  DDP_ASSIGN_OR_RETURN(const c10::IValue indices, Need(saved, "params"));
  if (!indices.isList()) return StateError("'params' is not a list");
  const std::vector<c10::IValue> items = indices.toListRef().vec();
  if (items.size() != group.params().size()) {
    return StateError(absl::StrCat("it has ", items.size(), " parameters, the optimizer's has ",
                                   group.params().size()));
  }
  parsed.options.push_back(group.options().clone());
  DDP_RETURN_IF_ERROR(kind.ReadOptions(saved, *parsed.options.back()));
  for (const c10::IValue& item : items) {
    if (!item.isInt() || !numbers.emplace(item.toInt(), numbers.size()).second) {
      return StateError("'params' are not different integers");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ParsedState> ParseState(const OptimizerKind& kind,
                                       const std::vector<OptimizerParamGroup>& own_groups,
                                       const c10::IValue& given) {
  if (!given.isGenericDict()) return StateError(absl::StrCat("need a dict, got ", given.tagKind()));
  const Dict root = given.toGenericDict();
  DDP_ASSIGN_OR_RETURN(const c10::IValue groups, Need(root, "param_groups"));
  DDP_ASSIGN_OR_RETURN(const c10::IValue states, Need(root, "state"));
  if (!groups.isList() || !states.isGenericDict()) {
    return StateError("'param_groups' is not a list or 'state' not a dict");
  }
  const std::vector<c10::IValue> saved_groups = groups.toListRef().vec();
  if (saved_groups.size() != own_groups.size()) {
    return StateError(absl::StrCat("it has ", saved_groups.size(),
                                   " parameter groups, the optimizer ", own_groups.size()));
  }
  ParsedState parsed;
  std::unordered_map<int64_t, size_t> numbers;
  for (size_t i = 0; i < own_groups.size(); ++i) {
    if (!saved_groups[i].isGenericDict()) return StateError("a parameter group that is not a dict");
    DDP_RETURN_IF_ERROR(
        Annotate(ReadGroup(kind, own_groups[i], saved_groups[i].toGenericDict(), parsed, numbers),
                 absl::StrCat("parameter group ", i)));
  }
  parsed.states.resize(numbers.size());
  for (const auto& entry : states.toGenericDict()) {
    if (!entry.key().isInt() || !entry.value().isGenericDict()) {
      return StateError("'state' does not map integers to dicts");
    }
    const int64_t index = entry.key().toInt();
    const auto number = numbers.find(index);
    if (number == numbers.end()) {
      return StateError(absl::StrCat("state of parameter ", index, ", which no group has"));
    }
    parsed.states[number->second] = entry.value().toGenericDict();
  }
  return parsed;
}

Dict MakeStateDict(const OptimizerKind& kind, const std::vector<OptimizerParamGroup>& own_groups,
                   const std::function<std::optional<Dict>(const at::Tensor&, int64_t)>& state_of) {
  Dict states(c10::IntType::get(), c10::AnyType::get());
  c10::impl::GenericList groups(c10::AnyType::get());
  int64_t index = 0;
  for (const OptimizerParamGroup& group : own_groups) {
    Dict saved = NewDict();
    kind.WriteOptions(group.options(), saved);
    c10::impl::GenericList indices(c10::AnyType::get());
    for (const at::Tensor& parameter : group.params()) {
      std::optional<Dict> dict = state_of(parameter, index);
      if (dict.has_value()) states.insert(index, *std::move(dict));
      indices.push_back(index++);
    }
    saved.insert("params", std::move(indices));
    groups.push_back(std::move(saved));
  }
  Dict root = NewDict();
  root.insert("state", std::move(states));
  root.insert("param_groups", std::move(groups));
  return root;
}

absl::StatusOr<Dict> OptimizerState(const Optimizer& optimizer) {
  DDP_ASSIGN_OR_RETURN(const OptimizerKind* kind, KindOf(optimizer));
  return MakeStateDict(*kind, optimizer.param_groups(),
                       [&](const at::Tensor& parameter, int64_t) -> std::optional<Dict> {
                         const auto state = optimizer.state().find(parameter.unsafeGetTensorImpl());
                         if (state == optimizer.state().end()) return std::nullopt;
                         return kind->WriteState(*state->second);
                       });
}

absl::Status CheckOptimizerState(const Optimizer& optimizer, const c10::IValue& state) {
  return CatchStatus("optimizer state", [&]() -> absl::Status {
    DDP_ASSIGN_OR_RETURN(const OptimizerKind* kind, KindOf(optimizer));
    DDP_ASSIGN_OR_RETURN(const ParsedState parsed,
                         ParseState(*kind, optimizer.param_groups(), state));
    int64_t index = 0;
    for (size_t i = 0; i < parsed.options.size(); ++i) {
      for (const at::Tensor& parameter : optimizer.param_groups()[i].params()) {
        const std::optional<Dict>& saved = parsed.states[index];
        if (saved) {
          // A tensor without data, to which none is copied.
          const at::Tensor shape =
              at::empty_like(parameter.detach(), parameter.detach().options().device(c10::kMeta));
          const auto read = kind->ReadState(*saved, shape, *parsed.options[i]);
          if (!read.ok()) return Annotate(read.status(), absl::StrCat("parameter ", index));
        }
        ++index;
      }
    }
    return absl::OkStatus();
  });
}

absl::Status LoadOptimizerState(Optimizer& optimizer, const c10::IValue& state) {
  return CatchStatus("optimizer state", [&]() -> absl::Status {
    DDP_ASSIGN_OR_RETURN(const OptimizerKind* kind, KindOf(optimizer));
    DDP_ASSIGN_OR_RETURN(ParsedState parsed, ParseState(*kind, optimizer.param_groups(), state));
    // All that changes is made before anything is changed.
    std::vector<std::pair<void*, std::unique_ptr<OptimizerParamState>>> states;
    int64_t index = 0;
    for (size_t i = 0; i < parsed.options.size(); ++i) {
      for (const at::Tensor& parameter : optimizer.param_groups()[i].params()) {
        const std::optional<Dict>& saved = parsed.states[index];
        if (saved) {
          auto read = kind->ReadState(*saved, parameter, *parsed.options[i]);
          if (!read.ok()) return Annotate(read.status(), absl::StrCat("parameter ", index));
          if (*read != nullptr) {
            states.emplace_back(parameter.unsafeGetTensorImpl(), *std::move(read));
          }
        }
        ++index;
      }
    }
    for (size_t i = 0; i < parsed.options.size(); ++i) {
      optimizer.param_groups()[i].set_options(std::move(parsed.options[i]));
    }
    optimizer.state().clear();
    for (auto& [parameter, param_state] : states) {
      optimizer.state()[parameter] = std::move(param_state);
    }
    return absl::OkStatus();
  });
}

}  // namespace ddp::optim
