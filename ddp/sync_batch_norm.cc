#include "ddp/sync_batch_norm.h"

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "ATen/Context.h"
#include "ATen/ops/addcmul.h"
#include "ATen/ops/batch_norm.h"
#include "ATen/ops/batch_norm_native.h"
#include "ATen/ops/batch_norm_update_stats.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/native_batch_norm.h"
#include "ATen/ops/native_batch_norm_backward.h"
#include "ATen/ops/zeros.h"
#include "absl/log/absl_log.h"
#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "c10/core/GradMode.h"
#include "third_party/libtorch/compat.h"
#include "torch/csrc/autograd/custom_function.h"
#include "torch/library.h"
#include "torch/nn/modules/batchnorm.h"

namespace ddp {
namespace {

using at::Tensor;
using c10d::ProcessGroup;
using GroupPtr = c10::intrusive_ptr<ProcessGroup>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Statistics are computed in it, and combined in double precision.
at::ScalarType ComputeType(const Tensor& input) {
  return at::isReducedFloatingType(input.scalar_type()) ? at::kFloat : input.scalar_type();
}

Tensor As(at::ScalarType dtype, const Tensor& tensor) {
  return tensor.defined() ? tensor.to(dtype) : tensor;
}

// [C] as [1, C, 1, ...], for arithmetic with `input`.
Tensor PerChannel(const Tensor& values, const Tensor& input) {
  std::vector<int64_t> shape(input.dim(), 1);
  shape[1] = input.size(1);
  return values.view(shape);
}

// A converted layer.
struct Layer {
  // Keeps the address from being used again.
  c10::weak_intrusive_ptr<c10::TensorImpl> key;
  std::weak_ptr<torch::nn::Module> module;
  // Weak, since layers stay in the list after their module: a group's threads must not outlive it.
  c10::weak_intrusive_ptr<ProcessGroup> group;
  std::string name;    // in the module that it was converted with
  int64_t number = 0;  // among the layers of that module
};

// Of all values of each channel, on all ranks. Double precision.
struct BatchStatistics {
  Tensor mean;      // [C]
  Tensor variance;  // [C], biased
  Tensor count;     // [], values per channel
};

// A rank sends, in double precision: mean and variance [C] of its batch, its values per channel,
// and the number of the layer among those that were converted together.
constexpr int64_t kExtraNumbers = 2;
// In place of the values per channel: torch::nn has refused this rank's batch.
constexpr double kRefused = -1;

Tensor AllGatherRows(const Tensor& mine, ProcessGroup& group) {
  Tensor all = at::empty({group.getSize() * mine.numel()}, mine.options());
  Tensor row = mine;
  group.all_gather_single(all, row)->wait();
  return all.view({group.getSize(), mine.numel()});
}

// The ranks that have sent kRefused. `rows`: on the CPU.
std::vector<int64_t> RanksThatRefused(const Tensor& rows) {
  std::vector<int64_t> ranks;
  const int64_t width = rows.size(1);
  const auto* row = rows.const_data_ptr<double>();
  for (int64_t rank = 0; rank < rows.size(0); ++rank, row += width) {
    if (row[width - kExtraNumbers] == kRefused) ranks.push_back(rank);
  }
  return ranks;
}

// `layers`: the layer, or those among which it is.
[[noreturn]] void ThrowRefusal(int rank, const std::vector<std::string>& layers,
                               const std::vector<int64_t>& ranks) {
  TORCH_CHECK(false, "rank ", rank,
              ": sync_bn: ", layers.size() == 1 ? "layer '" : "one of layers '",
              absl::StrJoin(layers, "', '"), "' has one value per channel on rank ",
              absl::StrJoin(ranks, ", "),
              ", which torch::nn refuses before all ranks' values are put together: leave out "
              "batches that are not full (drop_last), or make it a ddp::SyncBatchNorm1d, 2d or 3d, "
              "which takes it");
}

// Collective.
BatchStatistics Gather(const Tensor& x, const Layer& layer, ProcessGroup& group) {
  const int64_t channels = x.size(1);
  Tensor mine = at::zeros({2 * channels + kExtraNumbers}, x.options().dtype(at::kDouble));
  if (x.numel() > 0) {
    const auto [mean, variance] = at::batch_norm_update_stats(x, {}, {}, /*momentum=*/0);
    mine.narrow(0, 0, channels).copy_(mean);
    mine.narrow(0, channels, channels).copy_(variance);
    mine.narrow(0, 2 * channels, 1).fill_(x.numel() / channels);
  }
  mine.narrow(0, 2 * channels + 1, 1).fill_(layer.number);
  const Tensor all = AllGatherRows(mine, group);
  // Reading it from an accelerator would synchronise.
  if (x.is_cpu()) {
    const std::vector<int64_t> refused = RanksThatRefused(all);
    if (!refused.empty()) ThrowRefusal(group.getRank(), {layer.name}, refused);
    for (int64_t rank = 0; rank < all.size(0); ++rank) {
      const auto number = static_cast<int64_t>(all[rank][-1].item<double>());
      TORCH_CHECK(number == layer.number, "rank ", group.getRank(), ": sync_bn: is in layer '",
                  layer.name, "', number ", layer.number, ", while rank ", rank, " is in number ",
                  number, ": ranks must run the same layers in the same order");
    }
  }
  const Tensor counts = all.narrow(1, 2 * channels, 1);
  const Tensor means = all.narrow(1, 0, channels);
  BatchStatistics batch;
  batch.count = counts.sum();
  const Tensor shares = counts / batch.count;
  batch.mean = (means * shares).sum(0);
  // The variance within the ranks and that between them.
  const Tensor between = (means - batch.mean).square();
  batch.variance = ((all.narrow(1, channels, channels) + between) * shares).sum(0);
  TORCH_CHECK_VALUE(!x.is_cpu() || batch.count.item<double>() > 1,
                    "Expected more than 1 value per channel when training, got ",
                    batch.count.item<double>(), " on all ranks together");
  return batch;
}

void UpdateRunning(Tensor running, const Tensor& value, double momentum) {
  if (running.defined()) running.mul_(1 - momentum).add_(value.to(running.scalar_type()), momentum);
}

// What a call has besides tensors with gradients.
struct Call {
  Tensor running_mean;
  Tensor running_var;
  double momentum = 0;
  double eps = 0;
  std::shared_ptr<const Layer> layer;
  GroupPtr group;
};

class SyncBatchNorm : public torch::autograd::Function<SyncBatchNorm> {
 public:
  // `weight` and `bias` may be undefined, which only an optional can say.
  static Tensor forward(AutogradContext* context, const Tensor& input,
                        const std::optional<Tensor>& optional_weight,
                        const std::optional<Tensor>& optional_bias, const Call& call) {
    const Tensor weight = optional_weight.value_or(Tensor());
    const Tensor bias = optional_bias.value_or(Tensor());
    const at::ScalarType dtype = ComputeType(input);
    const Tensor x = input.to(dtype);
    const BatchStatistics batch = Gather(x, *call.layer, *call.group);
    UpdateRunning(call.running_mean, batch.mean, call.momentum);
    UpdateRunning(call.running_var, batch.variance * batch.count / (batch.count - 1),
                  call.momentum);
    const Tensor mean = batch.mean.to(dtype);
    const Tensor variance = batch.variance.to(dtype);
    context->save_for_backward({input, weight, mean, variance, batch.count});
    context->saved_data["eps"] = call.eps;
    context->saved_data["has_bias"] = bias.defined();
    context->saved_data["group"] = c10::IValue::make_capsule(call.group);
    if (x.numel() == 0) return input.clone();
    // Given the statistics, what remains is the layer in eval mode.
    return std::get<0>(at::native_batch_norm(x, As(dtype, weight), As(dtype, bias), mean, variance,
                                             /*training=*/false, /*momentum=*/0, call.eps))
        .to(input.scalar_type());
  }

