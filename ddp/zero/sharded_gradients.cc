#include "ddp/zero/sharded_gradients.h"

#include <algorithm>
#include <map>
#include <utility>

#include "ATen/ops/full.h"
#include "ATen/ops/mul.h"
#include "ATen/ops/zeros.h"
#include "absl/log/absl_log.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "c10/core/GradMode.h"
#include "ddp/collective_memory.h"
#include "ddp/gradient_hooks.h"
#include "ddp/memory_order.h"
#include "ddp/reducer.h"
#include "third_party/libtorch/compat.h"
#include "torch/csrc/autograd/engine.h"
#include "torch/csrc/autograd/graph_task.h"
#include "torch/csrc/autograd/variable.h"

namespace ddp::zero {
namespace {

at::Tensor ScalarTensor(double value) {
  at::Tensor scalar = at::zeros({}, at::kDouble).fill_(value);
  scalar.unsafeGetTensorImpl()->set_wrapped_number(true);
  return scalar;
}

}  // namespace

class ShardedGradients::Hook : public ShardedGradientHook {
 public:
  Hook(ShardedGradients* owner, size_t range, int tensor)
      : owner_(owner), range_(range), tensor_(tensor) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    if (owner_->require_sync_) owner_->OnGradient(range_, tensor_);
    return outputs;
  }

 private:
  ShardedGradients* const owner_;
  const size_t range_;
  const int tensor_;
};

ShardedGradients::ShardedGradients(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                   const ZeroOptions& options, std::function<void()> announce)
    : group_(std::move(group)),
      options_(options),
      announce_(std::move(announce)),
      rank_(group_->getRank()),
      world_size_(group_->getSize()) {}

ShardedGradients::~ShardedGradients() {
  for (auto& [accumulator, hook] : hooks_) accumulator->del_post_hook(hook);
}

absl::Status ShardedGradients::CheckWhoReduces(int stage,
                                               const std::vector<NumberedParameter>& parameters) {
  for (const NumberedParameter& parameter : parameters) {
    if (!parameter.tensor.requires_grad()) continue;
    if (stage == 1) {
      if (!HasGradientHook<WrapperMark>(parameter.tensor)) continue;
      return absl::FailedPreconditionError(
          absl::StrCat("nobody would average the gradient of parameter ", parameter.number,
                       ": its wrapper has reduce_gradients=false, which is for zero.stage=2"));
    }
    if (HasReducer(parameter.tensor)) {
      return absl::FailedPreconditionError(
          absl::StrCat("the gradient of parameter ", parameter.number,
                       " is reduced by a DistributedDataParallel already; with zero.stage=2 wrap "
                       "the module with "
                       "reduce_gradients=false"));
    }
    if (HasGradientHook<ShardedGradientHook>(parameter.tensor)) {
      return absl::FailedPreconditionError(
          absl::StrCat("parameter ", parameter.number,
                       " belongs to another ZeroRedundancyOptimizer of stage 2"));
    }
  }
  return absl::OkStatus();
}

absl::Status ShardedGradients::CheckWhoReduces(int rank, const std::deque<FlatParameters>& ranges) {
  std::vector<int64_t> alone;
  bool some_are_averaged = false;
  for (const FlatParameters& range : ranges) {
    DDP_RETURN_IF_ERROR(CheckWhoReduces(/*stage=*/1, range.parameters));
    for (const NumberedParameter& parameter : range.parameters) {
      if (!parameter.tensor.requires_grad()) continue;
      if (HasReducer(parameter.tensor)) {
        some_are_averaged = true;
      } else {
        alone.push_back(parameter.number);
      }
    }
  }
  if (rank != 0 || !some_are_averaged || alone.empty()) return absl::OkStatus();
  ABSL_LOG(WARNING)
      << "ZeroRedundancyOptimizer: no DistributedDataParallel averages the gradients "
         "of parameters "
      << absl::StrJoin(alone, ", ")
      << ", as it does those of others: each rank updates its part of them by its own "
         "gradients. Wrap them, too (a module in a wrapped one's place, not `ignored`), "
         "or average their gradients before each step";
  return absl::OkStatus();
}

void ShardedGradients::RestoreHooks() {
  for (size_t i = 0; i < hooks_.size(); ++i) {
    const auto [range, index] = tensors_[i];
    // If it fails, CheckHooks says so.
    RestoreAccumulator(ranges_[range].flat->parameters[index].tensor, hooks_[i].first);
  }
}

