#include "ddp/data_parallel.h"

#include <algorithm>
#include <limits>
#include <set>
#include <unordered_map>

#include "ATen/Parallel.h"
#include "ATen/ops/cat.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/cores.h"
#include "base/status.h"
#include "c10/util/env.h"
#include "ddp/inline_average.h"
#include "torch/csrc/autograd/engine.h"
#include "torch/csrc/autograd/utils/lambda_post_hook.h"
#include "torch/csrc/distributed/c10d/logger.hpp"
#include "torch/csrc/distributed/c10d/reducer.hpp"
#include "torch/nn/module.h"

namespace ddp {
namespace {

// One message of rank 0's tensors at the start; PyTorch's value.
constexpr size_t kBroadcastBytes = 250 * 1024 * 1024;

// Everything that rank 0's copy replaces at the start: frozen parameters too.
NamedTensors ModelTensors(const torch::nn::Module& module) {
  NamedTensors tensors;
  for (const auto& item : module.named_parameters()) tensors.emplace_back(item.key(), item.value());
  for (const auto& item : module.named_buffers()) tensors.emplace_back(item.key(), item.value());
  return tensors;
}

std::vector<at::Tensor> Values(const NamedTensors& tensors) {
  std::vector<at::Tensor> values;
  for (const auto& [name, tensor] : tensors) values.push_back(tensor);
  return values;
}

// The Reducer listens on the parameters' gradient accumulators; a second one there would reduce
// each gradient twice.
bool HasReducer(const at::Tensor& parameter) {
  auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (accumulator == nullptr) return false;
  for (const auto& hook : accumulator->post_hooks()) {
    if (dynamic_cast<const torch::autograd::utils::LambdaPostHook*>(hook.get()) != nullptr) {
      return true;
    }
  }
  return false;
}

// Of one host's ranks: whether backward keeps all cores busy.
bool NoCoresToSpare(int ranks) { return AvailableCores() < ranks * (at::get_num_threads() + 1); }

// The Reducer asks the default backend, whatever the device.
bool MakesRoomForBuckets(c10d::ProcessGroup& group, c10::Device device) {
  if (!device.is_cpu()) return false;
  const auto backend = group.getBackend(device.type());
  if (!backend->supportsTensorAlloc(device.index())) return false;
  bool is_default = false;
  const absl::Status has_default =
      CatchStatus("", [&] { is_default = group.getDefaultBackend() == backend; });
  return has_default.ok() && is_default;
}

absl::Status CheckOptions(const DataParallelOptions& options) {
  if (!(options.bucket_cap_mb > 0) || options.bucket_cap_mb > 1 << 20) {
    return absl::InvalidArgumentError(
        absl::StrCat("bucket_cap_mb=", options.bucket_cap_mb, " must be positive, in MiB"));
  }
  if (options.static_graph && options.find_unused_parameters) {
    return absl::InvalidArgumentError(
        "static_graph finds unused parameters by itself in the first iteration; set only one of "
        "static_graph and find_unused_parameters");
  }
  return absl::OkStatus();
}

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
  DDP_RETURN_IF_ERROR(CheckOptions(options));
  if (group && group->getSize() == 1) group.reset();
  auto self =
      std::unique_ptr<DataParallel>(new DataParallel(std::move(module), std::move(group), options));
  if (!self->group_) return self;

