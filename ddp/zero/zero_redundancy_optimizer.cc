#include "ddp/zero/zero_redundancy_optimizer.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <map>
#include <typeinfo>
#include <utility>

#include "ATen/ops/_foreach_clamp_max.h"
#include "ATen/ops/_foreach_clamp_min.h"
#include "ATen/ops/_foreach_mul.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/empty_like.h"
#include "ATen/ops/scalar_tensor.h"
#include "ATen/ops/zeros.h"
#include "absl/log/absl_log.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/option_error.h"
#include "base/status.h"
#include "c10/core/GradMode.h"
#include "c10/util/Type.h"
#include "ddp/clip_grad.h"
#include "ddp/collective_status.h"
#include "ddp/gather/gather.h"
#include "ddp/memory_order.h"
#include "ddp/zero/whole_state.h"
#include "optim/state_dict.h"
#include "third_party/libtorch/compat.h"

namespace ddp::zero {
namespace {

using optim::Dict;
using optim::OptimizerKind;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;

constexpr char kMasterWeight[] = "master_weight";

// With fp32 copies, gradients are converted for so many elements at a time.
constexpr int64_t kConvertedElements = 4 << 20;

// All entries that a parameter of this group may have, as tensors of its shape.
std::vector<std::string> TensorEntries(const OptimizerKind& kind,
                                       const OptimizerParamGroup& group) {
  std::vector<std::string> names = kind.PerElement(group.options());
  names.push_back(kMasterWeight);
  return names;
}

// "669,706".
std::string Grouped(int64_t number) {
  const std::string digits = absl::StrCat(number);
  std::string grouped;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) grouped.push_back(',');
    grouped.push_back(digits[i]);
  }
  return grouped;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ZeroRedundancyOptimizer>> ZeroRedundancyOptimizer::Create(
    std::vector<OptimizerParamGroup> groups, c10::intrusive_ptr<c10d::ProcessGroup> group,
    optim::OptimizerFactory factory, const ZeroOptions& options) {
  DDP_RETURN_IF_ERROR(ValidateOptions(options));
  if (options.stage == 0) {
    return OptionError("zero.stage", "0", "is the optimizer itself; give 1 or 2");
  }
  if (options.gradient_dtype && !IsReducedPrecision(*options.gradient_dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat("ZeroOptions::gradient_dtype: ", c10::toString(*options.gradient_dtype),
                     " is neither fp16 (Half) nor bf16 (BFloat16)"));
  }
  std::vector<NumberedParameter> all;
  for (const OptimizerParamGroup& one : groups) {
    for (const at::Tensor& parameter : one.params()) {
      all.push_back({static_cast<int64_t>(all.size()), parameter});
    }
  }
  DDP_RETURN_IF_ERROR(CheckParameters(all));
  if (group && group->getSize() == 1) group.reset();
  if (group) DDP_RETURN_IF_ERROR(ShardedGradients::CheckWhoReduces(options.stage, all));
  std::unique_ptr<ZeroRedundancyOptimizer> self;
  DDP_RETURN_IF_ERROR(CatchStatus("ZeroRedundancyOptimizer", [&]() -> absl::Status {
    // Before anything is moved. Of no parameters, it tells the defaults.
    std::vector<OptimizerParamGroup> empty;
    for (const OptimizerParamGroup& one : groups) {
      empty.emplace_back(std::vector<at::Tensor>());
      if (one.has_options()) empty.back().set_options(one.options().clone());
    }
    std::unique_ptr<torch::optim::Optimizer> inner = factory(std::move(empty));
    DDP_RETURN_IF_ERROR(CheckOptimizer(*inner, options.partition));
    self.reset(new ZeroRedundancyOptimizer(std::move(group), std::move(factory), options,
                                           inner->defaults().clone()));
    for (size_t i = 0; i < groups.size(); ++i) {
      groups[i].set_options(inner->param_groups()[i].options().clone());
      self->add_param_group(groups[i]);
      // add_param_group takes values that are defaults of their class for such as were not given.
      self->param_groups_.back().set_options(inner->param_groups()[i].options().clone());
    }
    if (options.stage == 2 && self->group_) {
      self->gradients_ = std::make_unique<ShardedGradients>(
          self->group_, options,
          [optimizer = self.get()] { (void)optimizer->Announce({.kind = kBackward}); });
    }
    self->AddNewParamGroups();
    ForwardCallbacks callbacks;
    if (options.overlap_gather || self->gradients_) {
      callbacks.before = [optimizer = self.get()] {
        optimizer->WaitForParameters();
        if (optimizer->gradients_) optimizer->gradients_->RestoreHooks();
      };
    }
    if (self->gradients_ && options.find_unused_parameters) {
      callbacks.after = [optimizer = self.get()](const NamedTensors& parameters,
                                                 const std::vector<at::Tensor>& outputs) {
        optimizer->gradients_->ExpectBackward(parameters, outputs);
      };
    }
    if (self->gradients_) {
      callbacks.zero_grad = [optimizer = self.get()](const NamedTensors& parameters, bool to_none) {
        size_t sharded = 0;
        for (const auto& [name, parameter] : parameters) {
          sharded += optimizer->sharded_.count(parameter.unsafeGetTensorImpl());
        }
        if (sharded == optimizer->sharded_.size()) optimizer->zero_grad(to_none);
      };
    }
    if (self->group_ && (callbacks.before || callbacks.after)) {
      self->around_forward_.emplace(self->group_.get(), std::move(callbacks));
    }
    return absl::OkStatus();
  }));
  return self;
}

absl::StatusOr<std::unique_ptr<ZeroRedundancyOptimizer>> ZeroRedundancyOptimizer::Create(
    std::vector<at::Tensor> parameters, c10::intrusive_ptr<c10d::ProcessGroup> group,
    optim::OptimizerFactory factory, const ZeroOptions& options) {
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::move(parameters));
  return Create(std::move(groups), std::move(group), std::move(factory), options);
}

