#include "optim/kind.h"

#include <ATen/Functions.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"

namespace ddp::optim {

using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;

absl::StatusOr<const OptimizerKind*> KindOf(const Optimizer& optimizer) {
  for (const auto& [name, kind] : OptimizerKindRegistry::All()) {
    bool all = kind()->Is(optimizer.defaults());
    for (const OptimizerParamGroup& group : optimizer.param_groups()) {
      all = all && group.has_options() && kind()->Is(group.options());
    }
    if (all) return kind();
  }
  return StateError(absl::StrCat("the state of this optimizer is not known: it is none of ",
                                 absl::StrJoin(OptimizerKindRegistry::Names(), ", "),
                                 "; register an OptimizerKind for it (optim/kind.h)"));
}

Dict NewDict() { return Dict(c10::StringType::get(), c10::AnyType::get()); }

absl::Status StateError(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("optimizer state: ", what));
}

std::optional<c10::IValue> Find(const Dict& dict, const char* key) {
  const auto found = dict.find(key);
  if (found == dict.end()) return std::nullopt;
  return found->value();
}

absl::StatusOr<c10::IValue> Need(const Dict& dict, const char* key) {
  std::optional<c10::IValue> value = Find(dict, key);
  if (!value.has_value()) return StateError(absl::StrCat("no key '", key, "'"));
  return *std::move(value);
}

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
  if (!number.has_value()) return StateError(absl::StrCat("'", key, "' is not a number"));
  return *number;
}

absl::StatusOr<bool> Flag(const Dict& dict, const char* key) {
  DDP_ASSIGN_OR_RETURN(const c10::IValue value, Need(dict, key));
  if (!value.isBool()) return StateError(absl::StrCat("'", key, "' is no bool"));
  return value.toBool();
}

absl::StatusOr<at::Tensor> TensorLike(const at::Tensor& parameter, const Dict& dict,
                                      const char* key) {
  DDP_ASSIGN_OR_RETURN(const c10::IValue value, Need(dict, key));
  if (!value.isTensor() || !value.toTensor().defined()) {
    return StateError(absl::StrCat("'", key, "' is no tensor"));
  }
  if (value.toTensor().sizes() != parameter.sizes()) {
    return StateError(
        absl::StrCat("'", key, "' has shape [", absl::StrJoin(value.toTensor().sizes(), ", "),
                     "], the parameter [", absl::StrJoin(parameter.sizes(), ", "), "]"));
  }
  return at::empty_like(parameter.detach()).copy_(value.toTensor());
}

absl::StatusOr<int64_t> Steps(const Dict& dict) {
  DDP_ASSIGN_OR_RETURN(const double step, Number(dict, "step"));
  constexpr double kMost = 9007199254740992.0;  // 2^53: beyond, a double skips integers
  if (!(step >= 0 && step <= kMost)) return StateError(absl::StrCat("'step' is ", step));
  return std::llround(step);
}

// The optimizers of torch::optim that update element by element.
namespace {

at::Tensor StepTensor(int64_t step) {
  return at::scalar_tensor(static_cast<double>(step), at::kFloat);
}

class Sgd : public OptimizerKind {
 public:
  absl::string_view name() const override { return "SGD"; }
  bool Is(const OptimizerOptions& options) const override {
    return dynamic_cast<const torch::optim::SGDOptions*>(&options) != nullptr;
  }
  bool MatchesGroup(const Dict& group) const override {
    return group.contains("momentum") && group.contains("dampening");
  }
  std::vector<std::string> PerElement(const OptimizerOptions& options) const override {
    if (static_cast<const torch::optim::SGDOptions&>(options).momentum() == 0) return {};
    return {"momentum_buffer"};
  }
  std::vector<std::string> Scalars() const override { return {}; }

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
class AdamLike : public OptimizerKind {
 public:
  absl::string_view name() const override { return kDecoupled ? "AdamW" : "Adam"; }
  bool Is(const OptimizerOptions& options) const override {
    return dynamic_cast<const Options*>(&options) != nullptr;
  }
  // Adam and AdamW have the same keys; since torch 2.6, `decoupled_weight_decay` distinguishes
  // them.
  bool MatchesGroup(const Dict& group) const override {
    if (!group.contains("betas") || !group.contains("amsgrad")) return false;
    const std::optional<c10::IValue> decoupled = Find(group, "decoupled_weight_decay");
    return !decoupled.has_value() || !decoupled->isBool() || decoupled->toBool() == kDecoupled;
  }
  std::vector<std::string> PerElement(const OptimizerOptions& options) const override {
    if (!static_cast<const Options&>(options).amsgrad()) return {"exp_avg", "exp_avg_sq"};
    return {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  }
  std::vector<std::string> Scalars() const override { return {"step"}; }

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
    if (!first.has_value() || !second.has_value()) {
      return StateError("'betas' is not a pair of numbers");
    }
    options.betas() = std::make_tuple(*first, *second);
    return absl::OkStatus();
  }

