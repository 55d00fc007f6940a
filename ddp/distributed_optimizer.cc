#include "ddp/distributed_optimizer.h"

#include <algorithm>
#include <unordered_set>
#include <utility>
#include <vector>

#include "ATen/ops/_foreach_mul.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/zeros_like.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "c10/core/GradMode.h"
#include "c10/core/ScalarType.h"
#include "ddp/clip_grad.h"
#include "ddp/model_wrapper.h"
#include "optim/state_dict.h"

namespace ddp {
namespace {

using checkpoint::LoadNotes;
using checkpoint::State;

// Removes entries that the optimizer does not keep with the options that it has now.
void ForgetEntries(const std::vector<std::string>& names, const optim::Dict& group,
                   optim::Dict& states) {
  const std::optional<c10::IValue> numbers = optim::Find(group, "params");
  if (names.empty() || !numbers || !numbers->isList()) return;
  for (const c10::IValue& number : numbers->toListRef()) {
    const auto found = states.find(number);
    if (found == states.end() || !found->value().isGenericDict()) continue;
    optim::Dict entries = found->value().toGenericDict().copy();
    for (const std::string& name : names) (void)entries.erase(name);
    states.insert_or_assign(number, entries);
  }
}

// Zeros in the place of a tensor, or of a list of pieces of one.
c10::IValue ZerosLike(const c10::IValue& value) {
  if (!value.isList()) return at::zeros_like(value.toTensor());
  c10::impl::GenericList pieces(c10::AnyType::get());
  for (const c10::IValue& piece : value.toListRef()) {
    pieces.push_back(piece.isTensor() ? at::zeros_like(piece.toTensor()) : piece);
  }
  return pieces;
}

// Adds entries that the optimizer keeps only with the options that it has now: as in its first
// step, from zeros. `kept`: entries of the same shapes, which it has kept before.
void BeginEntries(const std::vector<std::string>& names, const std::vector<std::string>& kept,
                  const optim::Dict& group, optim::Dict& states) {
  const std::optional<c10::IValue> numbers = optim::Find(group, "params");
  if (names.empty() || kept.empty() || !numbers || !numbers->isList()) return;
  for (const c10::IValue& number : numbers->toListRef()) {
    const auto found = states.find(number);
    if (found == states.end() || !found->value().isGenericDict()) continue;
    optim::Dict entries = found->value().toGenericDict().copy();
    const std::optional<c10::IValue> like = optim::Find(entries, kept[0].c_str());
    if (!like || !(like->isList() || (like->isTensor() && like->toTensor().defined()))) continue;
    for (const std::string& name : names) {
      if (!entries.contains(name)) entries.insert(name, ZerosLike(*like));
    }
    states.insert_or_assign(number, entries);
  }
}

// The states of parameters, whose keys may be numbers as text: of a checkpoint in a format whose
// names are paths.
optim::Dict WithNumbers(const optim::Dict& states) {
  optim::Dict numbered(c10::IntType::get(), c10::AnyType::get());
  for (const auto& entry : states) {
    const c10::IValue key = entry.key();
    int64_t number = 0;
    const bool is_text = key.isString() && absl::SimpleAtoi(key.toStringRef(), &number);
    numbered.insert(is_text ? c10::IValue(number) : key, entry.value());
  }
  return numbered;
}

// An optimizer's state with the options of `optimizer` in place of the saved ones, but for those
// that the load refuses. A state that does not fit is returned as it is: the load says what is
// wrong.
c10::IValue WithOptionsOf(const torch::optim::Optimizer& optimizer, const optim::Dict& saved,
                          LoadNotes& notes) {
  const absl::StatusOr<const optim::OptimizerKind*> found = optim::KindOf(optimizer);
  if (!found.ok()) return saved;
  const optim::OptimizerKind& kind = **found;
  optim::Dict root = saved.copy();
  const std::optional<c10::IValue> saved_groups = optim::Find(root, "param_groups");
  const std::optional<c10::IValue> saved_states = optim::Find(root, "state");
  const auto& groups = optimizer.param_groups();
  if (!saved_groups || !saved_groups->isList() || !saved_states || !saved_states->isGenericDict() ||
      saved_groups->toListRef().size() != groups.size()) {
    return saved;
  }
  optim::Dict states = WithNumbers(saved_states->toGenericDict());
  c10::impl::GenericList changed(c10::AnyType::get());
  for (size_t g = 0; g < groups.size(); ++g) {
    const c10::IValue saved_group = saved_groups->toListRef()[g];
    if (!saved_group.isGenericDict()) return saved;
    optim::Dict group = saved_group.toGenericDict().copy();
    const torch::optim::OptimizerOptions& options = groups[g].options();
    const std::unique_ptr<torch::optim::OptimizerOptions> before = options.clone();
    if (!kind.MatchesGroup(group) || !kind.ReadOptions(group, *before).ok()) return saved;
    optim::Dict now = optim::NewDict(), then = optim::NewDict();
    kind.WriteOptions(options, now);
    kind.WriteOptions(*before, then);
    for (const auto& entry : now) {
      const std::string name = entry.key().toStringRef();
      group.insert_or_assign(entry.key(), entry.value());
      // Saved is the rate of a step. The schedule compares the rates before it.
      if (name == "lr") continue;
      notes.AddDifference(absl::StrCat("optimizer.", name), entry.value(), then.at(entry.key()));
    }
    const std::vector<std::string> keeps = kind.PerElement(options),
                                   kept = kind.PerElement(*before);
    const auto without = [](std::vector<std::string> names,
                            const std::vector<std::string>& others) {
      std::erase_if(names, [&](const std::string& name) {
        return std::find(others.begin(), others.end(), name) != others.end();
      });
      return names;
    };
    ForgetEntries(without(kept, keeps), group, states);
    BeginEntries(without(keeps, kept), kept, group, states);
    changed.push_back(std::move(group));
  }
  root.insert_or_assign("param_groups", std::move(changed));
  root.insert_or_assign("state", std::move(states));
  return root;
}

// The element type of a tensor, or of a list of pieces of one; nullopt if there is none.
std::optional<at::ScalarType> DtypeOf(const c10::IValue& value) {
  if (value.isTensor()) {
    if (!value.toTensor().defined()) return std::nullopt;
    return value.toTensor().scalar_type();
  }
  if (!value.isList() || value.toListRef().empty()) return std::nullopt;
  return DtypeOf(value.toListRef()[0]);
}

// `state` with a tensor without values, of the parameter's shape, for each list of pieces: what a
// check of names and shapes needs.
optim::Dict WithoutPieces(const optim::Dict& state, const torch::optim::Optimizer& optimizer) {
  const std::optional<c10::IValue> states = optim::Find(state, "state");
  if (!states || !states->isGenericDict()) return state;
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.param_groups()) {
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  }
  optim::Dict whole(c10::IntType::get(), c10::AnyType::get());
  for (const auto& entry : states->toGenericDict()) {
    if (!entry.key().isInt() || !entry.value().isGenericDict()) return state;
    optim::Dict entries = entry.value().toGenericDict().copy();
    for (const auto& one : entry.value().toGenericDict()) {
      const auto number = static_cast<size_t>(entry.key().toInt());
      if (!one.value().isList() || number >= parameters.size()) continue;
      entries.insert_or_assign(
          one.key(), at::empty(parameters[number].sizes(),
                               parameters[number].options().device(c10::DeviceType::Meta)));
    }
    whole.insert(entry.key(), std::move(entries));
  }
  optim::Dict result = state.copy();
  result.insert_or_assign("state", std::move(whole));
  return result;
}

class Replicated final : public DistributedOptimizer {
 public:
  Replicated(std::unique_ptr<torch::optim::Optimizer> optimizer,
             std::shared_ptr<ModelWrapper> parallel, std::unique_ptr<GradScaler> scaler)
      : DistributedOptimizer(std::move(scaler)),
        optimizer_(std::move(optimizer)),
        parallel_(std::move(parallel)) {}

