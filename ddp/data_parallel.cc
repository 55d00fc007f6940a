#include "ddp/data_parallel.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <unordered_map>
#include <vector>

#include "ATen/Parallel.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/zeros.h"
#include "ATen/ops/zeros_like.h"
#include "absl/log/absl_log.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/cores.h"
#include "base/option_error.h"
#include "base/status.h"
#include "c10/util/ScopeExit.h"
#include "c10/util/env.h"
#include "ddp/around_forward.h"
#include "ddp/bucket_limits.h"
#include "ddp/buffer_broadcast.h"
#include "ddp/collective_status.h"
#include "ddp/comm_bytes.h"
#include "ddp/gradient_hooks.h"
#include "ddp/reducer.h"
#include "ddp/sync_batch_norm.h"
#include "torch/csrc/autograd/custom_function.h"
#include "torch/csrc/autograd/engine.h"
#include "torch/csrc/distributed/c10d/logger.hpp"
#include "torch/csrc/distributed/c10d/reducer.hpp"
#include "torch/nn/module.h"
#include "torch/nn/modules/embedding.h"

namespace ddp {
namespace {

// Size of one message of the initial broadcast; PyTorch's value.
constexpr size_t kBroadcastBytes = 250 * 1024 * 1024;

static_assert(kFirstBucketBytes == c10d::kDefaultFirstBucketBytes);

constexpr char kAfterException[] =
    "Or that backward has ended with an exception: then destroy the wrapper and wrap the module "
    "again.";

// What a rank has of a gradient. A reset makes it less. kMixed: of a rank that has run out, what is
// to be reduced on top of what has been.
constexpr uint8_t kNoGradient = 0, kZeros = 1, kNonzero = 2, kMixed = 3;

std::vector<at::Tensor> Values(const NamedTensors& tensors) {
  std::vector<at::Tensor> values;
  for (const auto& [name, tensor] : tensors) values.push_back(tensor);
  return values;
}

// Whether the backend can allocate the buckets. The Reducer asks only the default backend.
bool BackendAllocatesBuckets(c10d::ProcessGroup& group, c10::Device device) {
  if (!device.is_cpu()) return false;
  const auto backend = group.getBackend(device.type());
  if (!backend->supportsTensorAlloc(device.index())) return false;
  bool is_default = false;
  const absl::Status has_default =
      CatchStatus("", [&] { is_default = group.getDefaultBackend() == backend; });
  return has_default.ok() && is_default;
}

// torch::nn::Module lets only derived classes see its own parameters, without those of submodules.
struct OwnParameters : torch::nn::Module {
  static const torch::OrderedDict<std::string, at::Tensor>& Of(const torch::nn::Module& module) {
    return module.*(&OwnParameters::parameters_);
  }
};

// With max_norm, forward changes the rows of the weight that this rank's batch uses.
void WarnOfMaxNorm(const torch::nn::Module& module, const std::vector<std::string>& ignored) {
  for (const auto& item : module.named_modules()) {
    const auto* one = dynamic_cast<const torch::nn::EmbeddingImpl*>(item.value().get());
    const auto* bag = dynamic_cast<const torch::nn::EmbeddingBagImpl*>(item.value().get());
    const bool changes = (one != nullptr && one->options.max_norm().has_value()) ||
                         (bag != nullptr && bag->options.max_norm().has_value());
    const std::string weight = absl::StrCat(item.key(), item.key().empty() ? "" : ".", "weight");
    if (!changes || std::find(ignored.begin(), ignored.end(), weight) != ignored.end()) continue;
    ABSL_LOG(WARNING) << "parameter '" << weight
                      << "' belongs to an embedding with max_norm, whose forward changes the rows "
                         "that this rank's batch uses: the ranks will drift apart. Limit the norms "
                         "after the optimizer's step instead, on all ranks alike";
  }
}

absl::Status CheckOptions(const DataParallelOptions& options) {
  if (options.bucket_cap_mb &&
      (!(*options.bucket_cap_mb > 0) || *options.bucket_cap_mb > 1 << 20)) {
    return OptionError("bucket_cap_mb", absl::StrCat(*options.bucket_cap_mb),
                       "must be positive, in MiB");
  }
  if (options.device_ids.size() > 1) {
    return OptionError("device_ids", absl::StrJoin(options.device_ids, ","),
                       "is more than one device, but a rank has one; give one index, or none");
  }
  if (options.static_graph && !options.reduce_gradients) {
    return OptionError("static_graph", "true",
                       "has no effect with reduce_gradients=false, where an optimizer reduces "
                       "gradients; leave one of the two out");
  }
  return absl::OkStatus();
}

// Whether an element is not 0. Waits for the device.
bool IsNonzero(const at::Tensor& gradient) {
  const torch::NoGradGuard no_grad;
  const at::Tensor values = gradient.is_sparse() ? gradient._values() : gradient;
  return values.numel() > 0 && values.ne(0).any().item<bool>();
}

// Collective. The maximum over the ranks, of each element.
void MaxOverRanks(c10d::ProcessGroup& group, c10::Device device, std::vector<uint8_t>& values) {
  const at::Tensor mine = at::empty({static_cast<int64_t>(values.size())}, at::kByte);
  std::copy(values.begin(), values.end(), mine.mutable_data_ptr<uint8_t>());
  std::vector<at::Tensor> message = {mine.to(device)};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  group.allreduce(message, options)->wait();
  const at::Tensor most = message[0].cpu();
  std::copy_n(most.const_data_ptr<uint8_t>(), values.size(), values.begin());
}

// A gradient without its values, unless it is written to later.
struct Kept {
  at::Tensor gradient;
  int64_t version;
  at::Tensor values;
};

// Of a scalar that backward may start from, which must be real.
at::TensorOptions LossOptions(const at::Tensor& parameter) {
  return at::TensorOptions(parameter.device()).dtype(at::kFloat);
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A scalar that depends on all its inputs with a gradient of zero.
class ZeroGradients : public torch::autograd::Function<ZeroGradients> {
 public:
  static at::Tensor forward(AutogradContext* context, at::TensorList parameters,
                            const std::vector<int64_t>& sparse) {
    context->save_for_backward(parameters.vec());
    context->saved_data["sparse"] = sparse;
    return at::zeros({}, LossOptions(parameters[0]));
  }
  static variable_list backward(AutogradContext* context, const variable_list&) {
    variable_list gradients;
    const std::vector<int64_t> sparse = context->saved_data["sparse"].toIntVector();
    for (const at::Tensor& parameter : context->get_saved_variables()) {
      const bool is_sparse = sparse[gradients.size()] != 0;
      gradients.push_back(is_sparse ? EmptySparseGradient(parameter) : at::zeros_like(parameter));
    }
    gradients.emplace_back();  // of `sparse`
    return gradients;
  }
};

}  // namespace

NamedTensors TrainableParameters(const torch::nn::Module& module) {
  NamedTensors parameters;
  std::set<const void*> seen;
  for (const auto& item : module.named_parameters()) {
    if (item.value().requires_grad() && seen.insert(item.value().unsafeGetTensorImpl()).second) {
      parameters.emplace_back(item.key(), item.value());
    }
  }
  return parameters;
}

absl::StatusOr<std::unique_ptr<DataParallel>> DataParallel::Create(
    std::shared_ptr<torch::nn::Module> module, c10::intrusive_ptr<c10d::ProcessGroup> group,
    const DataParallelOptions& options) {
  if (group && group->getSize() == 1) group.reset();
  absl::Status mine = CheckOptions(options);
  absl::StatusOr<ModelTensors> tensors = CollectModelTensors(*module, options.ignored);
  mine.Update(tensors.status());
  if (!tensors.ok()) tensors = ModelTensors();
  auto self = std::unique_ptr<DataParallel>(
      new DataParallel(std::move(module), std::move(group), options, *std::move(tensors)));
  if (mine.ok()) mine = self->CheckModule();
  // Otherwise this rank's error goes to the others, which would wait for it.
  if (!self->group_ || !options.init_sync) DDP_RETURN_IF_ERROR(mine);
  if (!self->group_) {
    self->MarkAsWrapped();
    return self;
  }
  if (options.static_graph && options.find_unused_parameters && self->rank() == 0) {
    ABSL_LOG(WARNING) << "find_unused_parameters has no effect with static_graph, which finds "
                         "unused parameters by itself in the first iteration";
  }
  if (options.init_sync) {
    NamedTensors verified = self->tensors_.parameters;
    NamedTensors& buffers = self->tensors_.buffers;
    verified.insert(verified.end(), buffers.begin(), buffers.end());
    DDP_RETURN_IF_ERROR(VerifySameModel(*self->group_, verified, mine));
  }
  if (self->rank() == 0) WarnOfMaxNorm(*self->module_, options.ignored);
  self->buffers_ = std::make_unique<BufferBroadcast>(self->group_, self->tensors_.buffers,
                                                     /*verified=*/options.init_sync);
  DDP_RETURN_IF_ERROR(CatchCollective("giving all ranks rank 0's model", [&] {
    if (options.init_sync) {
      self->BroadcastModel(0);
    }
    if (options.reduce_gradients) self->BuildReducer();
  }));
  if (!options.reduce_gradients) self->MarkAsWrapped();
  return self;
}

DataParallel::DataParallel(std::shared_ptr<torch::nn::Module> module,
                           c10::intrusive_ptr<c10d::ProcessGroup> group,
                           const DataParallelOptions& options, ModelTensors tensors)
    : module_(std::move(module)),
      group_(std::move(group)),
      options_(options),
      tensors_(std::move(tensors)) {}

DataParallel::~DataParallel() {
  for (size_t i = 0; i < backward_hooks_.size(); ++i) {
    if (!backward_hooks_[i]) continue;
    // Fails only if another has removed it.
    CatchStatus("", [&] {
      tensors_.reduced[i].second.remove_hook(*backward_hooks_[i]);
    }).IgnoreError();
  }
  for (auto& [accumulator, hook] : marks_) accumulator->del_post_hook(hook);
}

absl::Status DataParallel::CheckModule() {
  if (tensors_.reduced.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "DistributedDataParallel is not needed: no parameter of the module requires a gradient",
        options_.ignored.empty() ? "" : ", but for those in `ignored`"));
  }
  const auto& [first, example] = tensors_.reduced[0];
  for (const auto& [name, parameter] : tensors_.parameters) {
    if (parameter.device().type() != example.device().type()) {
      return absl::InvalidArgumentError(
          absl::StrCat("all parameters must be on devices of one type: '", first, "' is on ",
                       example.device().str(), ", '", name, "' on ", parameter.device().str(),
                       "; move the module with to(device) first"));
    }
  }
  bool one_device = true;
  for (const auto& [name, parameter] : tensors_.reduced) {
    one_device = one_device && parameter.device() == example.device();
    // With a second Reducer each gradient would be reduced twice.
    if (HasReducer(parameter) || HasGradientHook<WrapperMark>(parameter)) {
      return absl::FailedPreconditionError(
          absl::StrCat("the module is wrapped already (parameter '", name,
                       "' belongs to another DistributedDataParallel); use that wrapper"));
    }
    if (options_.reduce_gradients && HasGradientHook<ShardedGradientHook>(parameter)) {
      return absl::FailedPreconditionError(absl::StrCat(
          "parameter '", name, "' belongs to a ZeroRedundancyOptimizer of stage 2, which reduces ",
          "its gradient; wrap the module with reduce_gradients=false"));
    }
  }
  if (options_.device_ids.empty()) return absl::OkStatus();
  const int index = options_.device_ids[0];
  if (example.device().is_cpu() || !one_device || example.device().index() != index) {
    return OptionError(
        "device_ids", absl::StrCat(index),
        absl::StrCat("is for a module on that one accelerator, but parameter '", first, "' is on ",
                     example.device().str(), one_device ? "" : ", and others on other devices",
                     "; leave device_ids empty, or move the module first"));
  }
  input_device_ = example.device();
  return absl::OkStatus();
}