void ShardedGradients::CheckHooks() const {
  for (size_t i = 0; i < hooks_.size(); ++i) {
    const auto [range, index] = tensors_[i];
    const NumberedParameter& parameter = ranges_[range].flat->parameters[index];
    TORCH_CHECK(
        torch::autograd::impl::try_get_grad_accumulator(parameter.tensor) == hooks_[i].first,
        "ZeroRedundancyOptimizer: parameter ", parameter.number,
        " was changed by Module::to or torch::load since the optimizer was made, and has lost its "
        "hook. After torch::load the forward of the wrapped module gives it back; make the wrapper "
        "and the optimizer after Module::to");
  }
}

void ShardedGradients::Add(const FlatParameters& flat) {
  const size_t index = ranges_.size();
  const auto tensors = flat.parameters.size();
  const Partition& partition = flat.partition;
  Range range = {
      .flat = &flat,
      .shard = at::zeros({partition.shard_size()}, flat.storage.options()),
      .averages = BackendOnCallersCores(*group_, flat.storage.device().type()).has_value(),
      .seen = std::vector<bool>(tensors),
      .used = std::vector<bool>(tensors),
      .first = tensors_.size()};
  for (const Block& block : partition.reduce_blocks()) {
    buckets_.push_back({.range = index, .block = block, .tensors = TensorsIn(partition, block)});
  }
  ranges_.push_back(std::move(range));
  for (size_t i = 0; i < tensors; ++i) {
    tensors_.push_back({.range = index, .index = static_cast<int>(i)});
    own_.insert(flat.parameters[i].tensor.unsafeGetTensorImpl());
  }
  arrival_.clear();
  bucket_order_.clear();
  OrderBuckets();
  for (size_t i = 0; i < tensors; ++i) {
    auto accumulator = torch::autograd::impl::grad_accumulator(flat.parameters[i].tensor);
    const uintptr_t hook =
        accumulator->add_post_hook(std::make_unique<Hook>(this, index, static_cast<int>(i)));
    hooks_.emplace_back(std::move(accumulator), hook);
  }
}

// A bucket is full when its first parameter's gradient has come.
void ShardedGradients::OrderBuckets() {
  std::vector<std::pair<int64_t, int64_t>> places;
  for (const Bucket& bucket : buckets_) {
    const size_t first = ranges_[bucket.range].first;
    places.emplace_back(bucket.tensors.empty() ? -1 : NumberOf(first + bucket.tensors[0]),
                        bucket.block.begin);
  }
  Reorder(OrderByRegistration(places));
}

int64_t ShardedGradients::NumberOf(size_t tensor) const {
  const auto& [range, index] = tensors_[tensor];
  return ranges_[range].flat->parameters[index].number;
}

void ShardedGradients::Reorder(const std::vector<size_t>& order) {
  std::vector<Bucket> ordered;
  for (const size_t bucket : order) ordered.push_back(std::move(buckets_[bucket]));
  buckets_ = std::move(ordered);
  Schedule();
}

std::vector<std::vector<size_t>> ShardedGradients::TensorsOfBuckets() const {
  std::vector<std::vector<size_t>> tensors_of;
  for (const Bucket& bucket : buckets_) {
    tensors_of.emplace_back();
    for (const int tensor : bucket.tensors) {
      tensors_of.back().push_back(ranges_[bucket.range].first + tensor);
    }
  }
  return tensors_of;
}

void ShardedGradients::Schedule() {
  schedule_.emplace(
      TensorsOfBuckets(), tensors_.size(),
      BucketSchedule::Events{.fill = [this](size_t bucket, size_t tensor) { Fill(bucket, tensor); },
                             .launch = [this](size_t bucket) { Launch(buckets_[bucket]); },
                             .release = [this](size_t tensor) { Release(tensor); }});
}

// Once: buckets are reduced as rank 0's gradients have completed them. It changes when buckets are
// reduced, and no sum.
void ShardedGradients::AdaptOrder() {
  if (!bucket_order_.empty()) return;
  const c10::Device device = ranges_[0].flat->storage.device();
  const auto size = static_cast<int64_t>(tensors_.size());
  std::vector<at::Tensor> message = {at::full({size}, -1, at::kLong)};
  std::copy(arrival_.begin(), arrival_.end(), message[0].mutable_data_ptr<int64_t>());
  message[0] = message[0].to(device);
  group_->broadcast(message)->wait();
  const at::Tensor order = message[0].cpu();
  std::vector<int64_t> arrival;
  for (int64_t i = 0; i < size && order.const_data_ptr<int64_t>()[i] >= 0; ++i) {
    arrival.push_back(order.const_data_ptr<int64_t>()[i]);
  }
  arrival_.clear();
  ReduceInOrder(arrival);
}

