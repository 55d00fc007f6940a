#include "optim/kind.h"

#include <ATen/Functions.h>

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"

namespace ddp::optim {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

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

// Also of a 0-dim tensor, as Python has it for steps and for learning rates under capturable.
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

// A copy of the tensor under `key` in the parameter's element type, device and memory layout.
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

}  // namespace ddp::optim