  if (self->parameters_.empty()) {
    return absl::InvalidArgumentError(
        "DistributedDataParallel is not needed: no parameter of the module requires a gradient");
  }
  for (const auto& [name, parameter] : self->parameters_) {
    if (HasReducer(parameter)) {
      return absl::FailedPreconditionError(
          absl::StrCat("the module is wrapped already (parameter '", name,
                       "' belongs to another DistributedDataParallel); use that wrapper"));
    }
  }
  const NamedTensors tensors = ModelTensors(*self->module_);
  DDP_RETURN_IF_ERROR(VerifySameModel(*self->group_, tensors));
  DDP_RETURN_IF_ERROR(CatchStatus("giving all ranks rank 0's model", [&] {
    torch::NoGradGuard no_grad;
    c10d::broadcast_coalesced(self->group_, Values(tensors), kBroadcastBytes);
    self->BuildReducer();
  }));
  return self;
}

DataParallel::DataParallel(std::shared_ptr<torch::nn::Module> module,
                           c10::intrusive_ptr<c10d::ProcessGroup> group,
                           const DataParallelOptions& options)
    : module_(std::move(module)),
      group_(std::move(group)),
      options_(options),
      parameters_(TrainableParameters(*module_)),
      buffers_(module_->buffers()) {}

DataParallel::~DataParallel() = default;

void DataParallel::BuildReducer() {
  const auto cap = static_cast<int64_t>(options_.bucket_cap_mb * 1024 * 1024);
  const std::vector<at::Tensor> parameters = Values(parameters_);
  const std::vector<bool> expect_sparse(parameters.size(), false);
  const c10::Device device = parameters[0].device();
  const bool averages_inline = AveragesInline(*group_, device.type());
  // A first bucket that is smaller than the others has its message start early. Where that takes
  // the cores' own time, and backward has them all, it only interrupts.
  // Only for the layout made anew, which is rank 0's on all ranks: cores and threads may differ.
  const int64_t first_cap = averages_inline && NoCoresToSpare(group_->getSize())
                                ? cap
                                : std::min<int64_t>(cap, c10d::kDefaultFirstBucketBytes);
  // Buckets are laid out anew after the first iteration, in the order in which gradients came, so
  // until then one is enough; with find_unused_parameters the first layout stays.
  std::vector<size_t> limits;
  if (options_.find_unused_parameters) {
    limits = {static_cast<size_t>(c10d::kDefaultFirstBucketBytes), static_cast<size_t>(cap)};
  } else {
    limits = {std::numeric_limits<size_t>::max()};
  }
  auto [buckets, bucket_limits] =
      c10d::compute_bucket_assignment_by_size(parameters, limits, expect_sparse);
  if (MakesRoomForBuckets(*group_, device)) {
    // Unless told otherwise the Reducer does not ask for it (reducer.cpp, 2.11.0): its authors wait
    // for more experience with NCCL's memory. It asks later, too, so this stays.
    c10::utils::set_env("DDP_DISABLE_COMM_MEM", "0", /*overwrite=*/false);
  }
  std::unordered_map<size_t, std::string> names;
  for (size_t i = 0; i < parameters_.size(); ++i) names[i] = parameters_[i].first;
  // Gradients arrive roughly in the reverse of the parameters' order.
  std::reverse(buckets.begin(), buckets.end());
  reducer_ = std::make_shared<c10d::Reducer>(
      parameters, buckets, group_, expect_sparse, cap, options_.find_unused_parameters,
      options_.gradient_as_bucket_view, names, first_cap,
      /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
      /*bucket_bytes_cap_list=*/std::vector<int64_t>());
  logger_ = std::make_shared<c10d::Logger>(reducer_);
  reducer_->set_logger(logger_);
  const std::vector<int> device_ids =
      device.is_cuda() ? std::vector<int>{device.index()} : std::vector<int>();
  logger_->set_construction_data_and_log(
      module_->name(), device_ids, device_ids.empty() ? -1 : device_ids[0],
      options_.broadcast_buffers, /*has_sync_bn=*/false, options_.static_graph);
  if (averages_inline) reducer_->register_comm_hook(std::make_unique<InlineAverage>(group_));
  if (options_.static_graph) {
    reducer_->set_static_graph();
    logger_->set_static_graph();
  }
}

void DataParallel::PreForward() {
  if (!reducer_) return;
  const bool grad = torch::GradMode::is_enabled();
  TORCH_CHECK(!grad || require_backward_grad_sync_ || !options_.static_graph,
              "static_graph cannot be combined with no_sync or gradient accumulation");
  if (grad && require_backward_grad_sync_) reducer_->prepare_for_forward();
  if (grad) {
    try {
      reducer_->rebuild_buckets();
    } catch (const c10::DistError&) {
      throw;  // of another rank
    } catch (const std::exception& error) {
      RethrowWithNames(ExceptionMessage(error));
    }
  }
  if (require_forward_param_sync_ && options_.broadcast_buffers) SyncBuffers();
}

void DataParallel::PostForward(const std::vector<at::Tensor>& outputs) {
  if (!reducer_) return;
  require_forward_param_sync_ = torch::GradMode::is_enabled() && require_backward_grad_sync_;
  if (!require_forward_param_sync_) return;
  const bool walk_graph = options_.find_unused_parameters && !options_.static_graph;
  try {
    reducer_->prepare_for_backward(walk_graph ? outputs : std::vector<at::Tensor>());
  } catch (const std::exception& error) {
    RethrowWithNames(ExceptionMessage(error));
  }
  if (options_.static_graph && first_synchronized_forward_) {
    DelayAllReduceAfterFirstBackward(outputs);
  }
  first_synchronized_forward_ = false;
}

// In the first iteration of a static graph the Reducer only counts how often each parameter is
// used; it has to be told, when that backward has ended, to reduce all at once.
void DataParallel::DelayAllReduceAfterFirstBackward(const std::vector<at::Tensor>& outputs) {
  auto queued = std::make_shared<bool>(false);
  bool attached = false;
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) continue;
    attached = true;
    std::weak_ptr<c10d::Reducer> weak = reducer_;
    output.register_hook([queued, weak](const at::Tensor&) {
      if (std::exchange(*queued, true)) return;
      torch::autograd::Engine::get_default_engine().queue_callback([weak] {
        if (auto reducer = weak.lock()) reducer->delay_all_reduce();
      });
    });
  }
  TORCH_CHECK(attached,
              "static_graph: forward returned no tensor that requires a gradient; give its return "
              "type an overload of CollectTensors (ddp/outputs.h)");
}

