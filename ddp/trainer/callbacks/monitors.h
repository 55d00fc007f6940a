// Values about the run itself in its logs, at the steps that are recorded.
//
//   options.monitor = {.throughput = true, .memory = true};
//
// A step costs nothing between records. A record costs one exchange between the ranks for each of
// ThroughputMonitor and MemoryMonitor.
#pragma once

#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "c10/core/Device.h"
#include "ddp/trainer/callback.h"

namespace ddp::trainer {

// "lr/group_0", …: the rate of each parameter group of the optimizer in this step; of the phases
// after a task's first one "lr/group_0.NAME".
class LearningRateMonitor final : public Callback {
 public:
  std::string name() const override { return "learning_rate_monitor"; }
  absl::Status OnStepEnd(CallbackContext& run, const at::Tensor& loss) override;
};

// Measures since the record before, or the epoch's begin; evaluations and saves do not count:
// - "train/examples_per_second": of all ranks; with even_batches those that are used twice, too;
// - "train/data_wait": the share of the time, in [0, 1], in which the rank that waited longest
//   waited for its batches.
class ThroughputMonitor final : public Callback {
 public:
  std::string name() const override { return "throughput_monitor"; }
  absl::Status OnEpochBegin(CallbackContext& run) override;
  absl::Status OnStepEnd(CallbackContext& run, const at::Tensor& loss) override;

 private:
  void BeginInterval(const CallbackContext& run);

  absl::Time begin_;
  int64_t sample_ = 0;
  double data_wait_s_ = 0;
  double pause_s_ = 0;
};

// "train/pss_mib": the proportional set size (shared pages count by their share) of a rank's
// process, in MiB, mean over the ranks; "train/pss_mib_max": of the largest. Linux only: they are
// not recorded where /proc/self/smaps_rollup cannot be read on a rank. On GPUs also
// "train/device_mib" and "train/device_mib_max", likewise of DeviceMemory::now, and
// "train/device_peak_mib", the largest DeviceMemory::peak.
class MemoryMonitor final : public Callback {
 public:
  std::string name() const override { return "memory_monitor"; }
  absl::Status OnStepEnd(CallbackContext& run, const at::Tensor& loss) override;
};

// The proportional set size of this process in MiB; 0 if it is not known.
double PssMib();

// What the tensors of this process have of a device's memory, in MiB, as its caching allocator
// counts: without what this keeps for later ones. 0: the device has none, as the CPU.
struct DeviceMemory {
  double now = 0;
  double peak = 0;  // since the process began
};
DeviceMemory DeviceMemoryOf(c10::Device device);

}  // namespace ddp::trainer
