#include "checkpoint/optimizer_state.h"

#include <ATen/Functions.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/status.h"

namespace ddp::checkpoint {
namespace {

using Dict = c10::impl::GenericDict;
using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;

Dict NewDict(c10::TypePtr key = c10::StringType::get()) {
  return Dict(std::move(key), c10::AnyType::get());
}

absl::Status Mismatch(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("optimizer state: ", what));
}

std::optional<c10::IValue> Find(const Dict& dict, const char* key) {
  const auto found = dict.find(key);
  if (found == dict.end()) return std::nullopt;
  return found->value();
}

absl::StatusOr<c10::IValue> Need(const Dict& dict, const char* key) {
  std::optional<c10::IValue> value = Find(dict, key);
  if (!value.has_value()) return Mismatch(absl::StrCat("no key '", key, "'"));
  return *std::move(value);
}

// Also accepts a 0-dim tensor, which Python uses for steps and, with capturable, learning rates.
std::optional<double> AsNumber(const c10::IValue& value) {
  if (value.isDouble()) return value.toDouble();
  if (value.isInt()) return static_cast<double>(value.toInt());
  if (value.isTensor() && value.toTensor().defined() && value.toTensor().numel() == 1 &&
      !value.toTensor().is_complex()) {
    return value.toTensor().item<double>();
  }
  return std::nullopt;
}

absl::StatusOr<double> Number(const Dict& dict, const char* key) {
  DDP_ASSIGN_OR_RETURN(const c10::IValue value, Need(dict, key));
  const std::optional<double> number = AsNumber(value);
  if (!number.has_value()) return Mismatch(absl::StrCat("'", key, "' is no number"));
  return *number;
}

absl::StatusOr<bool> Flag(const Dict& dict, const char* key) {
  DDP_ASSIGN_OR_RETURN(const c10::IValue value, Need(dict, key));
  if (!value.isBool()) return Mismatch(absl::StrCat("'", key, "' is no bool"));
  return value.toBool();
}

// A copy of the tensor under `key` in the parameter's element type, device and memory layout.
absl::StatusOr<at::Tensor> TensorLike(const at::Tensor& parameter, const Dict& dict,
                                      const char* key) {
  DDP_ASSIGN_OR_RETURN(const c10::IValue value, Need(dict, key));
  if (!value.isTensor() || !value.toTensor().defined()) {
    return Mismatch(absl::StrCat("'", key, "' is no tensor"));
  }
  if (value.toTensor().sizes() != parameter.sizes()) {
    return Mismatch(
        absl::StrCat("'", key, "' has shape [", absl::StrJoin(value.toTensor().sizes(), ", "),
                     "], the parameter [", absl::StrJoin(parameter.sizes(), ", "), "]"));
  }
  return at::empty_like(parameter.detach()).copy_(value.toTensor());
}

// One kind of optimizer: what its options and its state per parameter are called in Python.
class Kind {
 public:
  virtual ~Kind() = default;
  virtual absl::string_view name() const = 0;
  virtual bool Is(const OptimizerOptions& options) const = 0;

  virtual void WriteOptions(const OptimizerOptions& options, Dict& group) const = 0;
  // Sets `options` from `group`.
  virtual absl::Status ReadOptions(const Dict& group, OptimizerOptions& options) const = 0;

  // The state in Python's layout; unset if the optimizer has none for this parameter.
  virtual std::optional<Dict> WriteState(const OptimizerParamState& state) const = 0;
  // The state as a C++ object; null if there is none for this parameter.
  virtual absl::StatusOr<std::unique_ptr<OptimizerParamState>> ReadState(
      const Dict& dict, const at::Tensor& parameter, const OptimizerOptions& options) const = 0;
};

class Sgd : public Kind {
 public:
  absl::string_view name() const override { return "SGD"; }
  bool Is(const OptimizerOptions& options) const override {
    return dynamic_cast<const torch::optim::SGDOptions*>(&options) != nullptr;
  }

  void WriteOptions(const OptimizerOptions& given, Dict& group) const override {
    const auto& options = static_cast<const torch::optim::SGDOptions&>(given);
    group.insert("lr", options.lr());
    group.insert("momentum", options.momentum());
    group.insert("dampening", options.dampening());
    group.insert("weight_decay", options.weight_decay());
    group.insert("nesterov", options.nesterov());
    group.insert("maximize", false);
    group.insert("foreach", c10::IValue());
    group.insert("differentiable", false);
    group.insert("fused", c10::IValue());
  }