// So that a second wrapper is refused also where there is no Reducer.
void DataParallel::MarkAsWrapped() {
  for (const auto& [name, parameter] : tensors_.reduced) {
    auto accumulator = torch::autograd::impl::grad_accumulator(parameter);
    const uintptr_t hook = accumulator->add_post_hook(std::make_unique<WrapperMark>());
    marks_.emplace_back(std::move(accumulator), hook);
  }
}

void DataParallel::BuildReducer() {
  const std::vector<at::Tensor> parameters = Values(tensors_.reduced);
  const c10::Device device = parameters[0].device();
  const std::optional<BackendWithCapabilities> on_callers_cores =
      BackendOnCallersCores(*group_, device.type());
  const BucketLimits limits = ChooseBucketLimits(
      options_, on_callers_cores && BackwardUsesAllCores(AvailableCores(), group_->getSize(),
                                                         at::get_num_threads()));
  auto [buckets, bucket_limits] =
      c10d::compute_bucket_assignment_by_size(parameters, limits.initial, tensors_.sparse);
  if (BackendAllocatesBuckets(*group_, device)) {
    // By default the Reducer does not use backend memory (reducer.cpp, 2.15.0). It reads the
    // variable again when it rebuilds buckets, so it stays set.
    c10::utils::set_env("DDP_DISABLE_COMM_MEM", "0", /*overwrite=*/false);
  }
  std::unordered_map<size_t, std::string> names;
  for (size_t i = 0; i < tensors_.reduced.size(); ++i) names[i] = tensors_.reduced[i].first;
  // Gradients arrive roughly in the reverse of the parameters' order.
  std::reverse(buckets.begin(), buckets.end());
  reducer_ = std::make_shared<GradientReducer>(
      parameters, buckets, group_, tensors_.sparse, limits.others,
      options_.find_unused_parameters && !options_.static_graph, options_.gradient_as_bucket_view,
      names, limits.first,
      /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
      /*bucket_bytes_cap_list=*/std::vector<int64_t>());
  logger_ = std::make_shared<c10d::Logger>(reducer_);
  reducer_->set_logger(logger_);
  const std::vector<int> device_ids =
      device.is_cuda() ? std::vector<int>{device.index()} : std::vector<int>();
  logger_->set_construction_data_and_log(
      module_->name(), device_ids, device_ids.empty() ? -1 : device_ids[0],
      options_.broadcast_buffers, HasSyncBatchNorm(*module_), options_.static_graph);
  if (on_callers_cores) {
    auto average = std::make_unique<AverageHook>(group_, &gradient_factor_);
    counter_ = average.get();
    auto hook = std::make_unique<ProgressHook>(*on_callers_cores, std::move(average));
    progress_hook_ = hook.get();
    reducer_->register_comm_hook(std::move(hook));
  }
  if (options_.static_graph) {
    reducer_->set_static_graph();
    logger_->set_static_graph();
  }
}