// `arrival`: indices of tensors_; none, where rank 0 has had no inputs, changes nothing.
void ShardedGradients::ReduceInOrder(const std::vector<int64_t>& arrival) {
  if (arrival.empty()) return;
  for (const int64_t tensor : arrival) bucket_order_.push_back(NumberOf(tensor));
  Reorder(OrderByArrival(TensorsOfBuckets(), tensors_.size(), arrival));
}

void ShardedGradients::RestoreBucketOrder(const std::vector<int64_t>& order) {
  const Guard guard(mutex_);
  if (!bucket_order_.empty() || in_backward_) return;
  std::map<int64_t, int64_t> index_of;  // in tensors_, by number
  for (size_t i = 0; i < tensors_.size(); ++i) index_of[NumberOf(i)] = static_cast<int64_t>(i);
  std::vector<int64_t> arrival;
  for (const int64_t number : order) {
    const auto found = index_of.find(number);
    if (found == index_of.end()) return;
    arrival.push_back(found->second);
    index_of.erase(found);  // a number that stands twice is unknown the second time
  }
  ReduceInOrder(arrival);
}

void ShardedGradients::OnGradient(size_t range, int tensor) {
  const Guard guard(mutex_);
  const c10::NoGradGuard no_grad;
  if (waits_for_end_ && expected_ == torch::autograd::get_current_graph_task_id()) return;
  BeginBackward();
  TORCH_CHECK(!schedule_->has_arrived(ranges_[range].first + tensor), "rank ", rank_,
              ": parameter ", ranges_[range].flat->parameters[tensor].number,
              " got two gradients in one backward: zero.stage=2 has sent the first one already; "
              "use zero.stage=1");
  if (bucket_order_.empty()) {
    arrival_.push_back(static_cast<int64_t>(ranges_[range].first + tensor));
  }
  Arrive(range, tensor);
}

// The caller has the lock.
void ShardedGradients::BeginBackward() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (in_backward_ && task == task_) return;
  TORCH_CHECK(!in_backward_, "rank ", rank_,
              ": a gradient has arrived, but the backward before has not ended. Either it ended "
              "with an exception: then call the optimizer's zero_grad() on all ranks before the "
              "next backward; or one backward runs within the other, which zero.stage=2 does not "
              "support: use zero.stage=1.");
  if (drops_) Reset();
  announce_();
  in_backward_ = true;
  task_ = task;
  peak_held_bytes_ = 0;
  torch::autograd::Engine::get_default_engine().queue_callback([this] { FinishBackward(); });
}

// `.grad` undefined: zeros. The caller has the lock.
void ShardedGradients::Arrive(size_t index, int tensor) {
  Range& range = ranges_[index];
  const NumberedParameter& parameter = range.flat->parameters[tensor];
  const at::Tensor gradient = parameter.tensor.grad();
  TORCH_CHECK(!gradient.defined() || !gradient.is_sparse(), "rank ", rank_, ": parameter ",
              parameter.number,
              " has a sparse gradient, which zero.stage=2 cannot cut; use zero.stage=0 or a dense "
              "gradient");
  range.seen[tensor] = gradient.defined();
  if (gradient.defined()) held_bytes_ += static_cast<int64_t>(gradient.nbytes());
  schedule_->Arrive(range.first + tensor);
  peak_held_bytes_ = std::max(peak_held_bytes_, held_bytes_);
}

void ShardedGradients::Fill(size_t bucket, size_t tensor) {
  const auto [range, index] = tensors_[tensor];
  const at::Tensor& parameter = ranges_[range].flat->parameters[index].tensor;
  if (!flat_.defined() || flat_of_ != tensor) {
    const at::Tensor& gradient = parameter.grad();
    flat_ = gradient.defined() ? FlatInMemoryOrder(parameter, gradient) : at::Tensor();
    flat_of_ = tensor;
  }
  Copy(buckets_[bucket], ranges_[range], index, flat_);
}