  std::optional<Dict> WriteState(const OptimizerParamState& given) const override {
    const auto& state = static_cast<const State&>(given);
    Dict dict = NewDict();
    dict.insert("step", StepTensor(state.step()));
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
    DDP_ASSIGN_OR_RETURN(const int64_t step, Steps(dict));
    state->step(step);
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

class Adagrad : public OptimizerKind {
 public:
  absl::string_view name() const override { return "Adagrad"; }
  bool Is(const OptimizerOptions& options) const override {
    return dynamic_cast<const torch::optim::AdagradOptions*>(&options) != nullptr;
  }
  bool MatchesGroup(const Dict& group) const override {
    return group.contains("lr_decay") && group.contains("initial_accumulator_value");
  }
  std::vector<std::string> PerElement(const OptimizerOptions&) const override { return {"sum"}; }
  std::vector<std::string> Scalars() const override { return {"step"}; }

  void WriteOptions(const OptimizerOptions& given, Dict& group) const override {
    const auto& options = static_cast<const torch::optim::AdagradOptions&>(given);
    group.insert("lr", options.lr());
    group.insert("lr_decay", options.lr_decay());
    group.insert("eps", options.eps());
    group.insert("weight_decay", options.weight_decay());
    group.insert("initial_accumulator_value", options.initial_accumulator_value());
    group.insert("foreach", c10::IValue());
    group.insert("maximize", false);
    group.insert("differentiable", false);
    group.insert("fused", c10::IValue());
  }

  absl::Status ReadOptions(const Dict& group, OptimizerOptions& given) const override {
    auto& options = static_cast<torch::optim::AdagradOptions&>(given);
    DDP_ASSIGN_OR_RETURN(options.lr(), Number(group, "lr"));
    DDP_ASSIGN_OR_RETURN(options.lr_decay(), Number(group, "lr_decay"));
    DDP_ASSIGN_OR_RETURN(options.eps(), Number(group, "eps"));
    DDP_ASSIGN_OR_RETURN(options.weight_decay(), Number(group, "weight_decay"));
    DDP_ASSIGN_OR_RETURN(options.initial_accumulator_value(),
                         Number(group, "initial_accumulator_value"));
    return absl::OkStatus();
  }

  std::optional<Dict> WriteState(const OptimizerParamState& given) const override {
    const auto& state = static_cast<const torch::optim::AdagradParamState&>(given);
    Dict dict = NewDict();
    dict.insert("step", StepTensor(state.step()));
    dict.insert("sum", state.sum().detach());
    return dict;
  }

  absl::StatusOr<std::unique_ptr<OptimizerParamState>> ReadState(
      const Dict& dict, const at::Tensor& parameter, const OptimizerOptions&) const override {
    auto state = std::make_unique<torch::optim::AdagradParamState>();
    DDP_ASSIGN_OR_RETURN(const int64_t step, Steps(dict));
    state->step(step);
    DDP_ASSIGN_OR_RETURN(state->sum(), TensorLike(parameter, dict, "sum"));
    return state;
  }
};

class RmsProp : public OptimizerKind {
 public:
  absl::string_view name() const override { return "RMSprop"; }
  bool Is(const OptimizerOptions& options) const override {
    return dynamic_cast<const torch::optim::RMSpropOptions*>(&options) != nullptr;
  }
  bool MatchesGroup(const Dict& group) const override {
    return group.contains("alpha") && group.contains("centered");
  }
  std::vector<std::string> PerElement(const OptimizerOptions& given) const override {
    const auto& options = static_cast<const torch::optim::RMSpropOptions&>(given);
    std::vector<std::string> names = {"square_avg"};
    if (options.momentum() > 0) names.push_back("momentum_buffer");
    if (options.centered()) names.push_back("grad_avg");
    return names;
  }
  std::vector<std::string> Scalars() const override { return {"step"}; }

  void WriteOptions(const OptimizerOptions& given, Dict& group) const override {
    const auto& options = static_cast<const torch::optim::RMSpropOptions&>(given);
    group.insert("lr", options.lr());
    group.insert("momentum", options.momentum());
    group.insert("alpha", options.alpha());
    group.insert("eps", options.eps());
    group.insert("centered", options.centered());
    group.insert("weight_decay", options.weight_decay());
    group.insert("capturable", false);
    group.insert("foreach", c10::IValue());
    group.insert("maximize", false);
    group.insert("differentiable", false);
  }

  absl::Status ReadOptions(const Dict& group, OptimizerOptions& given) const override {
    auto& options = static_cast<torch::optim::RMSpropOptions&>(given);
    DDP_ASSIGN_OR_RETURN(options.lr(), Number(group, "lr"));
    DDP_ASSIGN_OR_RETURN(options.momentum(), Number(group, "momentum"));
    DDP_ASSIGN_OR_RETURN(options.alpha(), Number(group, "alpha"));
    DDP_ASSIGN_OR_RETURN(options.eps(), Number(group, "eps"));
    DDP_ASSIGN_OR_RETURN(options.centered(), Flag(group, "centered"));
    DDP_ASSIGN_OR_RETURN(options.weight_decay(), Number(group, "weight_decay"));
    return absl::OkStatus();
  }

  std::optional<Dict> WriteState(const OptimizerParamState& given) const override {
    const auto& state = static_cast<const torch::optim::RMSpropParamState&>(given);
    Dict dict = NewDict();
    dict.insert("step", StepTensor(state.step()));
    dict.insert("square_avg", state.square_avg().detach());
    if (state.momentum_buffer().defined()) {
      dict.insert("momentum_buffer", state.momentum_buffer().detach());
    }
    if (state.grad_avg().defined()) dict.insert("grad_avg", state.grad_avg().detach());
    return dict;
  }

  absl::StatusOr<std::unique_ptr<OptimizerParamState>> ReadState(
      const Dict& dict, const at::Tensor& parameter, const OptimizerOptions& given) const override {
    if (dict.empty()) return nullptr;
    const auto& options = static_cast<const torch::optim::RMSpropOptions&>(given);
    auto state = std::make_unique<torch::optim::RMSpropParamState>();
    DDP_ASSIGN_OR_RETURN(const int64_t step, Steps(dict));
    state->step(step);
    DDP_ASSIGN_OR_RETURN(state->square_avg(), TensorLike(parameter, dict, "square_avg"));
    if (options.momentum() > 0) {
      DDP_ASSIGN_OR_RETURN(state->momentum_buffer(),
                           TensorLike(parameter, dict, "momentum_buffer"));
    }
    if (options.centered()) {
      DDP_ASSIGN_OR_RETURN(state->grad_avg(), TensorLike(parameter, dict, "grad_avg"));
    }
    return state;
  }
};

template <typename Kind>
const OptimizerKind* The() {
  static const Kind kind;
  return &kind;
}

const Registration<OptimizerKindRegistry> kAdagrad("Adagrad", &The<Adagrad>);
const Registration<OptimizerKindRegistry> kAdam("Adam", &The<Adam>);
const Registration<OptimizerKindRegistry> kAdamW("AdamW", &The<AdamW>);
const Registration<OptimizerKindRegistry> kRmsProp("RMSprop", &The<RmsProp>);
const Registration<OptimizerKindRegistry> kSgd("SGD", &The<Sgd>);

}  // namespace
}  // namespace ddp::optim