absl::Status DataParallel::register_comm_hook(std::unique_ptr<c10d::CommHookInterface> hook,
                                              const std::string& name) {
  if (hook == nullptr) return absl::InvalidArgumentError("register_comm_hook: the hook is null");
  if (std::exchange(has_comm_hook_, true)) {
    return absl::FailedPreconditionError(
        "register_comm_hook: there is a communication hook already; make a new wrapper to change "
        "it");
  }
  if (!options_.reduce_gradients) {
    return absl::FailedPreconditionError(
        "register_comm_hook: this wrapper reduces no gradients (reduce_gradients=false): a sharded "
        "optimizer does, in ZeroOptions::gradient_dtype");
  }
  if (!reducer_) return absl::OkStatus();
  logger_->set_comm_hook(name);
  counter_ = dynamic_cast<const CommBytesProvider*>(hook.get());
  if (progress_hook_ != nullptr) {
    progress_hook_->set_inner(std::move(hook));
    return absl::OkStatus();
  }
  return CatchStatus("register_comm_hook", [&] { reducer_->register_comm_hook(std::move(hook)); });
}

std::optional<int64_t> DataParallel::comm_bytes() const {
  if (!reducer_) return 0;
  if (counter_ != nullptr) return counter_->comm_bytes();
  if (has_comm_hook_) return std::nullopt;
  int64_t bytes = 0;
  for (size_t i = 0; i < tensors_.reduced.size(); ++i) {
    if (!tensors_.sparse[i]) bytes += static_cast<int64_t>(tensors_.reduced[i].second.nbytes());
  }
  return bytes * reducer_->reductions();
}