void ShardedGradients::Release(size_t tensor) {
  const auto [range, index] = tensors_[tensor];
  at::Tensor& gradient = ranges_[range].flat->parameters[index].tensor.mutable_grad();
  if (gradient.defined()) held_bytes_ -= static_cast<int64_t>(gradient.nbytes());
  gradient.reset();
  flat_.reset();
}

void ShardedGradients::Copy(Bucket& bucket, const Range& range, int tensor,
                            const at::Tensor& gradient) {
  const Partition& partition = range.flat->partition;
  const Block& block = bucket.block;
  if (!bucket.buffer.defined()) {
    bucket.buffer = TakeBuffer(BufferOptions(range), block.part * world_size_);
  }
  const int64_t begin = partition.offset(tensor), end = begin + partition.numel(tensor);
  // As c10d's Reducer divides, for the same bits: before the sum, unless the backend averages. What
  // is rounded to another dtype is divided in it, as the hooks do.
  const bool averages = range.averages;
  const bool copies = averages && factor_ == 1;
  const at::Tensor factor =
      copies ? at::Tensor() : ScalarTensor(averages ? factor_ : factor_ / world_size_);
  for (int rank = 0; rank < block.owners; ++rank) {
    const Overlap overlap = OverlapOf(block, rank, begin, end);
    if (overlap.begin >= overlap.end) continue;
    int64_t stop = overlap.end;
    // Parts that lie side by side are copied at once.
    while (block.stride == block.part && rank + 1 < block.owners && stop < end) {
      stop = OverlapOf(block, ++rank, begin, end).end;
    }
    at::Tensor to = bucket.buffer.narrow(
        0,
        block.stride == block.part ? overlap.begin - block.begin : rank * block.part + overlap.at,
        stop - overlap.begin);
    if (!gradient.defined()) {
      to.zero_();
      continue;
    }
    const at::Tensor from = gradient.narrow(0, overlap.begin - begin, stop - overlap.begin);
    if (copies) {
      to.copy_(from);
    } else if (to.dtype() != from.dtype()) {
      to.copy_(from);
      if (factor_ != 1) to.mul_(factor_);
      if (!averages) to.div_(world_size_);
    } else {
      at::mul_out(to, from, factor);
    }
  }
}

at::TensorOptions ShardedGradients::BufferOptions(const Range& range) const {
  const at::Tensor& storage = range.flat->storage;
  return storage.options().dtype(options_.gradient_dtype.value_or(storage.scalar_type()));
}

at::Tensor ShardedGradients::TakeBuffer(const at::TensorOptions& options, int64_t numel) {
  while (buffers_ >= BucketSchedule::kMaxBuckets && !reducing_.empty()) FinishOldest();
  ++buffers_;
  for (auto buffer = free_buffers_.begin(); buffer != free_buffers_.end(); ++buffer) {
    if (buffer->dtype() != options.dtype() || buffer->device() != options.device() ||
        buffer->numel() < numel) {
      continue;
    }
    const at::Tensor taken = *buffer;
    free_buffers_.erase(buffer);
    return taken;
  }
  // Of the largest size that this dtype needs, so that all buckets can use it.
  int64_t largest = numel;
  for (const Bucket& bucket : buckets_) {
    const at::TensorOptions others = BufferOptions(ranges_[bucket.range]);
    if (others.dtype() != options.dtype() || others.device() != options.device()) continue;
    largest = std::max(largest, bucket.block.part * world_size_);
  }
  at::Tensor buffer = AllocateForCollectives(group_.get(), largest, options);
  buffer.zero_();  // the padding is sent, too
  bucket_bytes_ += static_cast<int64_t>(buffer.nbytes());
  peak_bucket_bytes_ = std::max(peak_bucket_bytes_, bucket_bytes_);
  return buffer;
}

void ShardedGradients::Launch(Bucket& bucket) {
  Range& range = ranges_[bucket.range];
  const Block& block = bucket.block;
  // It has no tensor: all of it is padding.
  if (!bucket.buffer.defined()) {
    bucket.buffer = TakeBuffer(BufferOptions(range), block.part * world_size_);
  }
  at::Tensor input = bucket.buffer.narrow(0, 0, block.part * world_size_);
  const bool direct = rounds_ == 0 && rank_ < block.owners && input.dtype() == range.shard.dtype();
  bucket.output = direct ? range.shard.narrow(0, block.shard_begin, block.part)
                         : input.narrow(0, rank_ * block.part, block.part);
  c10d::ReduceScatterOptions options;
  if (range.averages) options.reduceOp = c10d::ReduceOp::AVG;
  CountBytes(input);
  bucket.work = group_->reduce_scatter_single(bucket.output, input, options);
  reducing_.push_back(&bucket - buckets_.data());
}