ZeroRedundancyOptimizer::~ZeroRedundancyOptimizer() {
  // What step() has started is every rank's. While another exception is on its way, ranks may be
  // gone.
  if (gathers_.empty() || std::uncaught_exceptions() > 0) return;
  const absl::Status waited =
      CatchStatus("gathering the last step's parameters", [&] { WaitForParameters(); });
  if (!waited.ok()) ABSL_LOG(ERROR) << "rank " << rank() << ": " << waited.message();
}

void ZeroRedundancyOptimizer::Prepare() {
  WaitForParameters();
  if (gradients_) gradients_->CheckHooks();
  for (FlatParameters& range : ranges_) TakeInValues(range);
  AddNewParamGroups();
}

// Takes in groups that were added since the last time.
void ZeroRedundancyOptimizer::AddNewParamGroups() {
  int64_t number = 0;
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    const std::vector<at::Tensor>& members = param_groups_[g].params();
    if (g < group_sizes_.size()) {
      TORCH_CHECK(members.size() == group_sizes_[g], "ZeroRedundancyOptimizer: parameter group ", g,
                  " has ", members.size(), " parameters and had ", group_sizes_[g],
                  "; add parameters in a group of their own");
      for (const at::Tensor& member : members) {
        TORCH_CHECK(!member.requires_grad() || sharded_.count(member.unsafeGetTensorImpl()) > 0,
                    "ZeroRedundancyOptimizer: parameter ", number,
                    " was frozen when the optimizer was made and now requires a gradient; make the "
                    "optimizer again, or unfreeze before");
        ++number;
      }
      continue;
    }
    std::vector<NumberedParameter> parameters;
    for (const at::Tensor& member : members) {
      parameters.push_back({number++, member});
      // Of a group that is new after backward, it is this rank's own: nobody has averaged it.
      if (gradients_) member.mutable_grad().reset();
    }
    std::vector<NumberedParameter> all = parameters;
    for (const FlatParameters& range : ranges_) {
      all.insert(all.end(), range.parameters.begin(), range.parameters.end());
    }
    absl::Status valid = CheckParameters(all);
    if (group_) valid.Update(ShardedGradients::CheckWhoReduces(options_.stage, parameters));
    TORCH_CHECK(valid.ok(), "ZeroRedundancyOptimizer: ", std::string(valid.message()));
    std::vector<at::Tensor> pieces;
    for (FlatParameters& range :
         FlattenParameters(parameters, static_cast<int>(g), options_, group_.get())) {
      for (const NumberedParameter& parameter : range.parameters) {
        sharded_.insert(parameter.tensor.unsafeGetTensorImpl());
      }
      ranges_.push_back(std::move(range));
      for (const OwnedPiece& owned : ranges_.back().owned) pieces.push_back(owned.updated);
      if (gradients_) gradients_->Add(ranges_.back());
    }
    group_sizes_.push_back(members.size());
    knows_who_reduces_ = false;
    if (inner_) {
      const OptimizerParamGroup group(std::move(pieces), param_groups_[g].options().clone());
      inner_->add_param_group(group);
      // Adagrad makes its state when it is made.
      const auto made = factory_({group});
      for (auto& [piece, state] : made->state()) inner_->state()[piece] = std::move(state);
    }
  }
  if (inner_) return;
  // The first time: the factory gets all of it, as some optimizers make their state at once.
  std::vector<OptimizerParamGroup> groups;
  for (const OptimizerParamGroup& group : param_groups_) {
    groups.emplace_back(std::vector<at::Tensor>(), group.options().clone());
  }
  for (const FlatParameters& range : ranges_) {
    for (const OwnedPiece& owned : range.owned) {
      groups[range.group].params().push_back(owned.updated);
    }
  }
  inner_ = factory_(std::move(groups));
}

void ZeroRedundancyOptimizer::CopyOptions() {
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    inner_->param_groups()[g].set_options(param_groups_[g].options().clone());
  }
}