std::vector<int64_t> DataParallel::bucket_order() const {
  return reducer_ ? reducer_->bucket_order() : std::vector<int64_t>();
}

bool DataParallel::RestoreBucketOrder(const std::vector<int64_t>& order) {
  return reducer_ && reducer_->RestoreBucketOrder(order);
}

void DataParallel::PreForward() {
  if (!group_) return;
  AroundForward::RunBefore(group_.get());
  const Announced announced = Announce({.kind = ForwardInJoin()});
  if (joined()) WarnOfOptimizers();
  if (torch::GradMode::is_enabled()) RefuseNewParameters();
  if (reducer_ && torch::GradMode::is_enabled()) {
    const size_t lost = reducer_->RestoreHooks();
    TORCH_CHECK(
        lost == tensors_.reduced.size(), "rank ", rank(), ": parameter '",
        tensors_.reduced[lost].first,
        "' has another dtype, device or shape than when the module was wrapped, so that its "
        "gradient would not be averaged; wrap the module after Module::to");
    if (require_backward_grad_sync_) {
      logger_->set_runtime_stats_and_log();
      reducer_->prepare_for_forward();
    }
    TORCH_CHECK(
        !reducer_->LostFirstBackward(), "rank ", rank(), ": static_graph: the gradients of ",
        "the first backward are not averaged over the ranks, since it did not start from ",
        "the tensors that forward returned. Make the loss of what forward returns, and ",
        "return every tensor that it is made of, in a type that ddp/tree/tree.h describes. ",
        kAfterException);
    try {
      reducer_->RebuildBuckets();
    } catch (const c10::DistError&) {
      throw;  // caused by another rank
    } catch (const std::exception& error) {
      RethrowWithNames(ExceptionMessage(error));
    }
  }
  if (require_forward_param_sync_ && options_.broadcast_buffers) SyncBuffers();
}

