// Stage 2: gradients that are reduced to their owners while backward goes on, and freed. Private to
// zero_redundancy_optimizer.h.
//
//   ShardedGradients gradients(group, options);
//   gradients.Add(range);                        // from here on backward fills the shards
//   loss.backward();
//   gradients.shard(0);                          // this rank's, averaged over ranks
//   gradients.Reset();                           // the next backward starts anew
//
// A hook on each parameter's gradient accumulator copies the gradient into the buckets that it lies
// in, and releases it. A bucket that is full is reduce-scattered, in one order on all ranks, from
// the last parameters to the first; at most two buckets are in memory. At the end of backward all
// have been reduced. Later backwards add to the shards until Reset. With gradient_dtype, buckets
// have that dtype, which is sent; shards have the storage's.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ddp/comm_bytes.h"
#include "ddp/zero/flat_parameters.h"
#include "ddp/zero/options.h"
#include "third_party/libtorch/compat.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/Work.hpp"

namespace torch::autograd {
struct Node;
}

namespace ddp::zero {

// Thread-safe where backward's hooks need it: these may run in autograd's threads. Ranges that were
// added outlive it.
class ShardedGradients : public ByteCounter {
 public:
  // `group` has two ranks or more.
  ShardedGradients(c10::intrusive_ptr<c10d::ProcessGroup> group, const ZeroOptions& options);
  ~ShardedGradients();
  ShardedGradients(const ShardedGradients&) = delete;
  ShardedGradients& operator=(const ShardedGradients&) = delete;

  // The same ranges in the same order on all ranks; not during backward.
  void Add(const FlatParameters& range);

  // While false, backward accumulates whole local gradients, which the next synchronised one
  // reduces as well.
  void set_require_sync(bool require) { require_sync_ = require; }
  bool require_sync() const { return require_sync_; }

  // The mean over ranks is multiplied by it: see Joinable::SetGradientFactor.
  void set_factor(double factor) { factor_ = factor; }
  // Collective. Makes the collectives of the other ranks' backward, on a rank without a backward.
  // Adds zeros, or what was accumulated without synchronisation.
  void ReduceWithoutBackward();

  // Whether a backward has filled the shards since Reset.
  bool filled() const { return rounds_ > 0; }
  // `range` is its index in the order of Add. The average over ranks of this rank's part, and
  // whether on any rank a tensor of the range got a gradient since Reset.
  const at::Tensor& shard(size_t range) const { return ranges_[range].shard; }
  bool used(size_t range, int tensor) const { return ranges_[range].used[tensor]; }

  void Reset();

  // Maximum memory of buckets so far.
  int64_t peak_bucket_bytes() const { return peak_bucket_bytes_; }

 private:
  struct Range {
    const FlatParameters* flat = nullptr;
    at::Tensor shard;
    bool averages = false;                             // the backend: then it gets ReduceOp::AVG
    std::vector<bool> seen;                            // in the backward under way, on this rank
    std::vector<bool> used;                            // since Reset, on any rank
    std::vector<std::vector<size_t>> buckets_of = {};  // by tensor
  };
  struct Bucket {
    size_t range = 0;
    Block block;
    std::vector<int> tensors = {};  // that lie in it, in ascending order
    size_t missing = 0;             // of these, in the backward under way
    at::Tensor buffer = {};
    c10::intrusive_ptr<c10d::Work> work = nullptr;
    at::Tensor output = {};
  };
  using Guard = std::unique_lock<std::mutex>;

  void OrderBuckets();
  void OnGradient(size_t range, int tensor);
  void FinishBackward();
  void FinishRound();
  void Fill(size_t range, int tensor, const at::Tensor& gradient);
  void Copy(Bucket& bucket, const Range& range, int tensor, const at::Tensor& gradient);
  void LaunchReady();
  void Launch(Bucket& bucket);
  void FinishOldest();
  void ShareUsed();
  at::TensorOptions BufferOptions(const Range& range) const;
  at::Tensor TakeBuffer(const at::TensorOptions& options, int64_t numel);

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const ZeroOptions options_;
  const int rank_;
  const int world_size_;
  bool require_sync_ = true;
  double factor_ = 1;

  std::mutex mutex_;
  std::vector<Range> ranges_;
  std::vector<Bucket> buckets_;  // in the order of their reduction
  size_t next_ = 0;              // to be reduced
  std::deque<size_t> reducing_;
  std::vector<at::Tensor> free_buffers_;
  int buffers_ = 0;  // in use
  int64_t bucket_bytes_ = 0;
  int64_t peak_bucket_bytes_ = 0;
  bool in_backward_ = false;
  int64_t rounds_ = 0;
  std::vector<std::pair<NodePtr, uintptr_t>> hooks_;
};

}  // namespace ddp::zero