// Collective. Gives ranks that have run out, in a Join, what a step of those that have not takes:
// the former's schedules have stopped, and callers change parameters (a limit, torch::load) on
// ranks with inputs only.
void ZeroRedundancyOptimizer::ShareWithShadows() {
  const OptimizerKind& kind = **optim::KindOf(*inner_);  // CheckJoin has seen that there is one
  BroadcastOptions(group_, kind, param_groups_, join_context()->first_live());
  Prepare();
  BroadcastValues(group_, ranges_, join_context()->first_live());
  ShareGradients();
}

// Collective. In stage 1, the gradients: what callers make of them (ddp::clip_grad_norm_, a change
// of .grad), they do on ranks with inputs only. Before each operation that a step depends on.
void ZeroRedundancyOptimizer::ShareGradients() {
  if (!gradients_) BroadcastGradients(group_, ranges_, join_context()->first_live());
}

torch::Tensor ZeroRedundancyOptimizer::step(LossClosure closure) {
  torch::Tensor loss;
  if (closure != nullptr) {
    at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  const c10::NoGradGuard no_grad;
  if (gradients_) gradients_->FinishBackwards();
  const double options = joined() ? HashOfOptions(*inner_, param_groups_) : 0;
  const Announced announced = Announce({.kind = kStep, .arguments = {options}});
  // As part of another object's operation, such as a trainer's step, it has the options that the
  // other has set.
  if (announced.is_shadowed()) ShareWithShadows();
  TakeStep();
  return loss;
}

void ZeroRedundancyOptimizer::TakeStep() {
  Prepare();
  if (group_ && !gradients_ && !std::exchange(knows_who_reduces_, true)) {
    const absl::Status reduced = ShardedGradients::CheckWhoReduces(rank(), ranges_);
    TORCH_CHECK(reduced.ok(), "ZeroRedundancyOptimizer: ", std::string(reduced.message()));
  }
  CopyOptions();
  UpdatePieces();
  StartGather();
  if (gradients_) gradients_->Reset();
  if (!options_.overlap_gather) {
    WaitForParameters();
  } else {
    for (const Gather& gather : gathers_) RefuseAccess(*gather.range);
  }
}

bool ZeroRedundancyOptimizer::HasGradient(size_t range, int tensor) const {
  if (gradients_) return gradients_->filled() && gradients_->used(range, tensor);
  return ranges_[range].parameters[tensor].tensor.grad().defined();
}

std::vector<ZeroRedundancyOptimizer::GradientPiece> ZeroRedundancyOptimizer::OwnGradients() const {
  std::vector<GradientPiece> pieces;
  for (size_t r = 0; r < ranges_.size(); ++r) {
    const FlatParameters& range = ranges_[r];
    int flat_of = -1;
    at::Tensor flat;
    for (const OwnedPiece& owned : range.owned) {
      const Piece& piece = owned.piece;
      if (!HasGradient(r, piece.tensor)) continue;
      if (gradients_) {
        pieces.push_back(
            {&range, &owned, gradients_->shard(r).narrow(0, piece.shard_begin, piece.size())});
        continue;
      }
      if (flat_of != piece.tensor) {
        const NumberedParameter& parameter = range.parameters[piece.tensor];
        flat = FlatInMemoryOrder(parameter.tensor, DenseGradient(parameter));
        flat_of = piece.tensor;
      }
      pieces.push_back({&range, &owned, flat.narrow(0, piece.begin, piece.size())});
    }
  }
  return pieces;
}

// To be changed. Without stage 2's shards whole ones, on every rank: they are the parameters'
// .grad, which others see and change, too, such as ddp::clip_grad_norm_.
std::vector<at::Tensor> ZeroRedundancyOptimizer::GradientsToChange() const {
  if (!gradients_) return DenseGradients(ranges_);
  std::vector<at::Tensor> shards;
  for (const GradientPiece& piece : OwnGradients()) shards.push_back(piece.gradient);
  return shards;
}

void ZeroRedundancyOptimizer::UpdatePieces() {
  const std::vector<GradientPiece> pieces = OwnGradients();
  // One of an unknown kind may count its steps as a whole: it makes one for all pieces.
  const bool in_parts = optim::KindOf(*inner_).ok();
  const auto update = [this](std::vector<const OwnedPiece*>& batch) {
    inner_->step();
    for (const OwnedPiece* owned : batch) {
      at::Tensor updated = owned->updated;
      updated.mutable_grad().reset();
      if (owned->has_master()) at::Tensor(owned->value).copy_(updated);
    }
    batch.clear();
  };
  std::vector<const OwnedPiece*> batch;
  int64_t converted = 0;
  for (const GradientPiece& piece : pieces) {
    at::Tensor updated = piece.owned->updated;
    if (piece.owned->has_master()) {
      if (in_parts && converted > 0 && converted + updated.numel() > kConvertedElements) {
        update(batch);
        converted = 0;
      }
      converted += updated.numel();
      updated.mutable_grad() = piece.gradient.to(updated.scalar_type());
    } else {
      updated.mutable_grad() = piece.gradient;
    }
    batch.push_back(piece.owned);
  }
  // Also without gradients: the inner optimizer may count steps.
  update(batch);
}

void ZeroRedundancyOptimizer::StartGather() {
  if (!group_) return;
  for (size_t r = 0; r < ranges_.size(); ++r) {
    FlatParameters& range = ranges_[r];
    bool any = false;
    for (size_t i = 0; i < range.parameters.size() && !any; ++i) {
      any = HasGradient(r, static_cast<int>(i));
    }
    if (!any) continue;
    Gather gather = {.range = &range};
    for (const Block& block : range.partition.blocks()) {
      at::Tensor whole;
      if (block.owners == world_size()) {
        whole = range.storage.narrow(0, block.begin, block.part * world_size());
      } else {
        whole = range.head;
        if (rank() < block.owners) {
          whole.narrow(0, rank() * block.part, block.part)
              .copy_(range.storage.narrow(0, block.begin + rank() * block.stride, block.part));
        }
      }
      gather.outputs.push_back(whole);
      gather.inputs.push_back(whole.narrow(0, rank() * block.part, block.part));
      gathered_bytes_ += static_cast<int64_t>(gather.inputs.back().nbytes());
    }
    if (gather.outputs.empty()) continue;
    gather.work = gather.outputs.size() == 1
                      ? group_->all_gather_single(gather.outputs[0], gather.inputs[0])
                      : group_->all_gather_single_coalesced(gather.outputs, gather.inputs);
    gathers_.push_back(std::move(gather));
  }
}

void ZeroRedundancyOptimizer::WaitForParameters() {
  const c10::NoGradGuard no_grad;
  std::vector<Gather> gathers = std::exchange(gathers_, {});
  for (const Gather& gather : gathers) AllowAccess(*gather.range);
  for (Gather& gather : gathers) {
    gather.work->wait();
    FlatParameters& range = *gather.range;
    if (!range.head.defined()) continue;
    const Block& head = range.partition.blocks()[0];
    const int64_t size = head.part * head.owners;
    range.storage.narrow(0, head.begin, size).copy_(range.head.narrow(0, 0, size));
  }
}

void ZeroRedundancyOptimizer::zero_grad(bool set_to_none) {
  const c10::NoGradGuard no_grad;
  // In stage 1 a shadow learns it from the next backward (DataParallel::ShadowBackward).
  const Announced announced =
      gradients_ ? Announce({.kind = kZeroGrad, .arguments = {set_to_none ? 1.0 : 0.0}})
                 : Announced(nullptr);
  if (gradients_) gradients_->Reset();
  for (OptimizerParamGroup& group : param_groups_) {
    for (at::Tensor& parameter : group.params()) {
      at::Tensor& gradient = parameter.mutable_grad();
      if (!gradient.defined()) continue;
      if (set_to_none) {
        gradient.reset();
      } else {
        gradient.zero_();
      }
    }
  }
}

void ZeroRedundancyOptimizer::AllReduce(at::Tensor& tensor, c10d::ReduceOp::RedOpType op) const {
  if (!group_) return;
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  std::vector<at::Tensor> tensors = {tensor};
  group_->allreduce(tensors, options)->wait();
}

// All ranks' pieces of the parameters that have a gradient, in the order of the parameters'
// numbers.
std::vector<NormSegment> ZeroRedundancyOptimizer::NormSegments(
    const std::vector<GradientPiece>& own) const {
  struct Known {
    size_t range;
    Piece piece;
  };
  std::map<std::pair<int64_t, int64_t>, Known> pieces;  // by number and begin
  for (size_t r = 0; r < ranges_.size(); ++r) {
    for (int rank = 0; rank < world_size(); ++rank) {
      for (const Piece& piece : ranges_[r].partition.Pieces(rank)) {
        if (!HasGradient(r, piece.tensor)) continue;
        pieces[{ranges_[r].parameters[piece.tensor].number, piece.begin}] = {r, piece};
      }
    }
  }
  std::map<std::pair<int64_t, int64_t>, at::Tensor> values;
  for (const GradientPiece& piece : own) {
    const Piece& p = piece.owned->piece;
    values[{piece.range->parameters[p.tensor].number, p.begin}] = piece.gradient;
  }
  std::vector<NormSegment> segments;
  for (const auto& [key, known] : pieces) {
    const FlatParameters& range = ranges_[known.range];
    const auto mine = values.find(key);
    segments.push_back({.tensor = static_cast<int>(key.first),
                        .numel = range.partition.numel(known.piece.tensor),
                        .begin = known.piece.begin,
                        .end = known.piece.end,
                        .values = mine == values.end() ? at::Tensor() : mine->second,
                        .element_bytes = static_cast<int64_t>(range.storage.element_size())});
  }
  return segments;
}

double ZeroRedundancyOptimizer::clip_grad_norm_(double max_norm, double norm_type,
                                                bool error_if_nonfinite) {
  const c10::NoGradGuard no_grad;
  TORCH_CHECK(norm_type >= 0, "clip_grad_norm_: norm_type ", norm_type, " is not 0 or more");
  if (gradients_) gradients_->FinishBackwards();
  const Announced announced = Announce({.kind = error_if_nonfinite ? kClipNormChecked : kClipNorm,
                                        .arguments = {max_norm, norm_type}});
  if (announced.is_shadowed()) ShareGradients();
  Prepare();
  const std::vector<GradientPiece> pieces = OwnGradients();
  std::vector<at::Tensor> gradients;
  for (const GradientPiece& piece : pieces) gradients.push_back(piece.gradient);
  bool on_cpu = true;
  for (const FlatParameters& range : ranges_) on_cpu &= range.storage.device().is_cpu();
  const auto sum = [&](at::Tensor& partial) { AllReduce(partial, c10d::ReduceOp::SUM); };
  const auto max = [&](at::Tensor& partial) { AllReduce(partial, c10d::ReduceOp::MAX); };
  double total = 0;
  if (on_cpu) {
    total = BlockedNorm(NormSegments(pieces), norm_type, sum);
  } else if (std::isinf(norm_type)) {
    total = DeviceNorm(gradients, norm_type, join_device(), max);
  } else {
    total = DeviceNorm(gradients, norm_type, join_device(), sum);
  }
  TORCH_CHECK(!error_if_nonfinite || std::isfinite(total), "the norm of the gradients is ", total,
              "; a step with them would destroy the parameters");
  const double factor = ClipFactor(total, max_norm);
  const std::vector<at::Tensor> clipped = GradientsToChange();
  if (!clipped.empty()) at::_foreach_mul_(clipped, factor);
  return total;
}

void ZeroRedundancyOptimizer::clip_grad_value_(double clip_value) {
  const c10::NoGradGuard no_grad;
  if (gradients_) gradients_->FinishBackwards();
  const Announced announced = Announce({.kind = kClipValue, .arguments = {clip_value}});
  if (announced.is_shadowed()) ShareGradients();
  Prepare();
  const std::vector<at::Tensor> gradients = GradientsToChange();
  if (gradients.empty()) return;
  at::_foreach_clamp_min_(gradients, -clip_value);
  at::_foreach_clamp_max_(gradients, clip_value);
}

bool ZeroRedundancyOptimizer::unscale_(double inverse_scale) {
  const c10::NoGradGuard no_grad;
  if (gradients_) gradients_->FinishBackwards();
  const Announced announced = Announce({.kind = kUnscale, .arguments = {inverse_scale}});
  if (announced.is_shadowed()) ShareGradients();
  Prepare();
  // All ranks see this, whatever they own.
  for (const FlatParameters& range : ranges_) {
    TORCH_CHECK(range.storage.scalar_type() != at::kHalf,
                "ZeroRedundancyOptimizer: parameter group ", range.group,
                " has float16 parameters, whose gradients cannot be unscaled: small ones would "
                "become 0; keep parameters in float32 and use autocast, or in bfloat16");
  }
  at::Tensor found = UnscaleGradients(GradientsToChange(), inverse_scale, join_device());
  AllReduce(found, c10d::ReduceOp::MAX);
  const bool found_any = found.item<float>() != 0;
  if (found_any && gradients_) gradients_->DropBeforeNextBackward();
  return found_any;
}

void ZeroRedundancyOptimizer::MultiplyGradients(double factor) {
  const c10::NoGradGuard no_grad;
  if (gradients_) gradients_->FinishBackwards();
  const Announced announced = Announce({.kind = kMultiply, .arguments = {factor}});
  Prepare();
  for (at::Tensor& gradient : GradientsToChange()) gradient.mul_(factor);
}

c10::Device ZeroRedundancyOptimizer::join_device() const {
  return ranges_.empty() ? c10::Device(c10::kCPU) : ranges_[0].storage.device();
}

absl::Status ZeroRedundancyOptimizer::CheckJoin(const JoinOptions& options) const {
  if (options.throw_on_early_termination || optim::KindOf(*inner_).ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "Join: ranks that run out need the options of each step, and those of ",
      c10::demangle(typeid(*inner_).name()), " cannot be sent; describe it by an OptimizerKind ",
      "(optim/kind.h), or set throw_on_early_termination"));
}

