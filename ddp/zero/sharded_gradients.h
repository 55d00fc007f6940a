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
// in, and releases it. A bucket that is full is reduce-scattered, in one order on all ranks: in the
// first backward from the last parameters to the first, then in the order in which rank 0's
// gradients of that backward completed them. At most two buckets are in use (bucket_schedule.h),
// and at most two of each dtype in memory. At the end of backward all have been reduced. Later
// backwards add to the shards until Reset. With gradient_dtype, buckets have that dtype, which is
// sent; shards have the storage's.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "ddp/comm_bytes.h"
#include "ddp/model_tensors.h"
#include "ddp/zero/bucket_schedule.h"
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
  // `group` has two ranks or more. `announce` is called before the first collective of a backward,
  // on the thread that runs it.
  ShardedGradients(c10::intrusive_ptr<c10d::ProcessGroup> group, const ZeroOptions& options,
                   std::function<void()> announce);
  ~ShardedGradients();
  ShardedGradients(const ShardedGradients&) = delete;
  ShardedGradients& operator=(const ShardedGradients&) = delete;

  // FailedPrecondition, with the number: another object reduces a parameter's gradient, in stage 2;
  // in stage 1: nobody would, since the wrapper leaves that to the optimizer.
  static absl::Status CheckWhoReduces(int stage, const std::vector<NumberedParameter>& parameters);

  // Checks the same in stage 1 before the first step, since a wrapper may have come after the
  // optimizer. Rank 0 also warns of parameters, by name, which no wrapper averages, where one
  // averages others.
  static absl::Status CheckWhoReduces(int rank, const std::deque<FlatParameters>& ranges);

  // The same ranges in the same order on all ranks; not during backward.
  void Add(const FlatParameters& range);
  // Call it before a forward: hooks that torch::load or Module::to have taken from parameters are
  // theirs again (gradient_hooks.h).
  void RestoreHooks();
  // Throws c10::Error, with the number, if a parameter has lost its hook.
  void CheckHooks() const;

  // While false, backward accumulates whole local gradients, which the next synchronised one
  // reduces as well.
  void set_require_sync(bool require) { require_sync_ = require; }
  bool require_sync() const { return require_sync_; }

  // The mean over ranks is multiplied by it: see Joinable::SetGradientFactor.
  void set_factor(double factor) { factor_ = factor; }
  // Collective. Makes the collectives of the other ranks' backward, on a rank without a backward.
  // Adds zeros, or what was accumulated without synchronisation.
  void ReduceWithoutBackward();
  // Call it with find_unused_parameters: `outputs` are those of a module with these trainable
  // parameters. A backward from one of them that reaches no parameter takes part as
  // ReduceWithoutBackward, if one of the module's is in the ranges. If another object reduces some
  // of them, gradients are kept until the end of each backward from `outputs` from here on: ranks
  // that use different parameters would reduce those of both objects in different orders.
  void ExpectBackward(const NamedTensors& parameters, const std::vector<at::Tensor>& outputs);
  // Collective before shards are used. With find_unused_parameters, a rank whose backward has not
  // been synchronised at all takes part in that of the others. Throws c10::Error if a backward
  // has ended with an exception.
  void FinishBackwards();
  // Autograd's number of the last synchronised backward that this object has taken part in.
  int last_backward() const { return task_; }
  // The same for one backward, which has just ended, when last_backward() before it is known: other
  // backwards may have been synchronised since Reset.
  void FinishBackwardsAfter(int last_backward);
  // The numbers of the parameters in the order in which their gradients came in the first backward,
  // once buckets are reduced in that order.
  const std::vector<int64_t>& bucket_order() const { return bucket_order_; }
  // Reduces buckets in this order from the first backward on. Call it before that backward, with
  // the same order on all ranks. An order with a number that is not here changes nothing.
  void RestoreBucketOrder(const std::vector<int64_t>& order);
  // Whether a backward is under way, or has ended with an exception.
  bool in_backward() const { return in_backward_; }

  // Whether a backward has filled the shards since Reset.
  bool filled() const { return rounds_ > 0; }
  // `range` is its index in the order of Add. The average over ranks of this rank's part, and
  // whether on any rank a tensor of the range got a gradient since Reset.
  const at::Tensor& shard(size_t range) const { return ranges_[range].shard; }
  bool used(size_t range, int tensor) const { return ranges_[range].used[tensor]; }

  // Collective if the last backward has ended with an exception: then all that has been reduced
  // since the Reset before is dropped, on all ranks. Throws c10::Error if ranks have reduced
  // different parts of it.
  void Reset();
  // The shards are not finite on some rank: the next backward begins with Reset.
  void DropBeforeNextBackward() { drops_ = true; }

  // Maximum memory of buckets so far.
  int64_t peak_bucket_bytes() const { return peak_bucket_bytes_; }
  // Maximum of whole gradients that waited for their buckets (bucket_schedule.h) in the last
  // backward.
  int64_t peak_held_bytes() const { return peak_held_bytes_; }

 private:
  struct Range {
    const FlatParameters* flat = nullptr;
    at::Tensor shard;
    bool averages = false;   // the backend: then it gets ReduceOp::AVG
    std::vector<bool> seen;  // in the backward under way, on this rank
    std::vector<bool> used;  // since Reset, on any rank
    size_t first = 0;        // tensor, in tensors_
  };
  // A tensor of a range.
  struct Tensor {
    size_t range = 0;
    int index = 0;
  };
  struct Bucket {
    size_t range = 0;
    Block block;
    std::vector<int> tensors = {};  // of the range, that lie in it, in ascending order
    at::Tensor buffer = {};
    c10::intrusive_ptr<c10d::Work> work = nullptr;
    at::Tensor output = {};
  };
  using Guard = std::unique_lock<std::mutex>;

  class Hook;

  void OrderBuckets();
  int64_t NumberOf(size_t tensor) const;
  void Reorder(const std::vector<size_t>& order);
  std::vector<std::vector<size_t>> TensorsOfBuckets() const;
  void Schedule();
  void AdaptOrder();
  void ReduceInOrder(const std::vector<int64_t>& arrival);
  void OnGradient(size_t range, int tensor);
  void BeginBackward();
  void FinishBackward();
  void FinishUnreached(int task);
  void CheckNotBroken() const;
  void FinishRound();
  void Abandon();
  void Arrive(size_t range, int tensor);
  void Fill(size_t bucket, size_t tensor);
  void Release(size_t tensor);
  void Copy(Bucket& bucket, const Range& range, int tensor, const at::Tensor& gradient);
  void Launch(Bucket& bucket);
  void FinishOldest();
  void ShareUsed();
  at::TensorOptions BufferOptions(const Range& range) const;
  at::Tensor TakeBuffer(const at::TensorOptions& options, int64_t numel);

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const ZeroOptions options_;
  const std::function<void()> announce_;
  const int rank_;
  const int world_size_;
  bool require_sync_ = true;
  double factor_ = 1;

  std::mutex mutex_;
  std::vector<Range> ranges_;
  std::vector<Tensor> tensors_;
  std::unordered_set<const c10::TensorImpl*> own_;  // parameters
  std::vector<Bucket> buckets_;                     // in the order of their reduction
  std::optional<BucketSchedule> schedule_;
  // Tensors in the order in which gradients arrive, until buckets are in that order on all ranks.
  std::vector<int64_t> arrival_;
  std::vector<int64_t> bucket_order_;  // empty: that of registration
  // The gradient that Fill copies from, in memory order.
  at::Tensor flat_;
  size_t flat_of_ = 0;
  std::deque<size_t> reducing_;
  std::vector<at::Tensor> free_buffers_;
  int buffers_ = 0;  // in use
  int64_t bucket_bytes_ = 0;
  int64_t peak_bucket_bytes_ = 0;
  int64_t held_bytes_ = 0;
  int64_t peak_held_bytes_ = 0;
  bool in_backward_ = false;
  int task_ = -1;               // autograd's number of the backward under way, or of the last one
  int expected_ = -1;           // of the last backward that ExpectBackward has seen
  bool waits_for_end_ = false;  // see ExpectBackward
  bool drops_ = false;
  int64_t rounds_ = 0;
  std::vector<std::pair<NodePtr, uintptr_t>> hooks_;  // by tensor
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace ddp::zero