void ShardedGradients::FinishOldest() {
  Bucket& bucket = buckets_[reducing_.front()];
  bucket.work->wait();
  reducing_.pop_front();
  const Block& block = bucket.block;
  if (rank_ < block.owners) {
    at::Tensor shard = ranges_[bucket.range].shard.narrow(0, block.shard_begin, block.part);
    if (rounds_ > 0) {
      shard.add_(bucket.output);
    } else if (bucket.output.dtype() != shard.dtype()) {
      shard.copy_(bucket.output);
    }
  }
  bucket.work.reset();
  bucket.output.reset();
  free_buffers_.push_back(std::exchange(bucket.buffer, at::Tensor()));
  --buffers_;
}

void ShardedGradients::FinishBackward() {
  const Guard guard(mutex_);
  const c10::NoGradGuard no_grad;
  // After an exception above, it is still in backward: only Reset ends that.
  TORCH_CHECK(torch::autograd::get_current_node() == nullptr, "rank ", rank_,
              ": parameters got gradients in a backward that runs within another one, which "
              "zero.stage=2 does not support; use zero.stage=1");
  CheckHooks();
  std::vector<int64_t> missing;
  for (Range& range : ranges_) {
    for (size_t i = 0; i < range.seen.size(); ++i) {
      const bool has_gradient = range.flat->parameters[i].tensor.grad().defined();
      if (!range.seen[i] && !has_gradient) missing.push_back(range.flat->parameters[i].number);
    }
  }
  TORCH_CHECK(missing.empty() || options_.find_unused_parameters, "rank ", rank_,
              ": these parameters got no gradient in this backward: ", absl::StrJoin(missing, ", "),
              ". Every parameter must take part in the loss; if some do not in some iterations, "
              "set find_unused_parameters.");
  FinishRound();
}

void ShardedGradients::ReduceWithoutBackward() {
  const Guard guard(mutex_);
  const c10::NoGradGuard no_grad;
  if (drops_) Reset();
  FinishRound();
  if (options_.find_unused_parameters) return;
  // Without find_unused_parameters all ranks use all of them.
  for (Range& range : ranges_) range.used.assign(range.used.size(), true);
}

// A hook on an output runs when backward starts from it, before any parameter has its gradient.
void ShardedGradients::ExpectBackward(const NamedTensors& parameters,
                                      const std::vector<at::Tensor>& outputs) {
  if (!options_.find_unused_parameters) return;
  bool is_mine = false, is_shared = false;
  for (const auto& [name, parameter] : parameters) {
    if (own_.contains(parameter.unsafeGetTensorImpl())) {
      is_mine = true;
    } else if (parameter.requires_grad() && HasGradientHook<ShardedGradientHook>(parameter)) {
      is_shared = true;
    }
  }
  if (!is_mine) return;
  waits_for_end_ |= is_shared;
  const auto expect_from = [this](const at::Tensor& tensor) {
    // A leaf, such as a parameter, would keep the hook forever.
    if (!tensor.requires_grad() || tensor.is_leaf()) return;
    std::weak_ptr<bool> alive = alive_;
    tensor.register_hook([this, alive](const at::Tensor&) {
      if (alive.expired() || !require_sync_) return;
      // grad(), or a backward of chosen inputs: their hooks run if they are parameters.
      const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
      if (chosen != nullptr && !chosen->empty()) return;
      const int task = torch::autograd::get_current_graph_task_id();
      if (std::exchange(expected_, task) == task) return;
      torch::autograd::Engine::get_default_engine().queue_callback([this, alive, task] {
        if (!alive.expired()) FinishUnreached(task);
      });
    });
  };
  for (const at::Tensor& output : outputs) {
    expect_from(output);
    // If the caller changes a view in place, backward comes to its base instead.
    if (output.is_view()) expect_from(at::Tensor(output._base()));
  }
}