// Every forward looks: a few nanoseconds per parameter, as long as nothing changes. A parameter
// that was trainable when the module was wrapped may be frozen, and trained again.
void DataParallel::RefuseNewParameters() {
  size_t next = 0;
  bool same = true;
  std::as_const(*module_).apply([&](const torch::nn::Module& module) {
    for (const auto& item : OwnParameters::Of(module)) {
      const at::Tensor& parameter = item.value();
      if (!same || !parameter.defined() || !parameter.requires_grad()) continue;
      same = next < trainable_.size() && trainable_[next++] == parameter.unsafeGetTensorImpl();
    }
  });
  if (same && next == trainable_.size()) return;
  const auto all = module_->named_parameters();
  std::set<const void*> allowed, wrapped;
  for (const auto& [name, parameter] : tensors_.trainable) {
    allowed.insert(parameter.unsafeGetTensorImpl());
  }
  for (const std::string& name : options_.ignored) {
    if (const at::Tensor* ignored = all.find(name)) allowed.insert(ignored->unsafeGetTensorImpl());
  }
  for (const auto& [name, parameter] : tensors_.parameters) {
    wrapped.insert(parameter.unsafeGetTensorImpl());
  }
  trainable_.clear();
  for (const auto& item : all) {
    const auto& [name, parameter] = item.pair();
    if (!parameter.requires_grad()) continue;
    const void* identity = parameter.unsafeGetTensorImpl();
    TORCH_CHECK(allowed.contains(identity), "rank ", rank(), ": parameter '", name,
                "' requires a gradient, but ",
                wrapped.contains(identity) ? "was frozen" : "was not part of the module",
                " when the module was wrapped: its gradient would stay this rank's own, and the "
                "ranks would drift apart. Destroy the wrapper and wrap the module again, or name "
                "the parameter in `ignored`.");
    trainable_.push_back(identity);
  }
}

void DataParallel::PostForward(const std::vector<at::Tensor>& outputs) {
  if (!group_) return;
  require_forward_param_sync_ = torch::GradMode::is_enabled() && require_backward_grad_sync_;
  if (!torch::GradMode::is_enabled()) return;
  has_unreduced_gradients_ = !require_backward_grad_sync_;
  AroundForward::RunAfter(group_.get(), tensors_.reduced, outputs);
  if (!reducer_) return;
  if (!joined()) {
    held_.clear();
    reductions_at_backward_ = -1;
  }
  awaits_backward_ = true;
  if (!require_backward_grad_sync_) {
    reducer_->SkipBackward();
    return WatchBackwards(joined());
  }
  const bool walk_graph = options_.find_unused_parameters && !options_.static_graph;
  uint64_t forward = 0;
  try {
    forward = reducer_->PrepareForBackward(walk_graph ? outputs : std::vector<at::Tensor>(),
                                           gradient_factor_);
  } catch (const std::exception& error) {
    RethrowWithNames(ExceptionMessage(error));
  }
  forward_to_announce_ = forward;
  WatchBackwards(joined() || reducer_->has_outstanding());
  if (reducer_->NeedsFinish()) FinishAfterBackward(outputs, forward);
}