  double clip_grad_norm_(double max_norm, double norm_type) override {
    return ddp::clip_grad_norm_(Parameters(), max_norm, norm_type);
  }
  void clip_grad_value_(double clip_value) override {
    ddp::clip_grad_value_(Parameters(), clip_value);
  }
  // The optimizer's own cannot reset gradients that are views of buckets.
  void zero_grad() override { parallel_->zero_grad(/*set_to_none=*/true); }
  torch::optim::Optimizer& optimizer() override { return *optimizer_; }

 protected:
  absl::StatusOr<optim::Dict> WholeState() override { return optim::OptimizerState(*optimizer_); }
  absl::Status LoadWholeState(const c10::IValue& state) override {
    return optim::LoadOptimizerState(*optimizer_, state);
  }
  void MultiplyGradients(double factor) override {
    const c10::NoGradGuard no_grad;
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : Parameters()) {
      const at::Tensor& gradient = parameter.grad();
      if (!gradient.defined()) continue;
      gradients.push_back(gradient.is_sparse() ? gradient._values() : gradient);
    }
    if (!gradients.empty()) at::_foreach_mul_(gradients, factor);
  }

 private:
  // Also of groups that a callback has added. Each once: a shared parameter may be listed twice, as
  // in C++'s parameters().
  const std::vector<at::Tensor>& Parameters() {
    size_t listed = 0;
    for (const auto& group : optimizer_->param_groups()) listed += group.params().size();
    if (listed == listed_) return parameters_;
    listed_ = listed;
    parameters_.clear();
    std::unordered_set<const void*> seen;
    for (const auto& group : optimizer_->param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        if (seen.insert(parameter.unsafeGetTensorImpl()).second) parameters_.push_back(parameter);
      }
    }
    return parameters_;
  }

  const std::unique_ptr<torch::optim::Optimizer> optimizer_;
  const std::shared_ptr<ModelWrapper> parallel_;
  std::vector<at::Tensor> parameters_;
  size_t listed_ = 0;  // parameters in all groups, when parameters_ was made
};

}  // namespace

