#include "optim/state_dict.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
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
                                   " parameter groups, the optimizer ", own_groups.size(),
                                   "; it can be loaded with the groups that it was saved with"));
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

void SetOptions(const OptimizerKind& kind, const ParsedState& parsed,
                std::vector<OptimizerParamGroup>& groups) {
  for (size_t i = 0; i < groups.size(); ++i) {
    Dict options = NewDict();
    kind.WriteOptions(*parsed.options[i], options);
    const absl::Status read = kind.ReadOptions(options, groups[i].options());
    TORCH_CHECK(read.ok(), std::string(read.message()));  // it has read them before
  }
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
    DDP_ASSIGN_OR_RETURN(const ParsedState parsed,
                         ParseState(*kind, optimizer.param_groups(), state));
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
    SetOptions(*kind, parsed, optimizer.param_groups());
    optimizer.state().clear();
    for (auto& [parameter, param_state] : states) {
      optimizer.state()[parameter] = std::move(param_state);
    }
    return absl::OkStatus();
  });
}

namespace {

// Whether a saved group calls its parameters by names.
bool HasNames(const c10::IValue& group) {
  const auto params = group.isGenericDict() ? Find(group.toGenericDict(), "params") : std::nullopt;
  if (!params || !params->isList()) return false;
  const auto is_name = [](const c10::IValue& key) { return key.isString(); };
  return std::any_of(params->toListRef().begin(), params->toListRef().end(), is_name);
}

}  // namespace

Dict WithNames(const Dict& state, const ParameterNames& names) {
  const auto name_of = [&](const c10::IValue& number) {
    return c10::IValue(names.at(static_cast<size_t>(number.toInt())));
  };
  Dict states = NewDict();
  for (const auto& entry : state.at("state").toGenericDict()) {
    states.insert(name_of(entry.key()), entry.value());
  }
  c10::impl::GenericList groups(c10::AnyType::get());
  for (const c10::IValue& saved : state.at("param_groups").toListRef()) {
    Dict group = saved.toGenericDict().copy();
    c10::impl::GenericList params(c10::AnyType::get());
    for (const c10::IValue& number : group.at("params").toListRef()) {
      params.push_back(name_of(number));
    }
    group.insert_or_assign("params", std::move(params));
    groups.push_back(std::move(group));
  }
  Dict named = state.copy();
  named.insert_or_assign("state", std::move(states));
  named.insert_or_assign("param_groups", std::move(groups));
  return named;
}

Dict WithParamNames(const Dict& state, const ParameterNames& names) {
  c10::impl::GenericList groups(c10::AnyType::get());
  for (const c10::IValue& saved : state.at("param_groups").toListRef()) {
    Dict group = saved.toGenericDict().copy();
    c10::impl::GenericList own(c10::AnyType::get());
    for (const c10::IValue& number : group.at("params").toListRef()) {
      own.push_back(names.at(static_cast<size_t>(number.toInt())));
    }
    group.insert_or_assign("param_names", std::move(own));
    groups.push_back(std::move(group));
  }
  Dict named = state.copy();
  named.insert_or_assign("param_groups", std::move(groups));
  return named;
}