// One message for all of them, whatever their dtypes: running statistics are a few kilobytes, so
// what a broadcast costs is its latency, and this one is waited for in every forward.
void DataParallel::SyncBuffers() {
  if (!group_ || buffers_.empty()) return;
  torch::NoGradGuard no_grad;
  std::vector<at::Tensor> bytes;
  for (const at::Tensor& buffer : buffers_) {
    bytes.push_back(buffer.contiguous().flatten().view(at::kByte));
  }
  std::vector<at::Tensor> message = {at::cat(bytes)};
  group_->broadcast(message)->wait();
  if (group_->getRank() == 0) return;
  int64_t offset = 0;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const int64_t size = bytes[i].numel();
    // A clone is aligned for any dtype; a slice of bytes is not.
    const at::Tensor theirs = message[0].narrow(0, offset, size).clone();
    buffers_[i].copy_(theirs.view(buffers_[i].scalar_type()).view(buffers_[i].sizes()));
    offset += size;
  }
}

void DataParallel::zero_grad(bool set_to_none) {
  for (auto& [name, parameter] : parameters_) {
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

// The Reducer speaks of "Parameter indices which did not receive grad for rank 0: 2 3".
void DataParallel::RethrowWithNames(const std::string& message) const {
  const size_t mark = message.find("did not receive grad for rank");
  const size_t colon = mark == std::string::npos ? mark : message.find(':', mark);
  std::vector<std::string> names;
  if (colon != std::string::npos) {
    for (absl::string_view word : absl::StrSplit(absl::string_view(message).substr(colon + 1),
                                                 absl::ByAnyChar(" \n,."), absl::SkipEmpty())) {
      size_t index = 0;
      if (!absl::SimpleAtoi(word, &index) || index >= parameters_.size()) break;
      names.push_back(parameters_[index].first);
    }
  }
  TORCH_CHECK(names.empty(), "rank ", rank(), ": in the iteration before, these parameters got no ",
              "gradient: ", absl::StrJoin(names, ", "),
              ". Every parameter must take part in the loss; if some do not in some iterations, "
              "set find_unused_parameters.");
  TORCH_CHECK(false, "rank ", rank(), ": ", message);
}

int DataParallel::rank() const { return group_ ? group_->getRank() : 0; }
int DataParallel::world_size() const { return group_ ? group_->getSize() : 1; }

}  // namespace ddp
