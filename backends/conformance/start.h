// Makes the call of a case on a c10d::Backend and checks the result.
//
//   Running running(*backend, TraitsOf("gloo"), c, salt);  // throws what the backend throws
//   absl::Status status = running.Finish();                // waits; DataLoss for a wrong result
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "backends/conformance/case.h"
#include "backends/conformance/plan.h"
#include "backends/conformance/traits.h"
#include "backends/conformance/values.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"

namespace ddp::backends::conformance {

// A tensor with guard elements around it.
struct GuardedTensor {
  at::Tensor view;      // what the backend gets
  at::Tensor base;      // allocation that contains `view`; undefined if `view` is all of it
  at::Tensor original;  // copy of `base` before the call, to detect writes outside `view`
};

// One collective under way on this rank. Not thread safe; the backend must outlive it.
class Running {
 public:
  // Collective: all ranks of `backend` start the same case with the same salt, which also
  // determines the root and the tags. `traits` must outlive this object.
  Running(c10d::Backend& backend, const Traits& traits, const Case& c, uint64_t salt);

  // Waits and checks. DataLoss if an output is wrong, or if an input or a guard element has
  // changed; otherwise the backend's error. Call it once.
  absl::Status Finish();

  const std::vector<c10::intrusive_ptr<c10d::Work>>& works() const { return works_; }
  // All bytes of the outputs, after Finish.
  std::vector<uint8_t> OutputBytes() const;

  static int Root(uint64_t salt, int group_size) {
    return static_cast<int>((salt / 7) % group_size);
  }

 private:
  GuardedTensor MakeBuffer(int64_t count) const;
  void Call();
  void SendAroundTheRing();
  void ReceiveFromAnySource();
  absl::Status Check();

  c10d::Backend& backend_;
  const Case case_;
  const uint64_t salt_;
  const Traits& traits_;
  const int root_;
  const Plan plan_;
  const Values values_;
  std::vector<GuardedTensor> inputs_;
  std::vector<GuardedTensor> outputs_;  // views of `inputs_` where the plan is in place
  // c10d takes references to these and does not document how long it keeps them.
  std::vector<at::Tensor> input_tensors_, output_tensors_;
  std::vector<std::vector<at::Tensor>> input_lists_, output_lists_;
  std::vector<int64_t> input_splits_, output_splits_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

// The c10d::ReduceOp of a reduction.
c10d::ReduceOp ToReduceOp(ReductionOp reduction, int rank);

}  // namespace ddp::backends::conformance