void ZeroRedundancyOptimizer::Shadow(const JoinOperation& operation) {
  switch (operation.kind) {
    case kStep: {
      const c10::NoGradGuard no_grad;
      ShareWithShadows();
      TakeStep();
      return WaitForParameters();
    }
    case kClipNorm:
    case kClipNormChecked:
      ShareGradients();
      clip_grad_norm_(operation.arguments[0], operation.arguments[1],
                      operation.kind == kClipNormChecked);
      return;
    case kClipValue:
      ShareGradients();
      return clip_grad_value_(operation.arguments[0]);
    case kUnscale:
      ShareGradients();
      unscale_(operation.arguments[0]);
      return;
    case kMultiply:
      return MultiplyGradients(operation.arguments[0]);
    case kZeroGrad:
      return zero_grad(operation.arguments[0] != 0);
    case kBackward:
      return gradients_->ReduceWithoutBackward();
    case kStateDict: {
      const auto state = ConsolidateStateDict(static_cast<int>(operation.arguments[0]));
      TORCH_CHECK(state.ok(), std::string(state.status().message()));
      return;
    }
    default:
      TORCH_CHECK(false, "ZeroRedundancyOptimizer: unknown operation ", operation.kind);
  }
}

// State as one logical whole: gathered from all ranks, and divided among them again.