// A hook on an output runs when backward starts from it, before any parameter has its gradient. It
// queues a callback that runs at the end of that backward.
void DataParallel::FinishAfterBackward(const std::vector<at::Tensor>& outputs, uint64_t forward) {
  auto queued = std::make_shared<std::atomic<bool>>(false);
  const auto finish_after = [&](const at::Tensor& tensor) {
    // A leaf, such as a parameter, would keep the hook forever.
    if (!tensor.requires_grad() || tensor.is_leaf()) return;
    std::weak_ptr<GradientReducer> weak = reducer_;
    tensor.register_hook([this, queued, weak, forward](const at::Tensor&) {
      const auto reducer = weak.lock();
      if (!reducer || !reducer->ComputesGradients() || queued->exchange(true)) return;
      ExpectAgain();
      torch::autograd::Engine::get_default_engine().queue_callback([this, queued, weak, forward] {
        *queued = false;
        auto reducer = weak.lock();
        if (!reducer) return;       // nor is there `this`
        AnnounceBackward(forward);  // if it has reached no parameter
        reducer->FinishBackward(forward);
      });
    });
  };
  for (const at::Tensor& output : outputs) {
    finish_after(output);
    // If the caller changes a view in place, backward no longer comes to the view as it was here,
    // but to its base.
    if (output.is_view()) finish_after(at::Tensor(output._base()));
  }
}

void DataParallel::SyncBuffers() {
  if (!group_) return;
  const Announced announced = Announce({.kind = kSyncBuffersInJoin});
  buffers_->Run(join_context() == nullptr ? 0 : join_context()->first_live());
}

void DataParallel::BroadcastModel(int source) {
  torch::NoGradGuard no_grad;
  std::vector<at::Tensor> parameters;
  for (const auto& [name, parameter] : tensors_.parameters) {
    parameters.push_back(Stored(parameter));
  }
  c10d::broadcast_coalesced(group_, parameters, kBroadcastBytes, source);
  if (options_.broadcast_buffers) buffers_->Run(source);
}

void DataParallel::zero_grad(bool set_to_none) {
  has_unreduced_gradients_ = false;
  if (group_) AroundForward::RunZeroGrad(group_.get(), tensors_.reduced, set_to_none);
  for (auto& [name, parameter] : tensors_.trainable) {
    at::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined()) continue;
    if (set_to_none) {
      gradient.reset();
    } else {
      torch::NoGradGuard no_grad;
      gradient.zero_();
    }
  }
}

// The Reducer says "Parameter indices which did not receive grad for rank 0: 2 3"; before that, if
// TORCH_DISTRIBUTED_DEBUG is set, "Parameters which did not receive grad for rank 0: b, a".
void DataParallel::RethrowWithNames(const std::string& message) const {
  const size_t mark = message.find("indices which did not receive grad for rank");
  const size_t colon = mark == std::string::npos ? mark : message.find(':', mark);
  std::vector<std::string> names;
  if (colon != std::string::npos) {
    for (absl::string_view word : absl::StrSplit(absl::string_view(message).substr(colon + 1),
                                                 absl::ByAnyChar(" \n,."), absl::SkipEmpty())) {
      size_t index = 0;
      if (!absl::SimpleAtoi(word, &index) || index >= tensors_.reduced.size()) break;
      names.push_back(tensors_.reduced[index].first);
    }
  }
  const char* remedy =
      options_.static_graph
          ? "With static_graph the parameters in use must be those of the first iteration."
      : options_.find_unused_parameters
          ? "Backward must start from what forward returned: return every tensor that the loss is "
            "made of, in a type that ddp/tree/tree.h describes; a backward with chosen inputs "
            "must have all parameters among them."
          : "Every parameter must take part in the loss; if some do not in some iterations, set "
            "find_unused_parameters.";
  TORCH_CHECK(names.empty(), "rank ", rank(), ": in the iteration before, these parameters got no ",
              "gradient: ", absl::StrJoin(names, ", "), ". ", remedy, " ", kAfterException);
  TORCH_CHECK(false, "rank ", rank(), ": ", message);
}

c10::DDPLoggingData DataParallel::GetDDPLoggingData() const {
  return logger_ ? logger_->get_ddp_logging_data() : c10::DDPLoggingData{};
}

namespace {

const Registration<ModelWrapperRegistry> kDdp(
    "ddp",
    [](std::shared_ptr<torch::nn::Module> module, c10::intrusive_ptr<c10d::ProcessGroup> group,
       const DataParallelOptions& options) -> absl::StatusOr<std::shared_ptr<ModelWrapper>> {
      return DataParallel::Create(std::move(module), std::move(group), options);
    });

}  // namespace

