// Gives all ranks the buffers of one of them, as DistributedDataParallel does before each forward.
// Private to data_parallel.h.
//
//   BufferBroadcast broadcast(group, tensors.buffers, /*verified=*/true);
//   broadcast.Run(/*source=*/0);  // on all ranks
//
// Autograd counts a tensor's versions, and refuses a backward that needs a value which was written
// since. batch_norm writes running statistics without a new version, as no backward in training
// needs them, so several forwards may come before one backward. A broadcast keeps to that: it
// raises the version of a buffer only if the module has raised it, here or on the source, since the
// broadcast before. (Between accelerators, reading what the source says would wait for the device:
// there, only if it was raised here.)
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/util/intrusive_ptr.h"
#include "ddp/model_tensors.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace ddp {

// Thread-compatible.
class BufferBroadcast {
 public:
  // `verified`: all ranks are known to have buffers of the same names, shapes and dtypes. If not,
  // the first Run compares them.
  BufferBroadcast(c10::intrusive_ptr<c10d::ProcessGroup> group, NamedTensors buffers,
                  bool verified);

  // Collective: one message per device for all dtypes. Running statistics are a few kilobytes, so
  // latency dominates, and every forward waits for this. An expanded buffer stays expanded. Shapes
  // may change later, on all ranks alike. Throws c10::Error, by name: buffers that differ between
  // ranks, at the first Run or, on the CPU, since then; a buffer that is not dense; and if
  // communication fails.
  void Run(int source);

 private:
  void OnCpu(const std::vector<size_t>& indices, int source);
  void OnAccelerator(const std::vector<size_t>& indices, int source);
  at::Tensor StoredOf(size_t index) const;
  bool IsNewVersion(size_t index) const;
  void Agree(const std::vector<size_t>& indices, uint64_t layout, int64_t bytes);
  std::string Changes(const std::vector<size_t>& indices) const;

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const NamedTensors buffers_;
  bool verified_;
  std::vector<int64_t> versions_;  // after the Run before
  // The shapes that all ranks have on the CPU; none before the first Run.
  std::vector<std::string> shapes_;
  uint64_t layout_ = 0;  // a hash of shapes and dtypes
  int64_t bytes_ = 0;
};

}  // namespace ddp