// Empty if the inner optimizer keeps nothing for the piece.
Dict ZeroRedundancyOptimizer::EntriesOf(const OptimizerKind& kind, const OwnedPiece& owned) const {
  Dict entries = optim::NewDict();
  const auto state = inner_->state().find(owned.updated.unsafeGetTensorImpl());
  if (state != inner_->state().end()) {
    std::optional<Dict> written = kind.WriteState(*state->second);
    if (written) entries = *std::move(written);
  }
  const bool stateless = kind.Scalars().empty();
  if (owned.has_master() && (stateless || !entries.empty())) {
    entries.insert(kMasterWeight, owned.updated);
  }
  return entries;
}

// Returns the pieces of all ranks, in the same order on each rank.
std::vector<ZeroRedundancyOptimizer::PieceOfRank> ZeroRedundancyOptimizer::AllPieces() const {
  std::vector<PieceOfRank> pieces;
  for (const FlatParameters& range : ranges_) {
    for (int owner = 0; owner < world_size(); ++owner) {
      size_t next_owned = 0;
      for (const Piece& piece : range.partition.Pieces(owner)) {
        const OwnedPiece* owned = owner == rank() ? &range.owned[next_owned++] : nullptr;
        pieces.push_back({.range = &range, .owner = owner, .piece = piece, .owned = owned});
      }
    }
  }
  return pieces;
}

