#include "ddp/zero/sharded_state.h"

#include <map>
#include <optional>
#include <set>
#include <utility>

#include "ATen/core/List.h"
#include "ATen/core/ivalue_inl.h"
#include "ATen/ops/empty_like.h"
#include "ATen/ops/scalar_tensor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "checkpoint/parts.h"
#include "optim/state_dict.h"

namespace ddp::zero {
namespace {

using checkpoint::FlatRange;
using checkpoint::Part;
using checkpoint::ShardedTensor;
using optim::Dict;

int64_t NumberOfParameters(const ZeroRedundancyOptimizer& optimizer) {
  int64_t number = 0;
  for (const auto& group : optimizer.param_groups()) {
    number += static_cast<int64_t>(group.params().size());
  }
  return number;
}

absl::Status CheckNames(const ZeroRedundancyOptimizer& optimizer, const ParameterNames& names) {
  if (names.empty()) return absl::OkStatus();
  const auto parameters = static_cast<size_t>(NumberOfParameters(optimizer));
  if (names.size() != parameters) {
    return optim::StateError(absl::StrCat(names.size(), " names for ", parameters, " parameters"));
  }
  std::set<std::string> seen;
  for (const std::string& name : names) {
    if (name.empty() || absl::StrContains(name, '/') || !seen.insert(name).second) {
      return optim::StateError(absl::StrCat("'", name,
                                            "' as a parameter's name: names are not "
                                            "empty, have no slash, and differ"));
    }
  }
  return absl::OkStatus();
}

std::string KeyOf(int64_t parameter, const ParameterNames& names) {
  return names.empty() ? absl::StrCat(parameter) : names[static_cast<size_t>(parameter)];
}

c10::IValue KeyValueOf(int64_t parameter, const ParameterNames& names) {
  return names.empty() ? c10::IValue(parameter) : c10::IValue(KeyOf(parameter, names));
}

std::string PathOf(absl::string_view key, absl::string_view parameter, absl::string_view entry) {
  return absl::StrCat(key, "/state/", parameter, "/", entry);
}

// What ranks know of one parameter's state.
struct Known {
  std::vector<std::string> entries;       // tensors that there are
  std::map<std::string, double> scalars;  // numbers
};

// One line per parameter that this rank has state of: "7 step=3 exp_avg exp_avg_sq".
std::string Told(const std::vector<LocalPieces>& pieces, const std::vector<LocalState>& states) {
  std::map<int64_t, const LocalPieces*> by_number;
  for (const LocalPieces& one : pieces) by_number[one.parameter] = &one;
  std::map<int64_t, std::string> lines;
  for (const LocalState& state : states) {
    std::string& line = lines[state.parameter];
    if (!line.empty()) continue;
    line = absl::StrCat(state.parameter);
    const LocalPieces& one = *by_number.at(state.parameter);
    for (const std::string& name : one.scalars) {
      const auto value = optim::Find(state.entries, name.c_str());
      const std::optional<double> number = value ? optim::AsNumber(*value) : std::nullopt;
      if (number) absl::StrAppendFormat(&line, " %s=%.17g", name, *number);
    }
    for (const std::string& name : one.entries) {
      if (state.entries.contains(name)) absl::StrAppend(&line, " ", name);
    }
  }
  std::string text;
  for (const auto& [number, line] : lines) absl::StrAppend(&text, line, "\n");
  return text;
}

std::map<int64_t, Known> Heard(const std::vector<std::string>& all) {
  std::map<int64_t, Known> known;
  for (const std::string& text : all) {
    for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
      const std::vector<absl::string_view> words = absl::StrSplit(line, ' ');
      int64_t number = 0;
      if (!absl::SimpleAtoi(words[0], &number) || known.contains(number)) continue;
      Known& one = known[number];
      for (size_t i = 1; i < words.size(); ++i) {
        const std::pair<absl::string_view, absl::string_view> pair =
            absl::StrSplit(words[i], absl::MaxSplits('=', 1));
        double value = 0;
        if (absl::StrContains(words[i], '=') && absl::SimpleAtod(pair.second, &value)) {
          one.scalars[std::string(pair.first)] = value;
        } else {
          one.entries.emplace_back(words[i]);
        }
      }
    }
  }
  return known;
}

// A parameter without elements has no owner, and has been stepped as others of its group have.
void AddEmptyOnes(const std::vector<LocalPieces>& pieces, std::map<int64_t, Known>& known) {
  for (const LocalPieces& one : pieces) {
    const absl::StatusOr<int64_t> elements = checkpoint::NumElements(one.global_shape);
    if (!elements.ok() || *elements != 0) continue;
    for (const LocalPieces& other : pieces) {
      const auto example = known.find(other.parameter);
      if (other.group != one.group || other.dtype != one.dtype || example == known.end()) continue;
      const Known copy = example->second;
      known.emplace(one.parameter, copy);
      break;
    }
  }
}

// The dict of a parameter's state in `states`; unset if there is none.
std::optional<Dict> StateOfKey(const Dict& states, const std::string& key) {
  int64_t number = 0;
  auto found = states.find(key);
  if (found == states.end() && absl::SimpleAtoi(key, &number)) found = states.find(number);
  if (found == states.end() || !found->value().isGenericDict()) return std::nullopt;
  return found->value().toGenericDict();
}

// `tensor`'s parts as the list of pieces that LoadStateDict takes.
absl::StatusOr<c10::IValue> PiecesOf(const ShardedTensor& tensor, const LocalPieces& mine,
                                     const std::string& where) {
  const auto refuse = [&](absl::string_view what) {
    return optim::StateError(absl::StrCat("'", where, "' ", what));
  };
  if (tensor.global_shape != mine.global_shape) {
    return refuse(absl::StrCat("has shape ", checkpoint::ShapeText(tensor.global_shape),
                               ", the parameter ", checkpoint::ShapeText(mine.global_shape)));
  }
  c10::impl::GenericList pieces(c10::AnyType::get());
  for (size_t i = 0; i < tensor.parts.size(); ++i) {
    const auto* range = std::get_if<FlatRange>(&tensor.parts[i].part);
    const bool fits = i < mine.pieces.size() && range != nullptr &&
                      *range == FlatRange{mine.pieces[i].first, mine.pieces[i].second};
    if (!fits) return refuse("was not read in this rank's pieces");
    pieces.push_back(tensor.parts[i].tensor);
  }
  if (pieces.size() != mine.pieces.size() ||
      checkpoint::NormalOrder(tensor.memory_order) != checkpoint::NormalOrder(mine.memory_order)) {
    return refuse("was not read in this rank's pieces");
  }
  return c10::IValue(pieces);
}

}  // namespace