namespace {

// Numbers are those of other parameters, where the groups are others of the same sizes.
absl::Status CheckParamNames(const std::vector<OptimizerParamGroup>& own,
                             c10::ArrayRef<c10::IValue> saved, const ParameterNames& names) {
  if (own.size() < 2 || own.size() != saved.size() || names.empty()) return absl::OkStatus();
  size_t number = 0;
  for (size_t g = 0; g < own.size(); ++g) {
    const auto given = saved[g].isGenericDict() ? Find(saved[g].toGenericDict(), "param_names")
                                                : std::optional<c10::IValue>();
    for (size_t i = 0; i < own[g].params().size(); ++i, ++number) {
      if (!given || !given->isList() || i >= given->toListRef().size()) continue;
      const c10::IValue name = given->toListRef()[i];
      if (!name.isString() || name.toStringRef() == names.at(number)) continue;
      return StateError(absl::StrCat("parameter group ", g, " of the checkpoint has '",
                                     name.toStringRef(), "' where this optimizer's has '",
                                     names.at(number),
                                     "'; it can be loaded with the groups that it was saved with"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<NumberedGroups> NumberGroups(const std::vector<OptimizerParamGroup>& own,
                                            const c10::IValue& value, const ParameterNames& names) {
  NumberedGroups saved;
  if (!value.isList() || value.toListRef().size() != own.size()) {
    return StateError(absl::StrCat("'param_groups' is not a list of ", own.size(),
                                   " groups, as this optimizer has"));
  }
  DDP_RETURN_IF_ERROR(CheckParamNames(own, value.toListRef(), names));
  int64_t number = 0;
  for (size_t g = 0; g < own.size(); ++g) {
    const c10::IValue entry = value.toListRef()[g];
    const auto params = entry.isGenericDict() ? Find(entry.toGenericDict(), "params")
                                              : std::optional<c10::IValue>();
    const size_t size = own[g].params().size();
    if (!params || !params->isList() || params->toListRef().size() != size) {
      return StateError(absl::StrCat("parameter group ", g, " is not one of ", size,
                                     " parameters, as in this optimizer"));
    }
    std::set<std::string> in_group;
    for (const c10::IValue& key : params->toListRef()) {
      if (!key.isInt() && !key.isString()) {
        return StateError("'params' are neither names nor numbers");
      }
      in_group.insert(key.isInt() ? absl::StrCat(key.toInt()) : key.toStringRef());
    }
    c10::impl::GenericList numbers(c10::AnyType::get());
    for (size_t i = 0; i < size; ++i, ++number) {
      const c10::IValue key = params->toListRef()[i];
      const bool by_name = key.isString() && !names.empty();
      saved.keys.push_back(by_name          ? names.at(static_cast<size_t>(number))
                           : key.isString() ? key.toStringRef()
                                            : absl::StrCat(key.toInt()));
      if (by_name && !in_group.contains(saved.keys.back())) {
        return StateError(absl::StrCat("parameter group ", g, " of the checkpoint has no '",
                                       saved.keys.back(), "', which this optimizer has"));
      }
      numbers.push_back(number);
    }
    Dict group = entry.toGenericDict().copy();
    group.insert_or_assign("params", std::move(numbers));
    saved.groups.push_back(std::move(group));
  }
  return saved;
}

absl::StatusOr<Dict> WithNumbers(const Dict& state, const std::vector<OptimizerParamGroup>& own,
                                 const ParameterNames& names) {
  const std::optional<c10::IValue> groups = Find(state, "param_groups");
  const std::optional<c10::IValue> states = Find(state, "state");
  if (!groups || !groups->isList() || !states || !states->isGenericDict()) return state;
  const c10::ArrayRef<c10::IValue> saved = groups->toListRef();
  if (std::none_of(saved.begin(), saved.end(), HasNames)) {
    DDP_RETURN_IF_ERROR(CheckParamNames(own, saved, names));
    return state;
  }
  DDP_ASSIGN_OR_RETURN(NumberedGroups numbered, NumberGroups(own, *groups, names));
  Dict by_number(c10::IntType::get(), c10::AnyType::get());
  const Dict by_name = states->toGenericDict();
  size_t found = 0;
  for (size_t number = 0; number < numbered.keys.size(); ++number) {
    const std::optional<c10::IValue> one = Find(by_name, numbered.keys[number].c_str());
    if (!one) continue;
    by_number.insert(static_cast<int64_t>(number), *one);
    ++found;
  }
  if (found != by_name.size()) {
    return StateError("'state' has parameters that no group has");
  }
  Dict result = state.copy();
  result.insert_or_assign("state", std::move(by_number));
  result.insert_or_assign("param_groups", std::move(numbered.groups));
  return result;
}

}  // namespace ddp::optim