  // With y = (x - mean) / std, N values per channel on all ranks:
  // dx = weight / std * (dout - sum(dout) / N - y * sum(dout * y) / N), both sums over all ranks.
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "sync_bn: layers have no second derivative (create_graph=true)");
    const variable_list saved = context->get_saved_variables();
    const Tensor &input = saved[0], &weight = saved[1], &mean = saved[2], &variance = saved[3],
                 &count = saved[4];
    const double eps = context->saved_data["eps"].toDouble();
    const auto group =
        c10::static_intrusive_pointer_cast<ProcessGroup>(context->saved_data["group"].toCapsule());
    const at::ScalarType dtype = ComputeType(input);
    const Tensor x = input.to(dtype);
    const Tensor dout = gradients[0].to(dtype);
    const int64_t channels = x.size(1);
    Tensor dweight, dbias;
    if (x.numel() > 0) {
      // In eval mode these are sum(dout * y) and sum(dout). There are no saved statistics then, for
      // which the CUDA kernel wants a defined tensor.
      const Tensor none = at::empty({0}, x.options());
      Tensor unused;
      std::tie(unused, dweight, dbias) =
          at::native_batch_norm_backward(dout, x, As(dtype, weight), mean, variance, none, none,
                                         /*train=*/false, eps, {false, true, true});
    } else {
      dweight = dbias = at::zeros({channels}, x.options());
    }
    Tensor dinput;
    if (context->needs_input_grad(0)) {
      Tensor sums = at::zeros({2 * channels}, x.options().dtype(at::kDouble));
      sums.narrow(0, 0, channels).copy_(dbias);
      sums.narrow(0, channels, channels).copy_(dweight);
      std::vector<Tensor> message = {sums};
      group->allreduce(message)->wait();
      sums.div_(count);
      const Tensor inverse_std = (variance.to(at::kDouble) + eps).rsqrt();
      Tensor scale = inverse_std;
      if (weight.defined()) scale = scale * weight.to(at::kDouble);
      const Tensor constant = scale.neg() * sums.narrow(0, 0, channels);
      const Tensor slope = scale.neg() * inverse_std * sums.narrow(0, channels, channels);
      const auto as_channels = [&](const Tensor& values) {
        return PerChannel(values.to(dtype), x);
      };
      dinput = at::addcmul(as_channels(constant), x - as_channels(mean), as_channels(slope))
                   .addcmul_(dout, as_channels(scale))
                   .to(input.scalar_type());
    }
    if (!weight.defined()) dweight = Tensor();
    if (!context->saved_data["has_bias"].toBool()) dbias = Tensor();
    // The parameters have one dtype.
    return {dinput, As(weight.defined() ? weight.scalar_type() : dtype, dweight),
            As(weight.defined() ? weight.scalar_type() : dtype, dbias), Tensor()};
  }
};