// A row per piece: whether it has state, its scalars, and which tensor entries there are.
// Collective: every rank fills in its own pieces' rows.
at::Tensor ZeroRedundancyOptimizer::ExchangeStateTable(
    const OptimizerKind& kind, const std::vector<PieceOfRank>& pieces) const {
  const std::vector<std::string> scalars = kind.Scalars();
  size_t width = 1;
  for (const FlatParameters& range : ranges_) {
    const size_t names = TensorEntries(kind, param_groups_[range.group]).size();
    width = std::max(width, 1 + scalars.size() + names);
  }
  at::Tensor table =
      at::zeros({static_cast<int64_t>(pieces.size()), static_cast<int64_t>(width)}, at::kDouble);
  auto rows = table.accessor<double, 2>();
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (pieces[i].owned == nullptr) continue;
    const Dict entries = EntriesOf(kind, *pieces[i].owned);
    auto row = rows[static_cast<int64_t>(i)];
    int64_t column = 0;
    row[column++] = entries.empty() ? 0 : 1;
    for (const std::string& scalar : scalars) {
      const auto value = optim::Find(entries, scalar.c_str());
      row[column++] = value ? optim::AsNumber(*value).value_or(0) : 0;
    }
    for (const std::string& name : TensorEntries(kind, param_groups_[pieces[i].range->group])) {
      row[column++] = entries.contains(name) ? 1 : 0;
    }
  }
  if (!group_ || pieces.empty()) return table;
  table = table.to(ranges_[0].storage.device());
  AllReduce(table, c10d::ReduceOp::SUM);
  return table.cpu();
}

// Collective between the ranks that have a part in it. `source`: on the owner; `slice`: where the
// piece goes, on ranks that receive.
void ZeroRedundancyOptimizer::MovePiece(int owner, int to, const at::Tensor& source,
                                        at::Tensor slice) const {
  if (owner == rank() && slice.defined()) slice.copy_(source);
  if (!group_ || owner == to) return;
  if (to == kAllRanks) {
    std::vector<at::Tensor> message = {slice};
    c10d::BroadcastOptions options;
    options.rootRank = owner;
    group_->broadcast(message, options)->wait();
  } else if (owner == rank()) {
    std::vector<at::Tensor> message = {source};
    group_->send(message, to, /*tag=*/0)->wait();
  } else if (to == rank()) {
    std::vector<at::Tensor> message = {slice};
    group_->recv(message, owner, /*tag=*/0)->wait();
  }
}

