#include "ddp/trainer/callbacks/ema.h"

#include <algorithm>
#include <utility>

#include "ATen/ops/_foreach_lerp.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "c10/core/GradMode.h"
#include "ddp/data_parallel.h"

namespace ddp::trainer {
namespace {

constexpr char kWeights[] = "weights";
constexpr char kUpdates[] = "updates";

bool HaveSameType(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type();
}

}  // namespace

absl::Status Ema::CopyTo(torch::nn::Module& module) const {
  if (average_.empty()) {
    return absl::FailedPreconditionError("there is no average before a run has begun");
  }
  const c10::NoGradGuard no_grad;
  const auto parameters = module.named_parameters();
  for (const auto& [name, average] : average_) {
    const at::Tensor* parameter = parameters.find(name);
    if (parameter == nullptr || parameter->sizes() != average.sizes()) {
      return absl::InvalidArgumentError(
          absl::StrCat("the average has a parameter '", name, "', ", average.toString(), " ",
                       "of another model: this one ",
                       parameter == nullptr ? "does not have it" : "has it in another shape"));
    }
  }
  for (const auto& [name, average] : average_) {
    at::Tensor parameter = parameters[name];
    parameter.copy_(average);
  }
  return absl::OkStatus();
}

absl::Status Ema::OnSetUp(CallbackContext& run) {
  weights_.clear();
  average_.clear();
  kept_.clear();
  updates_ = 0;
  is_loaded_ = false;
  for (const auto& [name, parameter] : TrainableParameters(run.module())) {
    const at::Tensor weights = parameter.detach();
    const at::ScalarType type = weights.scalar_type();
    weights_.push_back(weights);
    average_.emplace_back(name, weights.to(at::isReducedFloatingType(type) ? at::kFloat : type,
                                           /*non_blocking=*/false, /*copy=*/true));
  }
  kept_.resize(weights_.size());
  return absl::OkStatus();
}

absl::Status Ema::OnStart(CallbackContext&) {
  if (is_loaded_) return absl::OkStatus();
  // A checkpoint without an average may have changed the weights.
  const c10::NoGradGuard no_grad;
  for (size_t i = 0; i < weights_.size(); ++i) average_[i].second.copy_(weights_[i]);
  return absl::OkStatus();
}

absl::Status Ema::OnStepEnd(CallbackContext&, const at::Tensor&) {
  double decay = options_.decay;
  if (options_.warmup) {
    const auto n = static_cast<double>(updates_);
    decay = std::min(decay, (1 + n) / (10 + n));
  }
  ++updates_;
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> averages, weights;
  for (size_t i = 0; i < weights_.size(); ++i) {
    const at::Tensor& average = average_[i].second;
    if (HaveSameType(average, weights_[i])) {
      averages.push_back(average);
      weights.push_back(weights_[i]);
    } else {
      average.lerp_(weights_[i].to(average.scalar_type()), 1 - decay);
    }
  }
  if (!averages.empty()) at::_foreach_lerp_(averages, weights, 1 - decay);
  return absl::OkStatus();
}

absl::Status Ema::OnEvaluationBegin(CallbackContext&) {
  if (options_.eval) Swap();
  return absl::OkStatus();
}

absl::Status Ema::OnEvaluationEnd(CallbackContext&, const std::map<std::string, double>&) {
  if (is_swapped_) Swap();
  return absl::OkStatus();
}

void Ema::OnException(CallbackContext&, const absl::Status&) {
  if (is_swapped_) Swap();
}

// Copies, since buckets, optimizers and shared memory refer to the parameters' memory.
void Ema::Swap() {
  const c10::NoGradGuard no_grad;
  is_swapped_ = !is_swapped_;
  for (size_t i = 0; i < weights_.size(); ++i) {
    const at::Tensor& average = average_[i].second;
    if (HaveSameType(average, weights_[i])) {
      const at::Tensor copy = weights_[i].clone();
      weights_[i].copy_(average);
      average.copy_(copy);
    } else if (is_swapped_) {  // the module has the average rounded, so that it stays here, too
      kept_[i] = weights_[i].clone();
      weights_[i].copy_(average);
    } else {
      weights_[i].copy_(kept_[i]);
      kept_[i].reset();
    }
  }
}

absl::StatusOr<checkpoint::State> Ema::state_dict() {
  checkpoint::State state;
  checkpoint::Dict weights = checkpoint::NewTree();
  for (const auto& [name, average] : average_) weights.insert(name, average);
  state.root.insert(kWeights, std::move(weights));
  state.root.insert(kUpdates, updates_);
  return state;
}

absl::Status Ema::CheckStateDict(const checkpoint::State& state) const {
  if (!state.root.contains(kWeights) || !state.root.at(kWeights).isGenericDict() ||
      !state.root.contains(kUpdates) || !state.root.at(kUpdates).isInt()) {
    return absl::InvalidArgumentError(
        absl::StrCat("has no '", kWeights, "', or no '", kUpdates, "'"));
  }
  const checkpoint::Dict weights = state.root.at(kWeights).toGenericDict();
  for (size_t i = 0; i < weights_.size(); ++i) {
    const auto& [name, average] = average_[i];
    const absl::Status fits = checkpoint::CheckTensor(weights, name, average);
    // Older checkpoints have the average in the parameter's 16 bits.
    if (!fits.ok() && !checkpoint::CheckTensor(weights, name, weights_[i]).ok()) return fits;
  }
  return absl::OkStatus();
}

absl::Status Ema::load_state_dict(const checkpoint::State& state, checkpoint::LoadNotes&) {
  const c10::NoGradGuard no_grad;
  const checkpoint::Dict weights = state.root.at(kWeights).toGenericDict();
  for (const auto& [name, average] : average_) average.copy_(weights.at(name).toTensor());
  updates_ = state.root.at(kUpdates).toInt();
  is_loaded_ = true;
  return absl::OkStatus();
}

}  // namespace ddp::trainer
