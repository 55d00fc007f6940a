#include "ddp/trainer/step_optimizer.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <sstream>
#include <typeinfo>
#include <unordered_set>
#include <utility>

#include "ATen/core/ivalue.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/option_error.h"
#include "base/option_text.h"
#include "base/options.h"
#include "base/status.h"
#include "c10/core/GradMode.h"
#include "c10/util/Type.h"
#include "ddp/hooks/comm_hook.h"
#include "ddp/zero/sharded_optimizer.h"
#include "ddp/zero/zero_redundancy_optimizer.h"
#include "optim/kind.h"

namespace ddp::trainer {
namespace {

// The gradients of optimizers' parameters, which they have again at its end: what a backward adds
// to them in between is dropped.
class KeptGradients {
 public:
  KeptGradients() = default;
  KeptGradients(const KeptGradients&) = delete;
  KeptGradients& operator=(const KeptGradients&) = delete;
  // The last one first: of a parameter that is listed twice, the first entry has the gradient.
  ~KeptGradients() {
    for (auto it = kept_.rbegin(); it != kept_.rend(); ++it) {
      it->first.mutable_grad() = std::move(it->second);
    }
  }

  // But for parameters in `except`, which both have. `copies`: of views of a wrapper's buckets,
  // where it may reduce other gradients.
  void Keep(const torch::optim::Optimizer& optimizer,
            const std::unordered_set<const c10::TensorImpl*>& except, bool copies) {
    const c10::NoGradGuard no_grad;
    for (const auto& group : optimizer.param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        if (except.contains(parameter.unsafeGetTensorImpl())) continue;
        at::Tensor gradient = std::exchange(parameter.mutable_grad(), at::Tensor());
        if (copies && gradient.defined()) gradient = gradient.clone();
        kept_.emplace_back(parameter, std::move(gradient));
      }
    }
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> kept_;
};

// An option of an optimizer, as the user would write it.
std::string TextOfValue(const c10::IValue& value) {
  if (value.isDouble()) return FormatOption(value.toDouble());
  std::ostringstream text;
  if (!value.isTuple()) {
    text << value;
    return text.str();
  }
  std::vector<std::string> parts;
  const std::vector<c10::IValue> elements = value.toTupleRef().elements().vec();
  for (const c10::IValue& element : elements) parts.push_back(TextOfValue(element));
  return absl::StrJoin(parts, ",");
}

// Of complex numbers, torch's clamp throws in the first step.
absl::Status CheckClipValue(double clip_value, const NamedTensors& parameters) {
  for (const auto& [name, parameter] : parameters) {
    if (clip_value == 0 || !parameter.is_complex()) continue;
    return OptionError(
        "clip_value", FormatOption(clip_value),
        absl::StrCat("limits real numbers, and parameter '", name, "' is complex; use clip_norm"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<StepOptimizer> MakeStepOptimizer(
    const session::Session& session, const TrainerOptions& options,
    const OptimizerOptions& optimizer, const OptimizerMaker& maker, const NamedTensors& parameters,
    const std::shared_ptr<ModelWrapper>& parallel, bool all_ranks_write) {
  const c10::intrusive_ptr<c10d::ProcessGroup>& group = session.process_group();
  StepOptimizer made;
  std::unique_ptr<GradScaler> scaler = GradScaler::Disabled();
  if (options.precision == "fp16") {
    DDP_ASSIGN_OR_RETURN(scaler, GradScaler::Create(options.grad_scaler, session.device(), group));
  }
  absl::StatusOr<ParameterGroups> all = GroupParameters(optimizer, maker, parameters);
  DDP_RETURN_IF_ERROR(InGroup("optimizer", all.status()));
  DDP_RETURN_IF_ERROR(CheckClipValue(options.clip_value, parameters));
  if (all->groups.size() > 1) made.groups = std::move(all->descriptions);
  if (options.zero.stage < 2) {  // stage 2 reduces gradients itself
    DDP_RETURN_IF_ERROR(
        InGroup("comm_hook", hooks::Register(options.comm_hook, group, *parallel, &made.hook)));
  }
  if (options.zero.stage == 0) {
    made.optimizer = MakeReplicated(all->make(std::move(all->groups)), parallel, std::move(scaler));
    made.optimizer->NameParameters(std::move(all->names), all_ranks_write);
    return made;
  }
  zero::ZeroOptions zero = options.zero;
  zero.bucket_cap_mb = options.data_parallel.bucket_cap_mb.value_or(zero.bucket_cap_mb);
  zero.find_unused_parameters = options.data_parallel.find_unused_parameters;
  if (zero.stage == 2) {
    DDP_ASSIGN_OR_RETURN(zero.gradient_dtype, hooks::WireDtypeOf(options.comm_hook));
  }
  DDP_ASSIGN_OR_RETURN(auto sharded,
                       zero::ZeroRedundancyOptimizer::Create(std::move(all->groups), group,
                                                             std::move(all->make), zero));
  made.optimizer = zero::MakeSharded(std::move(sharded), std::move(scaler), &session,
                                     /*places=*/!all_ranks_write);
  made.optimizer->NameParameters(std::move(all->names), all_ranks_write);
  return made;
}

bool HasSavedState(const DistributedOptimizer& optimizer, const TrainerOptions& options) {
  return options.checkpoint.save.save_optimizer || optim::KindOf(optimizer.optimizer()).ok();
}

void ListStepOptions(const std::string& name, const torch::optim::Optimizer& optimizer,
                     const Schedule& schedule, OptionList& list) {
  const std::string prefix = name.empty() ? "" : absl::StrCat(name, ".");
  const auto add = [&](absl::string_view path, const std::string& value) {
    list.Add({.path = absl::StrCat(prefix, path), .get = [value] { return value; }});
  };
  const absl::StatusOr<const optim::OptimizerKind*> kind = optim::KindOf(optimizer);
  add("optimizer.kind",
      kind.ok() ? std::string((*kind)->name()) : c10::demangle(typeid(optimizer).name()));
  const std::vector<torch::optim::OptimizerParamGroup>& groups = optimizer.param_groups();
  for (size_t g = 0; g < groups.size(); ++g) {
    const std::string group =
        groups.size() == 1 ? "optimizer." : absl::StrCat("optimizer.group_", g, ".");
    optim::Dict options = optim::NewDict();
    if (kind.ok()) {
      (*kind)->WriteOptions(groups[g].options(), options);
    } else {
      options.insert("lr", groups[g].options().get_lr());
    }
    for (const auto& entry : options) {
      add(absl::StrCat(group, entry.key().toStringRef()), TextOfValue(entry.value()));
    }
    add(absl::StrCat(group, "parameters"), absl::StrCat(groups[g].params().size()));
  }
  ScheduleOptions own = schedule.options();
  const OptionList given = ListOptions(own);
  for (const OptionRef& option : given.options()) {
    add(absl::StrCat("schedule.", option.path), option.get());
  }
  // Of a program's own function, which has no options.
  constexpr int64_t kParts = 4;
  const int64_t last = std::max<int64_t>(0, schedule.total_steps() - 1);
  std::vector<std::string> factors;
  for (int64_t part = 0; part <= kParts; ++part) {
    factors.push_back(
        FormatOption(schedule.Factor(last / kParts * part + last % kParts * part / kParts)));
  }
  add("schedule.factors", absl::StrJoin(factors, ", "));
}

void BackwardOf(DistributedOptimizer& optimizer, const at::Tensor& loss,
                const std::vector<DistributedOptimizer*>& others, const TrainerOptions& options) {
  if (others.empty()) return optimizer.Backward(loss);
  std::vector<at::Tensor> inputs;
  std::unordered_set<const c10::TensorImpl*> own;
  for (const auto& group : optimizer.optimizer().param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      own.insert(parameter.unsafeGetTensorImpl());
      if (parameter.requires_grad()) inputs.push_back(parameter);
    }
  }
  if (options.zero.stage == 2) {
    // The others would reduce what reaches their parameters at once, so that nothing may.
    if (!inputs.empty()) optimizer.Backward(loss, inputs);
    return;
  }
  // Not with chosen inputs: the wrapper of a model that the loss reads may wait for its gradients.
  KeptGradients kept;
  for (DistributedOptimizer* other : others) {
    kept.Keep(other->optimizer(), own, options.data_parallel.gradient_as_bucket_view);
  }
  loss.backward();
}

}  // namespace ddp::trainer