absl::StatusOr<Dict> ZeroRedundancyOptimizer::ConsolidateStateDict(int to) {
  if (to != kAllRanks && (to < 0 || to >= world_size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("ConsolidateStateDict: no rank ", to, " in a group of ", world_size()));
  }
  DDP_ASSIGN_OR_RETURN(const OptimizerKind* kind, optim::KindOf(*inner_));
  const bool receives = to == kAllRanks || to == rank();
  std::map<int64_t, Dict> states;  // by number
  DDP_RETURN_IF_ERROR(CatchCollective("gathering the optimizer's state", [&] {
    const Announced announced =
        Announce({.kind = kStateDict, .arguments = {static_cast<double>(to)}});
    const c10::NoGradGuard no_grad;
    Prepare();
    const std::vector<PieceOfRank> pieces = AllPieces();
    const at::Tensor table = ExchangeStateTable(*kind, pieces);
    const auto rows = table.accessor<double, 2>();
    for (size_t i = 0; i < pieces.size(); ++i) {
      const auto row = rows[static_cast<int64_t>(i)];
      if (row[0] == 0) continue;
      const PieceOfRank& remote = pieces[i];
      const NumberedParameter& parameter = remote.range->parameters[remote.piece.tensor];
      const Dict mine =
          remote.owned == nullptr ? optim::NewDict() : EntriesOf(*kind, *remote.owned);
      auto [entry, fresh] = states.emplace(parameter.number, optim::NewDict());
      Dict& state = entry->second;
      int64_t column = 1;
      for (const std::string& scalar : kind->Scalars()) {
        if (fresh) state.insert(scalar, at::scalar_tensor(row[column], at::kFloat));
        ++column;
      }
      const at::TensorOptions like =
          parameter.tensor.detach().options().dtype(StateDtype(parameter.tensor));
      for (const std::string& name : TensorEntries(*kind, param_groups_[remote.range->group])) {
        if (row[column++] == 0) continue;
        at::Tensor slice, source;
        if (receives) {
          if (!state.contains(name)) {
            state.insert(name, at::zeros_like(parameter.tensor.detach(), like));
          }
          slice = FlatInMemoryOrder(parameter.tensor, state.at(name).toTensor())
                      .narrow(0, remote.piece.begin, remote.piece.size());
        }
        if (remote.owned != nullptr) source = mine.at(name).toTensor().flatten();
        MovePiece(remote.owner, to, source, slice);
      }
    }
    for (const FlatParameters& range : ranges_) AddStatesOfEmptyParameters(range, states);
    if (!receives) states.clear();
  }));
  return optim::MakeStateDict(*kind, param_groups_,
                              [&](const at::Tensor&, int64_t number) -> std::optional<Dict> {
                                const auto state = states.find(number);
                                if (state == states.end()) return std::nullopt;
                                return state->second;
                              });
}

at::ScalarType ZeroRedundancyOptimizer::StateDtype(const at::Tensor& parameter) const {
  const at::ScalarType dtype = parameter.scalar_type();
  return options_.master_weights && IsReducedPrecision(dtype) ? at::kFloat : dtype;
}

absl::Status ZeroRedundancyOptimizer::LoadStateDict(const c10::IValue& state) {
  return CatchStatus("optimizer state", [&]() -> absl::Status {
    const c10::NoGradGuard no_grad;
    Prepare();
    DDP_ASSIGN_OR_RETURN(const OptimizerKind* kind, optim::KindOf(*inner_));
    DDP_ASSIGN_OR_RETURN(const optim::ParsedState parsed,
                         optim::ParseState(*kind, param_groups_, state));
    // All that changes is made before anything is changed; all shapes are checked on every rank.
    std::vector<std::pair<const OwnedPiece*, std::unique_ptr<OptimizerParamState>>> states;
    std::vector<std::pair<const OwnedPiece*, at::Tensor>> masters;
    for (const FlatParameters& range : ranges_) {
      const auto& options = *parsed.options[range.group];
      std::vector<std::string> names = kind->PerElement(options);
      names.push_back(kMasterWeight);
      DDP_RETURN_IF_ERROR(CheckStates(range, names, parsed.states));
      int piece_of = -1;
      size_t next_piece = 0;
      for (const OwnedPiece& owned : range.owned) {
        const NumberedParameter& parameter = range.parameters[owned.piece.tensor];
        const std::optional<Dict>& saved = parsed.states[parameter.number];
        next_piece = owned.piece.tensor == piece_of ? next_piece + 1 : 0;
        piece_of = owned.piece.tensor;
        std::optional<at::Tensor> master;
        if (saved) {
          Dict part = CutState(*saved, names, parameter, owned.piece, next_piece);
          const auto found = optim::Find(part, kMasterWeight);
          if (found && found->isTensor()) master = found->toTensor();
          (void)part.erase(kMasterWeight);
          absl::StatusOr<std::unique_ptr<OptimizerParamState>> read =
              kind->ReadState(part, owned.updated, options);
          if (!read.ok()) {
            return Annotate(read.status(), absl::StrCat("parameter group ", range.group,
                                                        ": parameter ", parameter.number));
          }
          if (*read != nullptr) states.emplace_back(&owned, *std::move(read));
        }
        if (owned.has_master()) masters.emplace_back(&owned, master.value_or(owned.value));
      }
    }
    optim::SetOptions(*kind, parsed, param_groups_);
    CopyOptions();
    inner_->state().clear();
    for (auto& [owned, read] : states) {
      inner_->state()[owned->updated.unsafeGetTensorImpl()] = std::move(read);
    }
    for (auto& [owned, master] : masters) at::Tensor(owned->updated).copy_(master);
    return absl::OkStatus();
  });
}

