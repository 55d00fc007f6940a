// The base class of hooks that need one or more rounds of collectives per bucket, with work in
// between.
//
//   class TwiceHook : public RoundsHook {
//     struct Bucket : BucketRounds {
//       WorkPtr Next() override {
//         switch (round++) {
//           case 0: return hook->Sum(first);                        // during backward
//           case 1: second.copy_(f(first)); return hook->Sum(second);  // at the end of backward
//           default: buffer.copy_(second); return nullptr;          // the bucket's result
//         }
//       }
//     };
//     std::unique_ptr<BucketRounds> Begin(c10d::GradBucket& bucket) override { … }
//   };
//
// Collectives must be issued in one order on all ranks. A hook that starts its second collective
// when the first one completes (Future::then) issues them in completion order, which differs
// between ranks if there are several buckets. Here the first round of each bucket is issued during
// backward, in the order of buckets, and the later ones at the end of backward: round 2 of all
// buckets in order, then round 3, and so on. They run in the thread that runs backward, whose
// Work::wait advances collectives over backends that use the callers' cores.
#pragma once

#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/ivalue.h"
#include "ddp/comm_bytes.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/Work.hpp"
#include "torch/csrc/distributed/c10d/comm.hpp"

namespace ddp::hooks {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// One bucket in one backward.
class BucketRounds {
 public:
  virtual ~BucketRounds() = default;
  // Called once per round, without gradient mode; the collective of the round before has completed.
  // Starts the next one. Null: the bucket's buffer has the result. The number of rounds must be the
  // same on all ranks. May throw, as collectives do: backward then throws it.
  virtual WorkPtr Next() = 0;
};

// Belongs to one wrapper. The Reducer calls it from one thread at a time.
class RoundsHook : public c10d::CommHookInterface, public ByteCounter {
 public:
  // `group`: of two or more ranks.
  explicit RoundsHook(c10::intrusive_ptr<c10d::ProcessGroup> group) : group_(std::move(group)) {}

  // Collective. Outside of backward, too: the last bucket's call then waits for all rounds.
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) final;
  at::Tensor parseHookResult(const c10::IValue& result) final;

 protected:
  // Called for each dense bucket, in order; `bucket` lives until it returns. Null: the mean over
  // ranks in one collective, as without a hook. Sparse buckets are always averaged in this way.
  virtual std::unique_ptr<BucketRounds> Begin(c10d::GradBucket& bucket) = 0;

  // Called once in each backward, with the last bucket, dense or sparse.
  virtual void EndBuckets() {}

  // Start an all-reduce in place, and count its bytes: of the sum, and of the mean (AllReduceMean
  // in ddp/reducer.h: by the backend, or each rank divides first).
  WorkPtr Sum(const at::Tensor& tensor);
  WorkPtr Mean(const at::Tensor& tensor);

  c10d::ProcessGroup& group() const { return *group_; }

 private:
  struct Pending {
    std::unique_ptr<BucketRounds> rounds;
    WorkPtr work;
    at::Tensor buffer;
    c10::intrusive_ptr<c10::ivalue::Future> future;
  };
  void Finish();

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::vector<Pending> pending_;
};

}  // namespace ddp::hooks
