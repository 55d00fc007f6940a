#include "ddp/zero/sharded_gradients.h"

#include <algorithm>

#include "ATen/ops/mul.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "ddp/collective_memory.h"
#include "ddp/comm_hook.h"
#include "ddp/memory_order.h"
#include "third_party/libtorch/compat.h"
#include "torch/csrc/autograd/engine.h"
#include "torch/csrc/autograd/utils/lambda_post_hook.h"
#include "torch/csrc/autograd/variable.h"

namespace ddp::zero {
namespace {

// One is filled while the other is reduced.
constexpr int kMaxBuffers = 2;

at::Tensor ScalarTensor(double value) {
  at::Tensor scalar = at::zeros({}, at::kDouble).fill_(value);
  scalar.unsafeGetTensorImpl()->set_wrapped_number(true);
  return scalar;
}

}  // namespace

ShardedGradients::ShardedGradients(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                   const ZeroOptions& options)
    : group_(std::move(group)),
      options_(options),
      rank_(group_->getRank()),
      world_size_(group_->getSize()) {}

ShardedGradients::~ShardedGradients() {
  for (auto& [accumulator, hook] : hooks_) accumulator->del_post_hook(hook);
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
      .used = std::vector<bool>(tensors)};
  for (const Block& block : partition.reduce_blocks()) {
    Bucket bucket = {.range = index, .block = block};
    for (size_t i = 0; i < tensors; ++i) {
      const int64_t begin = partition.offset(static_cast<int>(i));
      const int64_t end = begin + partition.numel(static_cast<int>(i));
      for (int rank = 0; rank < block.owners; ++rank) {
        const Overlap overlap = OverlapOf(block, rank, begin, end);
        if (overlap.begin >= overlap.end) continue;
        bucket.tensors.push_back(static_cast<int>(i));
        break;
      }
    }
    bucket.missing = bucket.tensors.size();
    buckets_.push_back(std::move(bucket));
  }
  ranges_.push_back(std::move(range));
  OrderBuckets();
  for (size_t i = 0; i < tensors; ++i) {
    auto accumulator = torch::autograd::impl::grad_accumulator(flat.parameters[i].tensor);
    const uintptr_t hook =
        accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
            [this, index, i](const torch::autograd::variable_list& outputs,
                             const torch::autograd::variable_list&) {
              if (require_sync_) OnGradient(index, static_cast<int>(i));
              return outputs;
            }));
    hooks_.emplace_back(std::move(accumulator), hook);
  }
}

// Gradients arrive roughly in the reverse of the parameters' order: a bucket is full when its first
// parameter's has come.
void ShardedGradients::OrderBuckets() {
  const auto first = [this](const Bucket& bucket) {
    if (bucket.tensors.empty()) return int64_t{-1};
    return ranges_[bucket.range].flat->parameters[bucket.tensors[0]].number;
  };
  std::stable_sort(buckets_.begin(), buckets_.end(), [&](const Bucket& a, const Bucket& b) {
    const int64_t first_of_a = first(a), first_of_b = first(b);
    if (first_of_a != first_of_b) return first_of_a > first_of_b;
    return a.range == b.range && a.block.begin > b.block.begin;
  });
  for (Range& range : ranges_) {
    range.buckets_of.assign(range.flat->parameters.size(), {});
  }
  for (size_t i = 0; i < buckets_.size(); ++i) {
    for (int tensor : buckets_[i].tensors) {
      ranges_[buckets_[i].range].buckets_of[tensor].push_back(i);
    }
  }
}

void ShardedGradients::OnGradient(size_t range, int tensor) {
  const Guard guard(mutex_);
  const c10::NoGradGuard no_grad;
  if (!in_backward_) {
    in_backward_ = true;
    torch::autograd::Engine::get_default_engine().queue_callback([this] { FinishBackward(); });
  }
  TORCH_CHECK(!ranges_[range].seen[tensor], "rank ", rank_, ": parameter ",
              ranges_[range].flat->parameters[tensor].number,
              " got two gradients in one backward: zero.stage=2 has sent the first one already; "
              "use zero.stage=1");
  at::Tensor& gradient = ranges_[range].flat->parameters[tensor].tensor.mutable_grad();
  Fill(range, tensor, gradient);
  gradient.reset();
}

// `gradient` undefined: zeros.
void ShardedGradients::Fill(size_t index, int tensor, const at::Tensor& gradient) {
  Range& range = ranges_[index];
  const NumberedParameter& parameter = range.flat->parameters[tensor];
  TORCH_CHECK(!gradient.defined() || !gradient.is_sparse(), "rank ", rank_, ": parameter ",
              parameter.number,
              " has a sparse gradient, which zero.stage=2 cannot cut; use zero.stage=0 or a dense "
              "gradient");
  at::Tensor flat;
  if (gradient.defined()) flat = FlatInMemoryOrder(parameter.tensor, gradient);
  for (size_t i : range.buckets_of[tensor]) {
    Copy(buckets_[i], range, tensor, flat);
    --buckets_[i].missing;
    // At once: a large tensor lies in many buckets.
    LaunchReady();
  }
  range.seen[tensor] = gradient.defined();
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
  while (buffers_ >= kMaxBuffers && !reducing_.empty()) FinishOldest();
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

void ShardedGradients::LaunchReady() {
  while (next_ < buckets_.size() && buckets_[next_].missing == 0) Launch(buckets_[next_++]);
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
  std::vector<int64_t> missing;
  for (Range& range : ranges_) {
    for (size_t i = 0; i < range.seen.size(); ++i) {
      const bool has_gradient = range.flat->parameters[i].tensor.grad().defined();
      if (!range.seen[i] && !has_gradient) missing.push_back(range.flat->parameters[i].number);
    }
  }
  in_backward_ = false;
  TORCH_CHECK(missing.empty() || options_.find_unused_parameters, "rank ", rank_,
              ": these parameters got no gradient in this backward: ", absl::StrJoin(missing, ", "),
              ". Every parameter must take part in the loss; if some do not in some iterations, "
              "set find_unused_parameters.");
  FinishRound();
}

void ShardedGradients::ReduceWithoutBackward() {
  const Guard guard(mutex_);
  const c10::NoGradGuard no_grad;
  FinishRound();
  if (options_.find_unused_parameters) return;
  // Without find_unused_parameters all ranks use all of them.
  for (Range& range : ranges_) range.used.assign(range.used.size(), true);
}

// Reduces what no gradient has arrived for, and ends the backward.
void ShardedGradients::FinishRound() {
  for (size_t r = 0; r < ranges_.size(); ++r) {
    for (size_t i = 0; i < ranges_[r].seen.size(); ++i) {
      if (ranges_[r].seen[i]) continue;
      // What was accumulated without synchronisation, if anything.
      at::Tensor& gradient = ranges_[r].flat->parameters[i].tensor.mutable_grad();
      Fill(r, static_cast<int>(i), gradient);
      gradient.reset();
    }
  }
  while (!reducing_.empty()) FinishOldest();
  ShareUsed();
  next_ = 0;
  for (Bucket& bucket : buckets_) bucket.missing = bucket.tensors.size();
  for (Range& range : ranges_) range.seen.assign(range.seen.size(), false);
  ++rounds_;
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
  rounds_ = 0;
  for (Range& range : ranges_) range.used.assign(range.used.size(), false);
}

}  // namespace ddp::zero