  absl::Status ReadOptions(const Dict& group, OptimizerOptions& given) const override {
    auto& options = static_cast<torch::optim::SGDOptions&>(given);
    DDP_ASSIGN_OR_RETURN(options.lr(), Number(group, "lr"));
    DDP_ASSIGN_OR_RETURN(options.momentum(), Number(group, "momentum"));
    DDP_ASSIGN_OR_RETURN(options.dampening(), Number(group, "dampening"));
    DDP_ASSIGN_OR_RETURN(options.weight_decay(), Number(group, "weight_decay"));
    DDP_ASSIGN_OR_RETURN(options.nesterov(), Flag(group, "nesterov"));
    return absl::OkStatus();
  }

  std::optional<Dict> WriteState(const OptimizerParamState& given) const override {
    const auto& state = static_cast<const torch::optim::SGDParamState&>(given);
    if (!state.momentum_buffer().defined()) return std::nullopt;
    Dict dict = NewDict();
    dict.insert("momentum_buffer", state.momentum_buffer().detach());
    return dict;
  }

  absl::StatusOr<std::unique_ptr<OptimizerParamState>> ReadState(
      const Dict& dict, const at::Tensor& parameter, const OptimizerOptions&) const override {
    const std::optional<c10::IValue> buffer = Find(dict, "momentum_buffer");
    if (!buffer.has_value() || buffer->isNone()) return nullptr;
    auto state = std::make_unique<torch::optim::SGDParamState>();
    DDP_ASSIGN_OR_RETURN(state->momentum_buffer(), TensorLike(parameter, dict, "momentum_buffer"));
    return state;
  }
};

template <typename Options, typename State, bool kDecoupled>
class AdamLike : public Kind {
 public:
  absl::string_view name() const override { return kDecoupled ? "AdamW" : "Adam"; }
  bool Is(const OptimizerOptions& options) const override {
    return dynamic_cast<const Options*>(&options) != nullptr;
  }

  void WriteOptions(const OptimizerOptions& given, Dict& group) const override {
    const auto& options = static_cast<const Options&>(given);
    group.insert("lr", options.lr());
    group.insert("betas", c10::IValue(options.betas()));
    group.insert("eps", options.eps());
    group.insert("weight_decay", options.weight_decay());
    group.insert("amsgrad", options.amsgrad());
    group.insert("maximize", false);
    group.insert("foreach", c10::IValue());
    group.insert("capturable", false);
    group.insert("differentiable", false);
    group.insert("fused", c10::IValue());
    group.insert("decoupled_weight_decay", kDecoupled);
  }

  absl::Status ReadOptions(const Dict& group, OptimizerOptions& given) const override {
    auto& options = static_cast<Options&>(given);
    DDP_ASSIGN_OR_RETURN(options.lr(), Number(group, "lr"));
    DDP_ASSIGN_OR_RETURN(options.eps(), Number(group, "eps"));
    DDP_ASSIGN_OR_RETURN(options.weight_decay(), Number(group, "weight_decay"));
    DDP_ASSIGN_OR_RETURN(options.amsgrad(), Flag(group, "amsgrad"));
    DDP_ASSIGN_OR_RETURN(const c10::IValue betas, Need(group, "betas"));
    std::vector<c10::IValue> pair;
    if (betas.isTuple()) pair = betas.toTupleRef().elements().vec();
    if (betas.isList()) pair = betas.toListRef().vec();
    const std::optional<double> first = pair.size() == 2 ? AsNumber(pair[0]) : std::nullopt;
    const std::optional<double> second = pair.size() == 2 ? AsNumber(pair[1]) : std::nullopt;
    if (!first.has_value() || !second.has_value()) return Mismatch("'betas' are no two numbers");
    options.betas() = std::make_tuple(*first, *second);
    return absl::OkStatus();
  }

  std::optional<Dict> WriteState(const OptimizerParamState& given) const override {
    const auto& state = static_cast<const State&>(given);
    Dict dict = NewDict();
    dict.insert("step", at::scalar_tensor(static_cast<double>(state.step()), at::kFloat));
    dict.insert("exp_avg", state.exp_avg().detach());
    dict.insert("exp_avg_sq", state.exp_avg_sq().detach());
    if (state.max_exp_avg_sq().defined()) {
      dict.insert("max_exp_avg_sq", state.max_exp_avg_sq().detach());
    }
    return dict;
  }