// At the end of a backward, before FinishBackward if a parameter was reached. Objects that share a
// module come here in the order in which they were made, whatever each rank's backward has reached.
void ShardedGradients::FinishUnreached(int task) {
  if (task_ == task) return;
  CheckNotBroken();
  task_ = task;
  announce_();
  ReduceWithoutBackward();
}

void ShardedGradients::CheckNotBroken() const {
  TORCH_CHECK(!in_backward_, "rank ", rank_,
              ": the last backward has ended with an exception, and its gradients are reduced in "
              "part; call the optimizer's zero_grad() on all ranks, and then the next backward");
}

void ShardedGradients::FinishBackwards() {
  CheckNotBroken();
  CheckHooks();
  // Without a wrapper that says what backward may start from, or outside of its outputs.
  if (!options_.find_unused_parameters || !require_sync_ || (rounds_ > 0 && !drops_)) return;
  announce_();
  ReduceWithoutBackward();
}

void ShardedGradients::FinishBackwardsAfter(int last_backward) {
  if (!options_.find_unused_parameters || !require_sync_ || task_ != last_backward) return;
  CheckNotBroken();
  announce_();
  ReduceWithoutBackward();
}

// Reduces what no gradient has arrived for, and ends the backward.
void ShardedGradients::FinishRound() {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    // What was accumulated without synchronisation, if anything.
    if (!schedule_->has_arrived(i)) Arrive(tensors_[i].range, tensors_[i].index);
  }
  while (!reducing_.empty()) FinishOldest();
  ShareUsed();
  schedule_->Reset();
  if (!tensors_.empty()) AdaptOrder();
  for (Range& range : ranges_) range.seen.assign(range.seen.size(), false);
  in_backward_ = false;
  ++rounds_;
}

// Drops what a backward that ended with an exception has left. Ranks whose backwards ended at
// different places have made different collectives.
void ShardedGradients::Abandon() {
  const c10::Device device = ranges_[0].flat->storage.device();
  const auto launched = static_cast<int64_t>(schedule_->launched());
  std::vector<at::Tensor> most = {at::zeros({2}, at::kLong)};
  most[0].mutable_data_ptr<int64_t>()[0] = launched;
  most[0].mutable_data_ptr<int64_t>()[1] = -launched;
  most[0] = most[0].to(device);
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  group_->allreduce(most, options)->wait();
  const at::Tensor found = most[0].cpu();
  TORCH_CHECK(found.const_data_ptr<int64_t>()[0] == -found.const_data_ptr<int64_t>()[1], "rank ",
              rank_,
              ": the last backward has ended with an exception on some ranks earlier than on "
              "others, so that their gradients do not fit together; begin again from a checkpoint");
  while (!reducing_.empty()) FinishOldest();
  for (Bucket& bucket : buckets_) {
    if (!bucket.buffer.defined()) continue;
    free_buffers_.push_back(std::exchange(bucket.buffer, at::Tensor()));
    --buffers_;
  }
  schedule_->Reset();
  for (Range& range : ranges_) range.seen.assign(range.seen.size(), false);
  arrival_.clear();
  flat_.reset();
  held_bytes_ = 0;
  in_backward_ = false;
}

void ShardedGradients::ShareUsed() {
  if (!options_.find_unused_parameters) {
    for (Range& range : ranges_) range.used = range.seen;
    return;
  }
  std::vector<int32_t> flags;
  for (const Range& range : ranges_)
    flags.insert(flags.end(), range.seen.begin(), range.seen.end());
  if (flags.empty()) return;
  const c10::Device device = ranges_[0].flat->storage.device();
  std::vector<at::Tensor> all = {at::zeros({static_cast<int64_t>(flags.size())}, at::kInt)};
  std::copy(flags.begin(), flags.end(), all[0].mutable_data_ptr<int32_t>());
  all[0] = all[0].to(device);
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  group_->allreduce(all, options)->wait();
  const at::Tensor used = all[0].cpu();
  const int32_t* flag = used.const_data_ptr<int32_t>();
  for (Range& range : ranges_) {
    for (size_t i = 0; i < range.used.size(); ++i) {
      range.used[i] = range.used[i] || *flag != 0;
      ++flag;
    }
  }
}

void ShardedGradients::Reset() {
  if (in_backward_) Abandon();
  drops_ = false;
  rounds_ = 0;
  for (Range& range : ranges_) range.used.assign(range.used.size(), false);
}

}  // namespace ddp::zero