absl::Status AddShardedState(ZeroRedundancyOptimizer& optimizer, const ParameterNames& names,
                             const Coordinator& ranks, const std::string& key,
                             checkpoint::State& state, bool places) {
  std::vector<LocalState> states;
  std::vector<LocalPieces> pieces;
  const auto look = [&]() -> absl::StatusOr<std::string> {
    DDP_ASSIGN_OR_RETURN(states, optimizer.LocalStates());
    DDP_ASSIGN_OR_RETURN(pieces, optimizer.Pieces());
    DDP_RETURN_IF_ERROR(CheckNames(optimizer, names));
    if (state.root.contains(key)) {
      return absl::InvalidArgumentError(absl::StrCat("the state has a value '", key, "' already"));
    }
    return Told(pieces, states);
  };
  const absl::StatusOr<std::string> told = look();
  DDP_RETURN_IF_ERROR(ranks.Agree(told.status()));
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> all, ranks.AllGather(*told));
  std::map<int64_t, Known> known = Heard(all);
  AddEmptyOnes(pieces, known);

  DDP_ASSIGN_OR_RETURN(const optim::OptimizerKind* kind, optim::KindOf(optimizer.inner()));
  Dict root = optim::MakeStateDict(*kind, optimizer.param_groups(),
                                   [](const at::Tensor&, int64_t) { return std::nullopt; });
  if (!names.empty()) {
    for (const c10::IValue& group : root.at("param_groups").toListRef()) {
      c10::impl::GenericList keys(c10::AnyType::get());
      for (const c10::IValue& number : group.toGenericDict().at("params").toListRef()) {
        keys.push_back(KeyOf(number.toInt(), names));
      }
      group.toGenericDict().insert_or_assign("params", keys);
    }
    root.insert_or_assign("state", optim::NewDict());
  }
  const Dict by_key = root.at("state").toGenericDict();
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.param_groups()) {
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  }
  for (const LocalPieces& one : pieces) {
    const auto found = known.find(one.parameter);
    if (found == known.end()) continue;
    const std::string name = KeyOf(one.parameter, names);
    Dict entries = optim::NewDict();
    for (const std::string& scalar : one.scalars) {
      const auto value = found->second.scalars.find(scalar);
      if (value == found->second.scalars.end()) continue;
      entries.insert(scalar, at::scalar_tensor(value->second, at::kFloat));
    }
    by_key.insert(KeyValueOf(one.parameter, names), entries);
    for (const std::string& entry : found->second.entries) {
      if (places) {
        entries.insert(
            entry,
            at::empty_like(parameters[static_cast<size_t>(one.parameter)],
                           at::TensorOptions().dtype(one.dtype).device(c10::DeviceType::Meta)));
      }
      state.sharded[PathOf(key, name, entry)] = {
          .global_shape = one.global_shape,
          .dtype = one.dtype,
          .memory_order = checkpoint::NormalOrder(one.memory_order)};
    }
  }
  for (const LocalState& local : states) {
    for (const auto& entry : local.entries) {
      const auto place =
          state.sharded.find(PathOf(key, KeyOf(local.parameter, names), entry.key().toStringRef()));
      if (place == state.sharded.end()) continue;  // a number
      place->second.parts.push_back(
          {FlatRange{local.begin, local.end}, entry.value().toTensor().detach().flatten()});
    }
  }
  state.root.insert(key, root);
  return absl::OkStatus();
}