// The converted layers of this process. Thread-safe.
class Layers {
 public:
  static Layers& Get() {
    static auto* layers = new Layers();
    return *layers;
  }

  void Add(const Tensor& key, Layer layer) {
    const std::unique_lock lock(mutex_);
    std::erase_if(layers_, [](const auto& entry) { return entry.second->module.expired(); });
    layers_.insert_or_assign(key.unsafeGetTensorImpl(),
                             std::make_shared<const Layer>(std::move(layer)));
  }

  void Remove(const Tensor& key) {
    const std::unique_lock lock(mutex_);
    layers_.erase(key.unsafeGetTensorImpl());
  }

  bool Has(const Tensor& key) const {
    const std::shared_lock lock(mutex_);
    return layers_.contains(key.unsafeGetTensorImpl());
  }

  // A layer that trains, and its group.
  struct InTraining {
    std::shared_ptr<const Layer> layer;
    GroupPtr group;
  };
  // Nulls if there is none, or if it is in eval mode. Throws c10::Error if the group is gone.
  InTraining FindInTraining(const Tensor& key) const {
    if (!key.defined()) return {};
    const std::shared_lock lock(mutex_);
    const auto found = layers_.find(key.unsafeGetTensorImpl());
    if (found == layers_.end()) return {};
    const std::shared_ptr<torch::nn::Module> module = found->second->module.lock();
    if (!module || !module->is_training()) return {};
    GroupPtr group = found->second->group.lock();
    TORCH_CHECK(group,
                "sync_bn: the process group of this layer is gone; call "
                "ConvertSyncBatchNorm with another one, or with none");
    return {found->second, std::move(group)};
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, std::shared_ptr<const Layer>> layers_;
};

const Tensor& KeyOf(const Tensor& running_mean, const Tensor& weight) {
  return running_mean.defined() ? running_mean : weight;
}

// Instead of aten::batch_norm's.
Tensor BatchNorm(const Tensor& input, const std::optional<Tensor>& weight,
                 const std::optional<Tensor>& bias, const std::optional<Tensor>& running_mean,
                 const std::optional<Tensor>& running_var, bool training, double momentum,
                 double eps, bool cudnn_enabled) {
  const auto value = [](const std::optional<Tensor>& tensor) { return tensor.value_or(Tensor()); };
  // `training` is also true in eval mode without running statistics.
  if (training) {
    const auto [layer, group] =
        Layers::Get().FindInTraining(KeyOf(value(running_mean), value(weight)));
    if (layer) {
      return SyncBatchNorm::apply(input, weight, bias,
                                  Call{.running_mean = value(running_mean),
                                       .running_var = value(running_var),
                                       .momentum = momentum,
                                       .eps = eps,
                                       .layer = layer,
                                       .group = group});
    }
  }
  return at::native::batch_norm(input, weight, bias, running_mean, running_var, training, momentum,
                                eps, cudnn_enabled);
}

void RegisterKernel() {
  // Until the end of the process.
  static const auto* const libraries = [] {
    auto* made = new std::vector<torch::Library>();
    for (const c10::DispatchKey key :
         {c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA}) {
      made->emplace_back(torch::Library::IMPL, "aten", key, __FILE__, uint32_t{__LINE__});
      made->back().impl("batch_norm", TORCH_FN(BatchNorm));
    }
    return made;
  }();
  (void)libraries;
}

bool IsBatchNorm(const torch::nn::Module& module) {
  return dynamic_cast<const torch::nn::BatchNorm1dImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::BatchNorm2dImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::BatchNorm3dImpl*>(&module) != nullptr ||
         dynamic_cast<const SyncBatchNorm1dImpl*>(&module) != nullptr ||
         dynamic_cast<const SyncBatchNorm2dImpl*>(&module) != nullptr ||
         dynamic_cast<const SyncBatchNorm3dImpl*>(&module) != nullptr;
}

Tensor Named(const torch::OrderedDict<std::string, Tensor>& tensors, const char* name) {
  const Tensor* found = tensors.find(name);
  return found == nullptr ? Tensor() : *found;
}

Tensor KeyOf(const torch::nn::Module& layer) {
  return KeyOf(Named(layer.named_buffers(false), "running_mean"),
               Named(layer.named_parameters(false), "weight"));
}

}  // namespace

