// The c10d::Work of one operation of the backend mpi.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "torch/csrc/distributed/c10d/Work.hpp"

namespace ddp::backends::mpi {

// Thread-safe. The value of the future is the same as with c10d's Gloo: the output tensors, or a
// list of lists of them if there are several lists.
class MpiWork : public c10d::Work {
 public:
  MpiWork(int rank, c10d::OpType type, const char* title, uint64_t sequence_number,
          const std::vector<at::Tensor>& inputs, std::vector<std::vector<at::Tensor>> outputs);

  // Called once, by the progress thread. A failure becomes a c10::DistBackendError.
  void Done(const absl::Status& status, int source);

  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return sequence_number_; }

 private:
  const uint64_t sequence_number_;
  const std::vector<std::vector<at::Tensor>> outputs_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  int source_ = -1;  // guarded by mutex_
};

}  // namespace ddp::backends::mpi