absl::Status RequestShardedState(const ZeroRedundancyOptimizer& optimizer,
                                 const ParameterNames& names, const std::string& key,
                                 checkpoint::ReadRequest& request) {
  DDP_RETURN_IF_ERROR(CheckNames(optimizer, names));
  DDP_ASSIGN_OR_RETURN(const std::vector<LocalPieces> pieces, optimizer.Pieces());
  request.parts[absl::StrCat(key, "/param_groups")] = checkpoint::Whole{};
  for (const LocalPieces& one : pieces) {
    const std::string name = KeyOf(one.parameter, names);
    for (const std::string& scalar : one.scalars) {
      checkpoint::Wanted& wanted = request.parts[PathOf(key, name, scalar)];
      wanted.optional = true;
    }
    for (const std::string& entry : one.entries) {
      checkpoint::Wanted& wanted = request.parts[PathOf(key, name, entry)];
      wanted.parts.clear();
      for (const auto& [begin, end] : one.pieces) wanted.parts.push_back(FlatRange{begin, end});
      wanted.memory_order = checkpoint::NormalOrder(one.memory_order);
      wanted.optional = true;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Dict> ShardedStateDict(const ZeroRedundancyOptimizer& optimizer,
                                      const checkpoint::State& state, const ParameterNames& names,
                                      const std::string& key) {
  DDP_RETURN_IF_ERROR(CheckNames(optimizer, names));
  DDP_ASSIGN_OR_RETURN(const std::vector<LocalPieces> pieces, optimizer.Pieces());
  const std::optional<c10::IValue> root = optim::Find(state.root, key.c_str());
  if (!root || !root->isGenericDict()) {
    return optim::StateError(absl::StrCat("the checkpoint has no dict '", key, "'"));
  }
  DDP_ASSIGN_OR_RETURN(const c10::IValue groups,
                       optim::Need(root->toGenericDict(), "param_groups"));
  DDP_ASSIGN_OR_RETURN(optim::NumberedGroups saved,
                       optim::NumberGroups(optimizer.param_groups(), groups, names));
  const std::optional<c10::IValue> states = optim::Find(root->toGenericDict(), "state");
  const Dict by_key =
      states && states->isGenericDict() ? states->toGenericDict() : optim::NewDict();
  Dict by_number(c10::IntType::get(), c10::AnyType::get());
  for (const LocalPieces& one : pieces) {
    const std::string& name = saved.keys[static_cast<size_t>(one.parameter)];
    const std::optional<Dict> found = StateOfKey(by_key, name);
    Dict entries = found ? found->copy() : optim::NewDict();
    for (const std::string& entry : one.entries) {
      const std::string path = PathOf(key, name, entry);
      const auto sharded = state.sharded.find(path);
      if (sharded == state.sharded.end()) continue;
      DDP_ASSIGN_OR_RETURN(const c10::IValue mine, PiecesOf(sharded->second, one, path));
      entries.insert_or_assign(entry, mine);
    }
    if (!entries.empty()) by_number.insert(one.parameter, entries);
  }
  Dict dict = optim::NewDict();
  dict.insert("state", by_number);
  dict.insert("param_groups", saved.groups);
  return dict;
}

absl::Status LoadShardedState(const checkpoint::State& state, const ParameterNames& names,
                              const std::string& key, ZeroRedundancyOptimizer& optimizer) {
  DDP_ASSIGN_OR_RETURN(const Dict dict, ShardedStateDict(optimizer, state, names, key));
  return optimizer.LoadStateDict(dict);
}

}  // namespace ddp::zero