absl::StatusOr<int> ConvertSyncBatchNorm(torch::nn::Module& module,
                                         const std::string& implementation, const GroupPtr& group) {
  if (implementation != "torch") {
    const absl::Status error = absl::InvalidArgumentError(
        absl::StrCat("sync_bn=", implementation, " is unknown; there is: torch"));
    ABSL_LOG(ERROR) << error.message();
    return error;
  }
  std::vector<std::pair<Tensor, Layer>> found;
  for (const auto& entry : module.named_modules()) {
    if (!IsBatchNorm(*entry.value())) continue;
    const Tensor key = KeyOf(*entry.value());
    if (!key.defined()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "sync_bn: layer '", entry.key(),
          "' has neither running statistics nor a weight by which it could be known; give it "
          "affine(true) or track_running_stats(true)"));
    }
    found.emplace_back(key,
                       Layer{.key = c10::weak_intrusive_ptr<c10::TensorImpl>(key.getIntrusivePtr()),
                             .module = entry.value(),
                             .group = c10::weak_intrusive_ptr<ProcessGroup>(group),
                             .name = entry.key(),
                             .number = static_cast<int64_t>(found.size())});
  }
  const bool alone = !group || group->getSize() == 1;
  if (!alone && !found.empty()) RegisterKernel();
  for (auto& [key, layer] : found) {
    if (alone) {
      Layers::Get().Remove(key);
    } else {
      Layers::Get().Add(key, std::move(layer));
    }
  }
  return static_cast<int>(found.size());
}