  absl::StatusOr<std::unique_ptr<OptimizerParamState>> ReadState(
      const Dict& dict, const at::Tensor& parameter, const OptimizerOptions& given) const override {
    if (dict.empty()) return nullptr;
    auto state = std::make_unique<State>();
    DDP_ASSIGN_OR_RETURN(const double step, Number(dict, "step"));
    constexpr double kMost = 9007199254740992.0;  // 2^53: beyond, a double skips integers
    if (!(step >= 0 && step <= kMost)) return Mismatch(absl::StrCat("'step' is ", step));
    state->step(std::llround(step));
    DDP_ASSIGN_OR_RETURN(state->exp_avg(), TensorLike(parameter, dict, "exp_avg"));
    DDP_ASSIGN_OR_RETURN(state->exp_avg_sq(), TensorLike(parameter, dict, "exp_avg_sq"));
    if (static_cast<const Options&>(given).amsgrad()) {
      DDP_ASSIGN_OR_RETURN(state->max_exp_avg_sq(), TensorLike(parameter, dict, "max_exp_avg_sq"));
    }
    return state;
  }
};

using Adam = AdamLike<torch::optim::AdamOptions, torch::optim::AdamParamState, false>;
using AdamW = AdamLike<torch::optim::AdamWOptions, torch::optim::AdamWParamState, true>;

absl::StatusOr<std::unique_ptr<Kind>> KindOf(const Optimizer& optimizer) {
  std::vector<std::unique_ptr<Kind>> kinds;
  kinds.push_back(std::make_unique<Sgd>());
  kinds.push_back(std::make_unique<Adam>());
  kinds.push_back(std::make_unique<AdamW>());
  for (std::unique_ptr<Kind>& kind : kinds) {
    bool all = kind->Is(optimizer.defaults());
    for (const OptimizerParamGroup& group : optimizer.param_groups()) {
      all = all && group.has_options() && kind->Is(group.options());
    }
    if (all) return std::move(kind);
  }
  return Mismatch("only SGD, Adam and AdamW can be saved and loaded");
}

// Refuses what another kind of optimizer wrote. Adam and AdamW have the same keys; which one it was
// is recorded by torch since 2.6.
absl::Status CheckKind(const Dict& group, const Kind& kind) {
  absl::string_view written = "an optimizer that is none of SGD, Adam and AdamW";
  if (Find(group, "momentum").has_value() && Find(group, "dampening").has_value()) {
    written = "SGD";
  } else if (Find(group, "betas").has_value() && Find(group, "amsgrad").has_value()) {
    const std::optional<c10::IValue> decoupled = Find(group, "decoupled_weight_decay");
    const bool told = decoupled.has_value() && decoupled->isBool();
    if (!told && kind.name() != "SGD") return absl::OkStatus();
    written = told && decoupled->toBool() ? "AdamW" : "Adam";
  }
  if (written == kind.name()) return absl::OkStatus();
  return Mismatch(absl::StrCat("written by ", written, ", but the optimizer is ", kind.name()));
}

// Everything that a load changes, prepared before anything is changed.
struct Update {
  std::vector<std::unique_ptr<OptimizerOptions>> options;  // one per group
  std::vector<std::pair<void*, std::unique_ptr<OptimizerParamState>>> states;
};

struct Slot {
  at::Tensor parameter;
  const OptimizerOptions* options;
};

absl::Status ReadGroup(const Kind& kind, const OptimizerParamGroup& group, const Dict& saved,
                       Update& update, std::unordered_map<int64_t, Slot>& slots) {
  DDP_RETURN_IF_ERROR(CheckKind(saved, kind));
  const std::optional<c10::IValue> maximize = Find(saved, "maximize");
  if (maximize.has_value() && maximize->isBool() && maximize->toBool()) {
    return Mismatch("'maximize' is true, which the C++ optimizers cannot do");
  }
  DDP_ASSIGN_OR_RETURN(const c10::IValue indices, Need(saved, "params"));
  if (!indices.isList()) return Mismatch("'params' is no list");
  const std::vector<c10::IValue> items = indices.toListRef().vec();
  if (items.size() != group.params().size()) {
    return Mismatch(absl::StrCat("it has ", items.size(), " parameters, the optimizer's has ",
                                 group.params().size()));
  }
  update.options.push_back(group.options().clone());
  DDP_RETURN_IF_ERROR(kind.ReadOptions(saved, *update.options.back()));
  for (size_t i = 0; i < items.size(); ++i) {
    if (!items[i].isInt() ||
        !slots.emplace(items[i].toInt(), Slot{group.params()[i], update.options.back().get()})
             .second) {
      return Mismatch("'params' are not different integers");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Update> Prepare(const Kind& kind, const Optimizer& optimizer,
                               const c10::IValue& given) {
  if (!given.isGenericDict()) return Mismatch(absl::StrCat("need a dict, got ", given.tagKind()));
  const Dict root = given.toGenericDict();
  DDP_ASSIGN_OR_RETURN(const c10::IValue groups, Need(root, "param_groups"));
  DDP_ASSIGN_OR_RETURN(const c10::IValue states, Need(root, "state"));
  if (!groups.isList() || !states.isGenericDict()) {
    return Mismatch("'param_groups' is no list or 'state' no dict");
  }
  const std::vector<c10::IValue> saved_groups = groups.toListRef().vec();
  const std::vector<OptimizerParamGroup>& own_groups = optimizer.param_groups();
  if (saved_groups.size() != own_groups.size()) {
    return Mismatch(absl::StrCat("it has ", saved_groups.size(),
                                 " parameter groups, the optimizer ", own_groups.size()));
  }
  Update update;
  std::unordered_map<int64_t, Slot> slots;
  for (size_t i = 0; i < own_groups.size(); ++i) {
    if (!saved_groups[i].isGenericDict()) return Mismatch("a parameter group that is no dict");
    DDP_RETURN_IF_ERROR(
        Annotate(ReadGroup(kind, own_groups[i], saved_groups[i].toGenericDict(), update, slots),
                 absl::StrCat("parameter group ", i)));
  }
  for (const auto& entry : states.toGenericDict()) {
    if (!entry.key().isInt() || !entry.value().isGenericDict()) {
      return Mismatch("'state' does not map integers to dicts");
    }
    const int64_t index = entry.key().toInt();
    const auto slot = slots.find(index);
    if (slot == slots.end()) {
      return Mismatch(absl::StrCat("state of parameter ", index, ", which no group has"));
    }
    absl::StatusOr<std::unique_ptr<OptimizerParamState>> state = kind.ReadState(
        entry.value().toGenericDict(), slot->second.parameter, *slot->second.options);
    if (!state.ok()) return Annotate(state.status(), absl::StrCat("parameter ", index));
    if (*state == nullptr) continue;
    update.states.emplace_back(slot->second.parameter.unsafeGetTensorImpl(), *std::move(state));
  }
  return update;
}

}  // namespace

absl::StatusOr<c10::impl::GenericDict> OptimizerState(const Optimizer& optimizer) {
  DDP_ASSIGN_OR_RETURN(const std::unique_ptr<Kind> kind, KindOf(optimizer));
  Dict states = NewDict(c10::IntType::get());
  c10::impl::GenericList groups(c10::AnyType::get());
  int64_t index = 0;
  for (const OptimizerParamGroup& group : optimizer.param_groups()) {
    Dict saved = NewDict();
    kind->WriteOptions(group.options(), saved);
    c10::impl::GenericList indices(c10::AnyType::get());
    for (const at::Tensor& parameter : group.params()) {
      const auto state = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (state != optimizer.state().end()) {
        std::optional<Dict> dict = kind->WriteState(*state->second);
        if (dict.has_value()) states.insert(index, *std::move(dict));
      }
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

absl::Status LoadOptimizerState(Optimizer& optimizer, const c10::IValue& state) {
  return CatchStatus("optimizer state", [&]() -> absl::Status {
    DDP_ASSIGN_OR_RETURN(const std::unique_ptr<Kind> kind, KindOf(optimizer));
    DDP_ASSIGN_OR_RETURN(Update update, Prepare(*kind, optimizer, state));
    for (size_t i = 0; i < update.options.size(); ++i) {
      optimizer.param_groups()[i].set_options(std::move(update.options[i]));
    }
    optimizer.state().clear();
    for (auto& [parameter, param_state] : update.states) {
      optimizer.state()[parameter] = std::move(param_state);
    }
    return absl::OkStatus();
  });
}

}  // namespace ddp::checkpoint
