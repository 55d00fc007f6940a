#include "ddp/amp/grad_scaler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include "ATen/ops/_amp_update_scale.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "absl/log/absl_log.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "c10/core/GradMode.h"
#include "ddp/unscale_gradients.h"

namespace ddp {
namespace {

absl::Status ScalerStateError(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("gradient scaler state: ", what));
}

absl::StatusOr<double> Number(const optim::Dict& state, const char* key) {
  const std::optional<c10::IValue> value = optim::Find(state, key);
  const std::optional<double> number = value ? optim::AsNumber(*value) : std::nullopt;
  if (!number) return ScalerStateError(absl::StrCat("'", key, "' is missing or no number"));
  return *number;
}

struct Loaded {
  GradScalerOptions options;
  double tracker = 0;
};

absl::StatusOr<Loaded> Parse(const optim::Dict& state) {
  Loaded loaded;
  DDP_ASSIGN_OR_RETURN(loaded.options.init_scale, Number(state, "scale"));
  DDP_ASSIGN_OR_RETURN(loaded.options.growth_factor, Number(state, "growth_factor"));
  DDP_ASSIGN_OR_RETURN(loaded.options.backoff_factor, Number(state, "backoff_factor"));
  DDP_ASSIGN_OR_RETURN(const double interval, Number(state, "growth_interval"));
  DDP_ASSIGN_OR_RETURN(loaded.tracker, Number(state, "_growth_tracker"));
  if (!std::isfinite(interval) || !(loaded.tracker >= 0 && loaded.tracker < 2147483648.0)) {
    return ScalerStateError(
        absl::StrCat("growth_interval ", interval, ", _growth_tracker ", loaded.tracker));
  }
  loaded.options.growth_interval = static_cast<int64_t>(interval);
  const absl::Status valid = ValidateOptions(loaded.options);
  if (!valid.ok()) return ScalerStateError(valid.message());
  return loaded;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GradScaler>> GradScaler::Create(
    const GradScalerOptions& options, c10::Device device,
    c10::intrusive_ptr<c10d::ProcessGroup> group) {
  DDP_RETURN_IF_ERROR(ValidateOptions(options));
  std::unique_ptr<GradScaler> self;
  DDP_RETURN_IF_ERROR(CatchStatus("GradScaler", [&] {
    self.reset(new GradScaler(options, device, std::move(group)));
    return absl::OkStatus();
  }));
  return self;
}

GradScaler::GradScaler(const GradScalerOptions& options, c10::Device device,
                       c10::intrusive_ptr<c10d::ProcessGroup> group)
    : options_(options),
      device_(device),
      group_(std::move(group)),
      scale_(at::full({}, options.init_scale, at::TensorOptions(device).dtype(at::kFloat))),
      growth_tracker_(at::zeros({}, at::TensorOptions(device).dtype(at::kInt))) {}

std::unique_ptr<GradScaler> GradScaler::Disabled() {
  std::unique_ptr<GradScaler> self(new GradScaler({}, c10::kCPU, nullptr));
  self->scale_.reset();
  return self;
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const {
  if (!is_enabled()) return loss;
  return loss * scale_.to(loss.device());
}

// Whether a gradient of this rank is infinite or NaN: [1], 0 or 1.
at::Tensor GradScaler::CheckAndUnscale(torch::optim::Optimizer& optimizer, double inverse) const {
  std::vector<at::Tensor> gradients;
  // A shared parameter may be listed twice, as in C++'s parameters().
  std::unordered_set<const void*> seen;
  for (const auto& parameters : optimizer.param_groups()) {
    for (const at::Tensor& parameter : parameters.params()) {
      at::Tensor gradient = parameter.grad();
      if (!gradient.defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
      TORCH_CHECK(gradient.scalar_type() != at::kHalf,
                  "GradScaler: a parameter's gradient is float16; keep parameters in float32 and "
                  "use autocast");
      if (gradient.is_sparse()) {
        parameter.mutable_grad() = gradient.coalesce();
        gradient = parameter.grad()._values();
      }
      gradients.push_back(gradient);
    }
  }
  return UnscaleGradients(gradients, inverse, device_);
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer, double factor) {
  if (!is_enabled()) return;
  TORCH_CHECK(!checked_.contains(&optimizer),
              "GradScaler: unscale_ has been called for this optimizer since the last update()");
  TORCH_CHECK(
      group_ || !JoinContext::IsInBody(),
      "GradScaler: it was made without a group, so that in a Join ranks which run out would "
      "keep a scale of their own: give it the group, and list it in the Join");
  const c10::NoGradGuard no_grad;
  // As PyTorch: in double precision, then rounded.
  const double inverse = factor / get_scale();
  if (auto* itself = dynamic_cast<UnscalesGradients*>(&optimizer)) {
    CheckListed();
    const bool found = itself->unscale_(inverse);
    checked_[&optimizer].found_inf = found;
    return;
  }
  const Announced announced = Announce({});
  checked_[&optimizer].found_inf = AnyRankFound(CheckAndUnscale(optimizer, inverse));
}

bool GradScaler::AnyRankFound(const at::Tensor& found) const {
  std::vector<at::Tensor> message = {found};
  if (group_ && group_->getSize() > 1) {
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::MAX;
    group_->allreduce(message, options)->wait();
  }
  return message[0].item<float>() != 0;
}

void GradScaler::Shadow(const JoinOperation&) {
  AnyRankFound(at::zeros({1}, at::TensorOptions(device_).dtype(at::kFloat)));
}

void GradScaler::FinishJoin(int source) {
  c10d::BroadcastOptions options;
  options.rootRank = source;
  for (const at::Tensor& state : {scale_, growth_tracker_}) {
    std::vector<at::Tensor> message = {state};
    group_->broadcast(message, options)->wait();
  }
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!is_enabled()) {
    optimizer.step();
    return true;
  }
  if (!checked_.contains(&optimizer)) unscale_(optimizer);
  Checked& checked = checked_[&optimizer];
  TORCH_CHECK(!checked.stepped,
              "GradScaler: step has been called for this optimizer since the last update()");
  checked.stepped = true;
  if (!checked.found_inf) optimizer.step();
  return !checked.found_inf;
}

void GradScaler::update() {
  if (!is_enabled()) return;
  TORCH_CHECK(!checked_.empty(), "GradScaler: update() without a step or an unscale_ before it");
  bool found = false;
  for (const auto& [optimizer, checked] : checked_) found |= checked.found_inf;
  checked_.clear();
  const c10::NoGradGuard no_grad;
  at::_amp_update_scale_(scale_, growth_tracker_,
                         at::full({}, found ? 1.0f : 0.0f, scale_.options()),
                         options_.growth_factor, options_.backoff_factor, options_.growth_interval);
  skipped_ = found ? skipped_ + 1 : 0;
  if (found) CheckSkipped();
}

void GradScaler::CheckSkipped() {
  // The inverse of a float, by which gradients are multiplied, overflows below 2^-127, and with the
  // factor of unscale_ earlier: this leaves room for one of 1e8.
  constexpr double kSmallest = 1e-30;
  constexpr int64_t kFirstWarning = 10;
  const double scale = get_scale();
  if (scale < kSmallest) {
    scale_.fill_(kSmallest);
    TORCH_CHECK(false, "GradScaler: the gradients of the last ", skipped_,
                " steps were infinite or NaN, and the scale of the loss, ", scale,
                ", cannot be reduced further: no scale makes them finite. Look for NaN in the "
                "data, in the parameters and buffers, and in the loss");
  }
  const bool warns = skipped_ % kFirstWarning == 0 &&
                     std::has_single_bit(static_cast<uint64_t>(skipped_ / kFirstWarning));
  if (!warns || (group_ && group_->getRank() != 0)) return;
  ABSL_LOG(WARNING) << "GradScaler: the last " << skipped_
                    << " steps in a row were skipped, since gradients were infinite or NaN; the "
                       "scale of the loss is now "
                    << scale;
}

double GradScaler::get_scale() const { return is_enabled() ? scale_.item<double>() : 1.0; }

optim::Dict GradScaler::state_dict() const {
  optim::Dict state = optim::NewDict();
  if (!is_enabled()) return state;
  state.insert("scale", get_scale());
  state.insert("growth_factor", options_.growth_factor);
  state.insert("backoff_factor", options_.backoff_factor);
  state.insert("growth_interval", options_.growth_interval);
  state.insert("_growth_tracker", growth_tracker_.item<int64_t>());
  return state;
}

absl::Status GradScaler::CheckStateDict(const optim::Dict& state) { return Parse(state).status(); }

absl::Status GradScaler::load_state_dict(const optim::Dict& state) {
  if (!is_enabled()) return absl::OkStatus();
  DDP_ASSIGN_OR_RETURN(const Loaded loaded, Parse(state));
  options_.growth_factor = loaded.options.growth_factor;
  options_.backoff_factor = loaded.options.backoff_factor;
  options_.growth_interval = loaded.options.growth_interval;
  scale_.fill_(loaded.options.init_scale);
  // The kernel compares for equality.
  growth_tracker_.fill_(
      std::min(loaded.tracker, static_cast<double>(options_.growth_interval - 1)));
  skipped_ = 0;
  return absl::OkStatus();
}

}  // namespace ddp
