#include "checkpoint/stateful.h"

#include <ATen/core/List.h>
#include <ATen/core/ivalue_inl.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/option_text.h"
#include "base/status.h"

namespace ddp::checkpoint {
namespace {

std::string Printed(const c10::IValue& value) {
  if (value.isDouble()) return FormatOption(value.toDouble());
  std::ostringstream text;
  text << value;
  return text.str();
}

std::string Difference(absl::string_view option, absl::string_view now, absl::string_view saved) {
  return absl::StrCat("with ", option, " ", now, ", saved ", saved);
}

bool Has(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

absl::Status Insert(Dict& dict, const std::string& key, const c10::IValue& value) {
  if (dict.contains(key)) {
    return absl::InvalidArgumentError(absl::StrCat("the checkpoint has a key '", key,
                                                   "' already: a component needs another "
                                                   "name"));
  }
  dict.insert(key, value);
  return absl::OkStatus();
}

std::optional<c10::IValue> Take(Dict& dict, const std::string& key) {
  const auto found = dict.find(key);
  if (found == dict.end()) return std::nullopt;
  const c10::IValue value = found->value();
  (void)dict.erase(key);
  return value;
}

absl::Status NotOfAllRanks(absl::string_view key, int64_t world_size) {
  return absl::InvalidArgumentError(
      absl::StrCat("the checkpoint's key '", key, "' is not a list of ", world_size, " states"));
}

// Whose entries there must be.
struct Saved {
  int64_t world_size;
  std::optional<int> reader;  // a rank of which they will do

  bool IsEnough(int64_t found, const std::map<int, Dict>& entries) const {
    return found == world_size ||
           (reader.has_value() && entries.size() == 1 && entries.contains(*reader));
  }
};

// The entries of this component at the top level.
absl::Status TakeTopLevel(const Component& component, const Saved& saved, State& rest,
                          State& state) {
  for (const std::string& key : component.top_level) {
    const std::optional<c10::IValue> value = Take(rest.root, key);
    if (value) state.root.insert(key, *value);
  }
  for (const std::string& key : component.top_level_per_rank) {
    const auto add = [&](int rank, const c10::IValue& value) {
      state.per_rank.emplace(rank, NewTree()).first->second.insert(key, value);
    };
    int64_t found = 0;
    if (const std::optional<c10::IValue> list = Take(rest.root, key)) {
      if (!list->isList()) return NotOfAllRanks(key, saved.world_size);
      for (const c10::IValue& value : list->toListRef()) add(static_cast<int>(found++), value);
      if (found != saved.world_size) return NotOfAllRanks(key, saved.world_size);
    } else {
      for (auto& [rank, theirs] : rest.per_rank) {
        const std::optional<c10::IValue> value = Take(theirs, key);
        if (!value) continue;
        add(rank, *value);
        ++found;
      }
      if (found > 0 && !saved.IsEnough(found, state.per_rank)) {
        return NotOfAllRanks(key, saved.world_size);
      }
    }
  }
  return absl::OkStatus();
}

// What each rank has under the component's name.
absl::Status TakePerRankOf(const Component& component, const Saved& saved, State& rest,
                           State& state) {
  int64_t found = 0;
  const std::string path = absl::StrCat("per_rank/", component.name);
  for (auto& [rank, theirs] : rest.per_rank) {
    const std::optional<c10::IValue> value = Take(theirs, component.name);
    if (!value) continue;
    if (!value->isGenericDict()) {
      return absl::InvalidArgumentError(
          absl::StrCat("the checkpoint's key '", path, "' is not a list of dicts"));
    }
    Dict& mine = state.per_rank.emplace(rank, NewTree()).first->second;
    for (const auto& entry : value->toGenericDict()) mine.insert(entry.key(), entry.value());
    ++found;
  }
  return found == 0 || saved.IsEnough(found, state.per_rank)
             ? absl::OkStatus()
             : NotOfAllRanks(path, saved.world_size);
}

}  // namespace

void LoadNotes::AddDifference(absl::string_view option, const c10::IValue& now,
                              const c10::IValue& saved) {
  compared_.emplace(option);
  const std::string new_text = Printed(now), old_text = Printed(saved);
  if (new_text == old_text) return;
  // Parameter groups and phases may all have it.
  std::string line = Difference(option, new_text, old_text);
  if (!Has(lines_, line)) Add(std::move(line));
}

void LoadNotes::AddConfigured(const std::string& option, absl::string_view now,
                              absl::string_view saved) {
  configured_.emplace_back(option, Difference(option, now, saved));
}

std::vector<std::string> LoadNotes::lines() const {
  std::vector<std::string> all = lines_;
  for (const auto& [option, line] : configured_) {
    if (compared_.count(option) == 0) all.push_back(line);
  }
  return all;
}

absl::Status InsertComponent(const Component& component, const State& state, State& checkpoint) {
  Dict nested = NewTree();
  for (const auto& entry : state.root) {
    const std::string key = entry.key().toStringRef();
    Dict& dict = Has(component.top_level, key) ? checkpoint.root : nested;
    DDP_RETURN_IF_ERROR(Insert(dict, key, entry.value()));
  }
  // A component with nothing at the top level is there even if it has no entries.
  const bool is_nested = component.top_level.empty() && component.top_level_per_rank.empty();
  if (is_nested || !nested.empty()) {
    DDP_RETURN_IF_ERROR(Insert(checkpoint.root, component.name, nested));
  }
  for (const auto& [path, tensor] : state.sharded) {
    const std::string key = path.substr(0, path.find('/'));
    checkpoint.sharded.emplace(
        Has(component.top_level, key) ? path : absl::StrCat(component.name, "/", path), tensor);
  }
  for (const auto& [rank, mine] : state.per_rank) {
    Dict& all = checkpoint.per_rank.emplace(rank, NewTree()).first->second;
    Dict rest = NewTree();
    for (const auto& entry : mine) {
      const std::string key = entry.key().toStringRef();
      Dict& dict = Has(component.top_level_per_rank, key) ? all : rest;
      DDP_RETURN_IF_ERROR(Insert(dict, key, entry.value()));
    }
    if (is_nested || !rest.empty()) DDP_RETURN_IF_ERROR(Insert(all, component.name, rest));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<State>> TakeComponent(const Component& component, int64_t world_size,
                                                   State& rest, std::optional<int> reader) {
  State state;
  const Saved saved{world_size, reader};
  DDP_RETURN_IF_ERROR(TakeTopLevel(component, saved, rest, state));
  const std::optional<c10::IValue> nested = Take(rest.root, component.name);
  if (nested && !nested->isGenericDict()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the checkpoint's key '", component.name, "' is not a dict"));
  }
  if (nested) {
    for (const auto& entry : nested->toGenericDict()) state.root.insert(entry.key(), entry.value());
  }
  DDP_RETURN_IF_ERROR(TakePerRankOf(component, saved, rest, state));
  const std::string prefix = absl::StrCat(component.name, "/");
  for (auto tensor = rest.sharded.begin(); tensor != rest.sharded.end();) {
    const std::string& path = tensor->first;
    const bool is_nested = path.compare(0, prefix.size(), prefix) == 0;
    if (!is_nested && !Has(component.top_level, path.substr(0, path.find('/')))) {
      ++tensor;
      continue;
    }
    state.sharded.emplace(is_nested ? path.substr(prefix.size()) : path, tensor->second);
    tensor = rest.sharded.erase(tensor);
  }
  if (!nested && state.root.empty() && state.sharded.empty() && state.per_rank.empty()) {
    return std::optional<State>();
  }
  return std::optional<State>(std::move(state));
}

State DetachedCopy(const State& state) {
  State copy = {.root = state.root.copy(), .sharded = state.sharded};
  for (const auto& [rank, theirs] : state.per_rank) copy.per_rank.emplace(rank, theirs.copy());
  return copy;
}

absl::Status CheckTensor(const Dict& state, const std::string& name, const at::Tensor& like) {
  const auto found = state.find(name);
  if (found == state.end()) {
    return absl::InvalidArgumentError(absl::StrCat("'", name, "' is missing in the checkpoint"));
  }
  if (!found->value().isTensor() || !found->value().toTensor().defined()) {
    return absl::InvalidArgumentError(absl::StrCat("'", name, "' is no tensor"));
  }
  const at::Tensor& tensor = found->value().toTensor();
  if (tensor.sizes() == like.sizes() && tensor.scalar_type() == like.scalar_type()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "'", name, "' is ", c10::toString(tensor.scalar_type()), " of shape [",
      absl::StrJoin(tensor.sizes(), ", "), "], and here ", c10::toString(like.scalar_type()),
      " of shape [", absl::StrJoin(like.sizes(), ", "), "]"));
}

}  // namespace ddp::checkpoint