int DataParallel::rank() const { return group_ ? group_->getRank() : 0; }
int DataParallel::world_size() const { return group_ ? group_->getSize() : 1; }

// What a rank without inputs does in a Join (join.h) instead of forward and backward.

absl::Status DataParallel::CheckJoin(const JoinOptions& options) const {
  if (reducer_ && has_comm_hook_ && !options.divide_by_initial_world_size) {
    return absl::InvalidArgumentError(
        "Join: the communication hook does not know how many ranks still have inputs, which "
        "divide_by_initial_world_size=false divides by; leave the hook out, or divide by all");
  }
  if (options.throw_on_early_termination || !HasSyncBatchNorm(*module_)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "Join: the module has SyncBatchNorm layers, which communicate within forward: set "
      "throw_on_early_termination");
}

// For hooks that run when a backward begins: in a Join, and where several forwards come before one.
void DataParallel::WatchBackwards(bool watch) {
  watches_backwards_ = watch;
  if (!watch) return;
  backward_hooks_.resize(tensors_.reduced.size());
  for (size_t i = 0; i < tensors_.reduced.size(); ++i) {
    const at::Tensor& parameter = tensors_.reduced[i].second;
    if (backward_hooks_[i] || !parameter.requires_grad()) continue;
    // A caller's first register_hook would remove a hook of torch::autograd::impl::hooks.
    backward_hooks_[i] =
        parameter.register_hook([this, i](const at::Tensor&) { BeforeGradient(i); });
  }
}

// Before a parameter's gradient is accumulated.
void DataParallel::BeforeGradient(size_t parameter) {
  if (!watches_backwards_ || !reducer_->Accumulates(parameter)) return;
  ExpectAgain();
  AnnounceBackward(forward_to_announce_);
}

// At the beginning of a backward.
void DataParallel::ExpectAgain() {
  const uint64_t forward = reducer_->ExpectAgain(gradient_factor_);
  if (forward != 0) forward_to_announce_ = forward;
}

// A backward begins, or ends without having reached a parameter. It is announced when it begins,
// not by its forward: forwards without a backward, several before one, and resets of gradients in
// between are what they are without a Join.
void DataParallel::AnnounceBackward(uint64_t forward) {
  if (!joined()) return;
  const bool begins = std::exchange(awaits_backward_, false);
  if (forward_to_announce_ == 0 || (options_.static_graph && forward != forward_to_announce_)) {
    // It is not reduced. What it finds reset, shadows learn from the next one that is.
    if (begins) NoteResets();
    return;
  }
  forward_to_announce_ = 0;
  const Announced announced = Announce({.kind = kBackwardInJoin});
  if (announced.is_shadowed()) {
    NoteResets();
    ShareHeld(held_);  // see ShadowBackward
  }
  held_.clear();
  reductions_at_backward_ = reducer_->reductions();
}

// Which gradients have been reset, all or some, by whomever.
void DataParallel::NoteResets() {
  held_.resize(tensors_.reduced.size(), kNonzero);
  for (size_t i = 0; i < held_.size(); ++i) {
    const at::Tensor& gradient = tensors_.reduced[i].second.grad();
    if (!gradient.defined()) {
      held_[i] = kNoGradient;
    } else if (held_[i] == kNonzero && !IsNonzero(gradient)) {
      held_[i] = kZeros;
    }
  }
}

// Collective in a Join.
void DataParallel::ShareHeld(std::vector<uint8_t>& held) const {
  MaxOverRanks(*group_, join_device(), held);
  TORCH_CHECK(std::find(held.begin(), held.end(), kMixed) == held.end(), "rank ", rank(),
              ": Join: a rank has run out with gradients of no_sync() on top of gradients that had "
              "been averaged. With divide_by_initial_world_size=false it would have to send the "
              "former alone: reset the gradients before no_sync(), or divide by all ranks");
}

bool DataParallel::IsReducing() const {
  return reducer_ && reductions_at_backward_ >= 0 &&
         reducer_->reductions() == reductions_at_backward_;
}

int64_t DataParallel::ForwardInJoin() const {
  return (torch::GradMode::is_enabled() ? kGradModeInJoin : 0) |
         (require_backward_grad_sync_ ? kGradSyncInJoin : 0);
}