absl::StatusOr<std::vector<LocalState>> ZeroRedundancyOptimizer::LocalStates() {
  DDP_ASSIGN_OR_RETURN(const OptimizerKind* kind, optim::KindOf(*inner_));
  DDP_RETURN_IF_ERROR(CatchStatus("optimizer state", [&] {
    const c10::NoGradGuard no_grad;
    Prepare();
  }));
  std::vector<LocalState> states;
  for (const FlatParameters& range : ranges_) {
    for (const OwnedPiece& owned : range.owned) {
      Dict entries = EntriesOf(*kind, owned);
      if (entries.empty()) continue;
      const NumberedParameter& parameter = range.parameters[owned.piece.tensor];
      states.push_back({.parameter = parameter.number,
                        .global_shape = parameter.tensor.sizes().vec(),
                        .memory_order = MemoryOrder(parameter.tensor),
                        .begin = owned.piece.begin,
                        .end = owned.piece.end,
                        .entries = std::move(entries)});
    }
  }
  return states;
}

absl::StatusOr<std::vector<LocalPieces>> ZeroRedundancyOptimizer::Pieces() const {
  DDP_ASSIGN_OR_RETURN(const OptimizerKind* kind, optim::KindOf(*inner_));
  std::vector<LocalPieces> all;
  for (const FlatParameters& range : ranges_) {
    const size_t first = all.size();
    for (const NumberedParameter& parameter : range.parameters) {
      all.push_back({.parameter = parameter.number,
                     .group = range.group,
                     .global_shape = parameter.tensor.sizes().vec(),
                     .memory_order = MemoryOrder(parameter.tensor),
                     .dtype = StateDtype(parameter.tensor),
                     .entries = kind->PerElement(param_groups_[range.group].options()),
                     .scalars = kind->Scalars()});
      if (all.back().dtype != parameter.tensor.scalar_type()) {
        all.back().entries.emplace_back(kMasterWeight);
      }
    }
    for (const OwnedPiece& owned : range.owned) {
      all[first + owned.piece.tensor].pieces.emplace_back(owned.piece.begin, owned.piece.end);
    }
  }
  std::sort(all.begin(), all.end(),
            [](const LocalPieces& a, const LocalPieces& b) { return a.parameter < b.parameter; });
  return all;
}

std::unique_ptr<torch::optim::Optimizer> ZeroRedundancyOptimizer::UnshardedLikeThis() const {
  std::vector<OptimizerParamGroup> groups;
  for (const OptimizerParamGroup& group : param_groups_) {
    std::vector<at::Tensor> like;
    for (const at::Tensor& parameter : group.params()) {
      like.push_back(at::empty_like(parameter.detach(),
                                    parameter.detach().options().dtype(StateDtype(parameter))));
    }
    groups.emplace_back(std::move(like), group.options().clone());
  }
  return factory_(std::move(groups));
}

void ZeroRedundancyOptimizer::save(torch::serialize::OutputArchive& archive) const {
  // Waits for parameters at most, which changes nothing that a caller sees.
  auto* self = const_cast<ZeroRedundancyOptimizer*>(this);
  const absl::StatusOr<Dict> whole = self->ConsolidateStateDict(kAllRanks);
  TORCH_CHECK(whole.ok(), std::string(whole.status().message()));
  const std::unique_ptr<torch::optim::Optimizer> unsharded = UnshardedLikeThis();
  const absl::Status loaded = optim::LoadOptimizerState(*unsharded, *whole);
  TORCH_CHECK(loaded.ok(), std::string(loaded.message()));
  unsharded->save(archive);
}

void ZeroRedundancyOptimizer::load(torch::serialize::InputArchive& archive) {
  const std::unique_ptr<torch::optim::Optimizer> unsharded = UnshardedLikeThis();
  unsharded->load(archive);
  const absl::StatusOr<Dict> whole = optim::OptimizerState(*unsharded);
  TORCH_CHECK(whole.ok(), std::string(whole.status().message()));
  const absl::Status loaded = LoadStateDict(*whole);
  TORCH_CHECK(loaded.ok(), std::string(loaded.message()));
}

std::string ZeroRedundancyOptimizer::Describe() const {
  const absl::StatusOr<const OptimizerKind*> kind = optim::KindOf(*inner_);
  int64_t own = 0, all = 0;
  double own_bytes = 0, all_bytes = 0;
  for (const FlatParameters& range : ranges_) {
    int64_t elements = 0;
    for (int i = 0; i < range.partition.num_tensors(); ++i) elements += range.partition.numel(i);
    const int64_t mine = range.partition.OwnedElements(rank());
    const bool master = !range.owned.empty() && range.owned[0].has_master();
    double bytes = 0;
    if (kind.ok()) {
      const auto entries = (*kind)->PerElement(param_groups_[range.group].options()).size();
      bytes = static_cast<double>(entries * (master ? 4 : range.storage.element_size()));
    }
    if (master) bytes += 4;
    own += mine;
    all += elements;
    own_bytes += bytes * static_cast<double>(mine);
    all_bytes += bytes * static_cast<double>(elements);
  }
  return absl::StrCat("zero stage ", options_.stage, ": rank ", rank(), " holds ", Grouped(own),
                      " of ", Grouped(all), " elements, state ",
                      absl::StrFormat("%.1f of %.1f MB", own_bytes / 1e6, all_bytes / 1e6));
}

}  // namespace ddp::zero