bool HasSyncBatchNorm(const torch::nn::Module& module) {
  for (const std::shared_ptr<torch::nn::Module>& layer : module.modules()) {
    if (!IsBatchNorm(*layer)) continue;
    const Tensor key = KeyOf(*layer);
    if (key.defined() && Layers::Get().Has(key)) return true;
  }
  return false;
}

template <size_t D>
Tensor SyncBatchNormImpl<D>::forward(const Tensor& input) {
  if (!Layers::Get().FindInTraining(KeyOf(this->running_mean, this->weight)).layer) {
    return Base::forward(input);
  }
  _check_input_dim(input);
  double momentum = this->options.momentum().value_or(0);
  if (this->num_batches_tracked.defined()) {
    this->num_batches_tracked += 1;
    // Without one, running statistics are the average of all batches.
    if (!this->options.momentum()) {
      momentum = 1 / this->num_batches_tracked.template item<double>();
    }
  }
  return at::batch_norm(input, this->weight, this->bias, this->running_mean, this->running_var,
                        /*training=*/true, momentum, this->options.eps(),
                        at::globalContext().userEnabledCuDNN());
}

template <size_t D>
void SyncBatchNormImpl<D>::_check_input_dim(const Tensor& input) {
  constexpr int64_t kDimensions = 2 + static_cast<int64_t>(D);
  TORCH_CHECK(input.dim() == kDimensions || (D == 1 && input.dim() == 2), "SyncBatchNorm", D,
              "d: expected ", D == 1 ? "2 or " : "", kDimensions, " dimensions, got input size ",
              input.sizes());
}

template class SyncBatchNormImpl<1>;
template class SyncBatchNormImpl<2>;
template class SyncBatchNormImpl<3>;

namespace sync_batch_norm_internal {

// The layer is not known here: torch's message has the size of its input only. Ranks whose batch is
// accepted know it.
void ShareRefusal(const torch::nn::Module& module, const c10::Error& error) {
  constexpr absl::string_view kRefusal =
      "Expected more than 1 value per channel when training, got input size [";
  const absl::string_view message = error.what_without_backtrace();
  const size_t at = message.find(kRefusal);
  if (at == absl::string_view::npos) return;
  const std::vector<absl::string_view> sizes = absl::StrSplit(
      message.substr(at + kRefusal.size()), absl::ByAnyChar(", ]"), absl::SkipEmpty());
  int64_t channels = 0;
  if (sizes.size() < 2 || !absl::SimpleAtoi(sizes[1], &channels)) return;
  std::vector<std::string> names;
  std::map<double, std::string> by_number;
  GroupPtr group;
  bool on_cpu = true;
  for (const std::shared_ptr<torch::nn::Module>& child : module.modules()) {
    if (!IsBatchNorm(*child)) continue;
    const Tensor key = KeyOf(*child);
    const Layers::InTraining found = Layers::Get().FindInTraining(key);
    if (!found.layer || key.numel() != channels) continue;
    if (by_number.emplace(found.layer->number, found.layer->name).second) {
      names.push_back(found.layer->name);
    }
    on_cpu = on_cpu && key.is_cpu();
    group = found.group;
  }
  if (!group) return;
  std::vector<int64_t> refused = {group->getRank()};
  if (on_cpu) {
    const c10::NoGradGuard no_grad;
    Tensor mine = at::zeros({2 * channels + kExtraNumbers}, at::kDouble);
    mine[2 * channels] = kRefused;
    try {
      const Tensor all = AllGatherRows(mine, *group);
      refused = RanksThatRefused(all);
      for (int64_t rank = 0; rank < all.size(0); ++rank) {
        const auto* row = all[rank].const_data_ptr<double>();
        const auto named = by_number.find(row[2 * channels + 1]);
        if (row[2 * channels] != kRefused && named != by_number.end()) names = {named->second};
      }
    } catch (const c10::DistError&) {
      // Another rank has failed, too. This rank's own error remains.
    }
  }
  ThrowRefusal(group->getRank(), names, refused);
}

}  // namespace sync_batch_norm_internal
}  // namespace ddp