void DataParallel::Shadow(const JoinOperation& operation) {
  if (operation.kind == kSyncBuffersInJoin) return SyncBuffers();
  if (operation.kind == kBackwardInJoin) return ShadowBackward();
  const c10::AutoGradMode grad_mode((operation.kind & kGradModeInJoin) != 0);
  const bool before = require_backward_grad_sync_;
  const auto restore = c10::make_scope_exit([&] { require_backward_grad_sync_ = before; });
  require_backward_grad_sync_ = (operation.kind & kGradSyncInJoin) != 0;
  PreForward();
  require_forward_param_sync_ = torch::GradMode::is_enabled() && require_backward_grad_sync_;
}

void DataParallel::ShadowBackward() {
  std::vector<uint8_t> held(tensors_.reduced.size(), kNoGradient);
  if (has_unreduced_gradients_ && gradient_factor_ != 1) {
    for (size_t i = 0; i < held_.size(); ++i) {
      if (held_[i] == kNonzero) held[i] = kMixed;
    }
  }
  ShareHeld(held);
  // What this rank has accumulated is still to be reduced. Other gradients are those of the others:
  // they go on adding to them, or have reset them.
  // Where the sum is divided by the number of ranks with inputs, this rank adds zeros to it. Of a
  // parameter that no rank uses it keeps the gradient, which a bucket's view gets from the others.
  std::vector<Kept> kept;
  for (size_t i = 0; i < held.size() && !has_unreduced_gradients_; ++i) {
    const torch::NoGradGuard no_grad;
    at::Tensor& gradient = tensors_.reduced[i].second.mutable_grad();
    if (!gradient.defined()) continue;
    if (held[i] == kNoGradient) {
      gradient.reset();
    } else if (held[i] == kZeros) {
      gradient.zero_();
    } else if (gradient_factor_ != 1) {
      const bool may_be_unused = !gradient.is_sparse() && !options_.gradient_as_bucket_view;
      const at::Tensor values = may_be_unused ? gradient.clone() : at::Tensor();
      gradient.zero_();
      if (may_be_unused) kept.push_back({gradient, gradient._version(), values});
    }
  }
  const c10::AutoGradMode grad_mode(true);
  const bool before = require_backward_grad_sync_;
  require_backward_grad_sync_ = true;
  // Also if backward throws, which ends the Join but not this object.
  const auto restore = c10::make_scope_exit([&] {
    reducer_->set_adopts_static_graph(false);
    require_backward_grad_sync_ = before;
  });
  const at::Tensor output = ShadowOutput();
  PostForward({output});
  reducer_->set_adopts_static_graph(true);
  output.backward();
  const torch::NoGradGuard no_grad;
  for (const Kept& one : kept) {
    if (one.gradient._version() == one.version) at::Tensor(one.gradient).copy_(one.values);
  }
}

// Something that backward can start from.
at::Tensor DataParallel::ShadowOutput() const {
  std::vector<at::Tensor> parameters;
  std::vector<int64_t> sparse;
  const bool finds_unused =
      options_.static_graph ? reducer_->IsFirstOfStaticGraph() : options_.find_unused_parameters;
  for (size_t i = 0; i < tensors_.reduced.size(); ++i) {
    const at::Tensor& parameter = tensors_.reduced[i].second;
    if (finds_unused || reducer_->IsUnusedInStaticGraph(i)) continue;
    parameters.push_back(parameter);
    sparse.push_back(tensors_.sparse[i]);
  }
  if (!parameters.empty()) return ZeroGradients::apply(at::TensorList(parameters), sparse);
  // This rank uses no parameter: the Reducer marks all of them at the end of backward, so that a
  // parameter that no other rank uses keeps its gradient.
  return at::zeros({}, LossOptions(tensors_.reduced[0].second)).requires_grad_().mul(1);
}

void DataParallel::FinishJoin(int source) {
  has_run_out_ |= join_context()->any_has_run_out();
  BroadcastModel(source);
}

// Once.
void DataParallel::WarnOfOptimizers() {
  if (!reducer_ || !has_run_out_ || has_warned_) return;
  has_warned_ = true;
  if (join_context()->TakesSteps() || rank() != 0) return;
  ABSL_LOG(WARNING)
      << "Join: in the one before, a rank ran out of inputs and took none of the last steps. All "
         "ranks have got the same parameters since then, but the state of an optimizer that is not "
         "sharded (momentum, the averages of Adam) is behind on that rank, so that the ranks drift "
         "apart within this Join. Make one Join around all epochs, or shard the optimizer "
         "(ZeroRedundancyOptimizer, stage 1) and list it; one without state needs neither";
}

}  // namespace ddp