void DistributedOptimizer::NameParameters(optim::ParameterNames names, bool saved) {
  const auto is_no_key = [](const std::string& name) {
    return name.empty() || name.find('/') != std::string::npos;
  };
  if (std::any_of(names.begin(), names.end(), is_no_key)) return;
  names_ = std::move(names);
  if (saved) saved_names_ = names_;
}

void DistributedOptimizer::RequestState(const std::string&, checkpoint::ReadRequest&) const {}

absl::StatusOr<State> DistributedOptimizer::state_dict() {
  State state;
  DDP_ASSIGN_OR_RETURN(state.root, WholeState());
  if (!saved_names_.empty()) {
    state.root = optim::WithNames(state.root, saved_names_);
  } else if (!names_.empty() && optimizer().param_groups().size() > 1) {
    state.root = optim::WithParamNames(state.root, names_);
  }
  return state;
}

absl::StatusOr<optim::Dict> DistributedOptimizer::Numbered(const State& state) const {
  return optim::WithNumbers(state.root, optimizer().param_groups(), names_);
}

absl::Status DistributedOptimizer::CheckStateDict(const State& state) const {
  LoadNotes ignored;
  DDP_ASSIGN_OR_RETURN(const optim::Dict numbered, Numbered(state));
  return optim::CheckOptimizerState(
      optimizer(), WithOptionsOf(optimizer(), WithoutPieces(numbered, optimizer()), ignored));
}

absl::Status DistributedOptimizer::load_state_dict(const State& state, LoadNotes& notes) {
  DDP_ASSIGN_OR_RETURN(const optim::Dict numbered, Numbered(state));
  const c10::IValue own = WithOptionsOf(optimizer(), numbered, notes);
  DDP_RETURN_IF_ERROR(LoadWholeState(own));
  if (const std::string converted = Conversion(own); !converted.empty()) {
    notes.Add(absl::StrCat("with optimizer state converted ", converted));
  }
  return absl::OkStatus();
}

std::string DistributedOptimizer::Conversion(const c10::IValue& state) const {
  const absl::StatusOr<const optim::OptimizerKind*> kind = optim::KindOf(optimizer());
  if (!kind.ok()) return "";
  const auto& groups = optimizer().param_groups();
  const absl::StatusOr<optim::ParsedState> parsed = optim::ParseState(**kind, groups, state);
  if (!parsed.ok()) return "";
  size_t number = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const at::Tensor& parameter : groups[g].params()) {
      const size_t i = number++;
      const std::optional<optim::Dict>& saved = parsed->states[i];
      if (!saved) continue;
      const at::ScalarType now = StateDtype(parameter);
      for (const std::string& entry : (*kind)->PerElement(*parsed->options[g])) {
        const std::optional<c10::IValue> value = optim::Find(*saved, entry.c_str());
        const at::ScalarType then = value ? DtypeOf(*value).value_or(now) : now;
        if (then == now) continue;
        return absl::StrCat("from ", c10::toString(then), " to ", c10::toString(now), ", as ",
                            entry, " of ",
                            i < names_.size() ? names_[i] : absl::StrCat("parameter ", i));
      }
    }
  }
  return "";
}

std::unique_ptr<DistributedOptimizer> MakeReplicated(
    std::unique_ptr<torch::optim::Optimizer> optimizer, std::shared_ptr<ModelWrapper> parallel,
    std::unique_ptr<GradScaler> scaler) {
  return std::make_unique<Replicated>(std::move(optimizer), std::move(parallel), std::move(scaler));
}

}  // namespace ddp
